"""Attends queries over ragged rows, for decoding, questions and chunks.

Queries are `[B, Q, S, D]`, the entries of one layer a flat `[C, D]` store: row `r = b * H + h` (one sequence
and KV head) owns the room `offsets[r] .. offsets[r + 1]` and holds `lengths[r]` entries at its beginning. The
result is `[B, Q, S, D]`. Counts replace a mask (`seen_RS`): query `s` of a row sees the first `seen` entries
of the row, whatever their positions, and under a sliding window only those of recent positions.

On a CPU plain softmax attention runs as a few dense calls (`retain.cache.equal_rows`), and a decoding step
appends and attends in one (`retain.cache.step_rows`). Everything else (CUDA,
soft caps, sinks, windows, many short rows) is the op `retain.kernels.ragged_attention`, which is also the
definition.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.cache.equal_rows import attend_runs, find_runs, fits
from retain.cache.layer_store import Store
from retain.cache.store import RaggedStore
from retain.kernels.backend import Path
from retain.kernels.ragged_attention import merged, path_of, ragged_attention
from retain.kernels.ragged_attention.pages import Pages

# Names of the paths in reports.
CALLED = {"triton": "Triton kernels over ragged rows", "reference": "plain PyTorch over ragged rows"}


def attend(
    queries_BQSD: Float[Tensor, "B Q S D"],
    keys_CD: Float[Tensor, "C D"],
    values_CD: Float[Tensor, "C D"],
    offsets_R1: Int[Tensor, " R1"],
    lengths_R: Int[Tensor, " R"],
    seen_RS: Int[Tensor, "R S"],
    *,
    scaling: float,
    soft_cap: float | None = None,
    sinks_Q: Float[Tensor, " Q"] | None = None,
    window: int | None = None,
    positions_C: Int[Tensor, " C"] | None = None,
    query_positions_BS: Int[Tensor, "B S"] | None = None,
    pages: Pages | None = None,
    log_weight_C: Float[Tensor, " C"] | None = None,
) -> Float[Tensor, "B Q S D"]:
    """Softmax attention of each query over the first `seen` entries of its row.

    The formula, the arguments and what is refused stand at the op `retain.kernels.ragged_attention`. Pass a
    store's own `pages`, or the offsets are read, which waits for the device.
    """
    if soft_cap is None and sinks_Q is None and window is None and not queries_BQSD.is_cuda:
        runs = None
        if pages is not None and path_of(keys_CD, values_CD) == "reference":
            runs = find_runs(pages, keys_CD, values_CD, seen_RS, queries_BQSD.shape[1], log_weight_C)
        if runs is not None and fits(runs, queries_BQSD):
            return attend_runs(queries_BQSD, runs, seen_RS, scaling)
    return ragged_attention(
        queries_BQSD,
        keys_CD,
        values_CD,
        offsets_R1,
        lengths_R,
        seen_RS,
        scaling=scaling,
        soft_cap=soft_cap,
        sinks_Q=sinks_Q,
        window=window,
        positions_C=positions_C,
        query_positions_BS=query_positions_BS,
        pages=pages,
        log_weight_C=log_weight_C,
    )


def attend_store(
    store: Store,
    queries_BQSD: Float[Tensor, "B Q S D"],
    seen_RS: Int[Tensor, "R S"],
    *,
    sinks_Q: Float[Tensor, " Q"] | None = None,
    window: int | None = None,
    query_positions_BS: Int[Tensor, "B S"] | None = None,
    **how: Any,
) -> Float[Tensor, "B Q S D"]:
    """Attention of new tokens' queries over what a layer holds: where some of it is packed, over either part,
    merged by the log-sum-exp of their logits.

    Args:
        store: to which the tokens were appended.
        seen_RS: as `append_` said: of the plain entries, behind all that is packed; 0 on padding.
        **how: the scaling and the soft cap.
    """

    def over(part: RaggedStore) -> dict[str, Any]:
        """Arguments of attention over one part."""
        return {
            "window": window,
            "positions_C": None if window is None else part.positions_C,
            "query_positions_BS": query_positions_BS,
            "pages": part.pages,
            "log_weight_C": part.log_weight_C,
            **how,
        }

    plain, packed = store.plain, store.packed
    columns = plain.keys_CD, plain.values_CD, plain.offsets_R1, plain.lengths_R, seen_RS
    if packed is None:
        return attend(queries_BQSD, *columns, **over(plain), sinks_Q=sinks_Q)
    all_RS = torch.where(seen_RS > 0, packed.lengths_R[:, None].to(seen_RS.dtype), 0)
    codes = *packed.codes, packed.offsets_R1, packed.lengths_R, all_RS
    outs, lses = zip(
        ragged_attention(queries_BQSD, *columns, **over(plain), with_lse=True),
        ragged_attention(queries_BQSD, *codes, **over(packed), with_lse=True),
        strict=True,
    )
    return merged(list(outs), list(lses), sinks_Q)


def path_named(path: Path) -> str:
    """Name of a path in reports."""
    return CALLED[path]
