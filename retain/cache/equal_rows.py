"""Attends over the rows of a ragged store by a few dense calls, on a CPU; and decodes tokens there.

Neighbouring rows of equal room and length are a *run*: one strided `[rows, length, D]` view of the store,
which PyTorch's attention reads without a copy. `retain.kernels.ragged_attention` is the definition; it is
several times slower here.

A token is decoded in one call a layer: append, then attend (`StepRows`), by runs or, where rows have many
lengths, soft caps, sinks or windows, by the op in C++ (`retain.kernels.decode_step`), once a compiled step
has built it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from retain.cache.layout import normal_tensors
from retain.cache.store import RaggedStore
from retain.kernels.decode_step import build
from retain.kernels.ragged_attention import path_of
from retain.kernels.ragged_attention.pages import PAGE

# Runs up to which each is a call of its own: a call costs some 20 us, a page of the op's batch 2.
MOST_RUNS = 64
# Elements of the mask of several queries, at most: it becomes as many float32.
MOST_MASKED = 1 << 22


@dataclass(eq=False)
class Run:
    """Neighbouring rows of equal room and equal length.

    Args:
        row: the first of them.
        keys, values, log_weight: views of the store; the last is added to the logits; None: nothing is.
        length: entries that each row holds.
    """

    row: int
    keys: Float[Tensor, "rows 1 room D"]
    values: Float[Tensor, "rows 1 room V"]
    length: int
    log_weight: Float[Tensor, "rows 1 1 room"] | None = None


def find_runs(store: RaggedStore, seen_RS: Int[Tensor, "R S"], num_queries: int) -> list[Run] | None:
    """Group the rows of a plain store into runs, by what their last queries see; None if the op is faster.

    Args:
        seen_RS: entries that each query sees.
        num_queries: query heads of a sequence.
    """
    S, counts, log_weight_C = seen_RS.shape[1], store.pages.counts, store.log_weight_C
    seen = seen_RS[:, -1].tolist()
    if S > 1 and (num_queries * S * max(seen, default=0) > MOST_MASKED or not bool(seen_RS.all())):
        return None
    rows = zip(range(len(seen)), accumulate(counts, initial=0), counts, seen, strict=False)
    found = [list(alike) for _, alike in groupby(rows, key=lambda row: row[2:])]
    if len(found) > MOST_RUNS:
        return None
    runs = []
    for alike in found:
        row, start, count, length = alike[0]
        places = slice(PAGE * start, PAGE * (start + len(alike) * count))
        keys, values = (
            column[places].view(len(alike), 1, PAGE * count, column.shape[1])
            for column in (store.keys_CD, store.values_CD)
        )
        weights = None
        if log_weight_C is not None:
            weights = log_weight_C[places].view(len(alike), 1, 1, PAGE * count)
        runs.append(Run(row, keys, values, length, weights))
    return runs


def attend_runs(
    queries_BQSD: Float[Tensor, "B Q S D"], runs: Sequence[Run], seen_RS: Int[Tensor, "R S"], scaling: float
) -> Float[Tensor, "B Q S V"]:
    """Softmax attention of each query over what its row holds: one call a run.

    The G query heads of a row are G queries of it, so that no key is repeated.
    """
    B, Q, S, D = queries_BQSD.shape
    R = seen_RS.shape[0]
    group = B * Q // R
    queries_RMD = queries_BQSD.reshape(R, 1, group * S, D)
    outs = []
    for run in runs:
        rows, length, mask = run.keys.shape[0], run.length, None
        queries = queries_RMD if rows == R else queries_RMD.narrow(0, run.row, rows)
        if not length:  # padding, which sees nothing
            outs.append(queries.new_zeros(rows, 1, group * S, run.values.shape[-1]))
            continue
        if S > 1:
            mask = torch.arange(length) < seen_RS.narrow(0, run.row, rows)[:, None, :, None]
            mask = mask.repeat(1, 1, group, 1)
        if run.log_weight is not None:
            weights = run.log_weight.narrow(3, 0, length)
            if queries.dtype == torch.float64:
                weights = weights.double()
            mask = weights if mask is None else weights.where(mask, float("-inf"))
        keys, values = run.keys.narrow(2, 0, length), run.values.narrow(2, 0, length)
        outs.append(scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.view(B, Q, S, out.shape[-1])


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


def step_rows_of(store: RaggedStore, scaling: float, soft_cap: float | None, sinks: bool) -> StepRows | None:
    """The rows of a store for decoding steps; None: it is on a GPU, or no way here is short."""
    if store.device.type != "cpu" or path_of(store.keys_CD, store.values_CD) != "reference":
        return None
    runs = None
    if not (soft_cap or sinks):
        runs = find_runs(store, store.lengths_R[:, None], 1)
    if build.is_there() and (runs is None or len(runs) > 1):
        runs = None
    elif runs is None:
        return None
    return StepRows(store, runs, (scaling, soft_cap or 0.0, 0))
