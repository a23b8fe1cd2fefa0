"""Decodes a token over the rows of a store on a CPU, in one call a layer: append, then attend.

Runs of equal rows are dense calls of PyTorch (`retain.cache.equal_rows`). Rows of many lengths, soft caps,
sinks and windows take the op in C++ (`retain.kernels.decode_step`), once a compiled step has built it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from retain.cache.equal_rows import Run, attend_runs, find_runs
from retain.cache.layout import normal_tensors
from retain.cache.store import RaggedStore
from retain.kernels.decode_step import build
from retain.kernels.ragged_attention import path_of


class StepRows:
    """The rows of one layer for decoding steps; good until its store is laid out anew.

    Args:
        store: of the layer.
        runs: its rows as runs; None: the op in C++ runs.
        how: scaling, soft cap and window of its attention; 0: there is none.

    Attributes:
        positions_R, last_B: of the token that comes, int32 a row and int64 a sequence; set before each step.
        queries: collects the queries of steps; None: nobody looks at them.
    """

    positions_R: Tensor
    last_B: Tensor
    queries: list[Tensor] | None = None

    @normal_tensors()
    def __init__(self, store: RaggedStore, runs: list[Run] | None, how: tuple[float, float, int]):
        self.runs, self.how = runs, how
        self.next_R, self.lengths_R = store.offsets_R1[:-1] + store.lengths_R, store.lengths_R
        self.columns = store.keys_CD, store.values_CD, store.positions_C
        self.offsets_R1, self.log_weight_C = store.offsets_R1, store.log_weight_C
        self.zero_1 = torch.zeros(1, dtype=torch.int64)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, dense: Any, given: Mapping[str, Any]
    ) -> tuple[Tensor, None]:
        """As `retain.hf.intercept.interceptor.Step.attend` is called; the output is `[B, 1, Q, V]`."""
        if self.queries is not None:
            self.queries.append(query)
        self.lengths_R.add_(1)
        if self.runs is None:
            rows = self.offsets_R1, self.lengths_R, self.zero_1, self.last_B, self.log_weight_C
            how = (given.get("s_aux"), *self.how, None, None, None, None, (), 0, 1)
            return torch.ops.retain.decode_step.default(query, key, value, *self.columns, *rows, *how), None
        keys_CD, values_CV, positions_C = self.columns
        R = self.next_R.shape[0]
        keys_CD.index_copy_(0, self.next_R, key.reshape(R, -1))
        values_CV.index_copy_(0, self.next_R, value.reshape(R, -1))
        positions_C.index_copy_(0, self.next_R, self.positions_R)
        self.next_R.add_(1)
        for run in self.runs:
            run.length += 1
        out_BQ1V = attend_runs(query, self.runs, self.lengths_R[:, None], self.how[0])
        return out_BQ1V.transpose(1, 2), None


def step_rows_of(
    store: RaggedStore, *, scaling: float, soft_cap: float | None, window: int | None, sinks: bool
) -> StepRows | None:
    """The rows of a store for decoding steps; None: it is on a GPU, or no way here is short."""
    if store.device.type != "cpu" or path_of(store.keys_CD, store.values_CD) != "reference":
        return None
    runs = None
    if not (soft_cap or window or sinks):
        columns = store.keys_CD, store.values_CD, store.lengths_R[:, None]
        runs = find_runs(store.pages, *columns, 1, store.log_weight_C)
    if build.is_there() and (runs is None or len(runs) > 1):
        runs = None
    elif runs is None:
        return None
    return StepRows(store, runs, (scaling, soft_cap or 0.0, window or 0))
