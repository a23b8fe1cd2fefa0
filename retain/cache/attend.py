"""Attends queries over ragged rows, for decoding, questions and chunks.

Queries are `[B, Q, S, D]`, the entries of one layer a flat `[C, D]` store: row `r = b * H + h` (one sequence
and KV head) owns the room `offsets[r] .. offsets[r + 1]` and holds `lengths[r]` entries at its beginning. The
result is `[B, Q, S, D]`. Counts replace a mask (`seen_RS`): query `s` of a row sees the first `seen` entries
of the row, whatever their positions.

On a CPU plain softmax attention runs as a few dense calls, and a decoding step appends and attends in one
(`retain.cache.equal_rows`). Everything else (CUDA, soft caps, sinks, many short rows, codes) is the op
`retain.kernels.ragged_attention`, which is also the definition.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.cache.equal_rows import attend_runs, find_runs
from retain.cache.store import RaggedStore
from retain.kernels.ragged_attention import merged, path_of, ragged_attention


def attend(
    store: RaggedStore,
    queries_BQSD: Float[Tensor, "B Q S D"],
    seen_RS: Int[Tensor, "R S"],
    *,
    with_lse: bool = False,
    **how: Any,
) -> Any:
    """Softmax attention of each query over the first `seen` entries of its row.

    Args:
        store: plain or of codes.
        with_lse: also return the log-sum-exp of each query's logits.
        **how: `scaling`, `soft_cap` and `sinks_Q`, as the op takes them.
    """
    keys, values = (store.keys_CD, store.values_CD) if store.codec is None else store.codes
    runs, special = None, (how.get("soft_cap"), how.get("sinks_Q"), with_lse or None)
    if store.codec is None and store.device.type == "cpu" and all(one is None for one in special):
        kinds = {queries_BQSD.dtype, store.keys_CD.dtype, store.values_CD.dtype}
        # Dense calls want one precision, and no gradients, which a store does not have.
        forced = path_of(store.keys_CD, store.values_CD) != "reference"
        if len(kinds) == 1 and not queries_BQSD.requires_grad and not forced:
            runs = find_runs(store, seen_RS, queries_BQSD.shape[1])
    if runs:
        return attend_runs(queries_BQSD, runs, seen_RS, how["scaling"])
    rows = store.offsets_R1, seen_RS, store.pages
    found = ragged_attention(queries_BQSD, keys, values, *rows, log_weight_C=store.log_weight_C, **how)
    return found if with_lse else found[0]


def attend_store(
    store: RaggedStore,
    queries_BQSD: Float[Tensor, "B Q S D"],
    seen_RS: Int[Tensor, "R S"],
    *,
    sinks_Q: Float[Tensor, " Q"] | None = None,
    **how: Any,
) -> Float[Tensor, "B Q S D"]:
    """Attention of new tokens' queries over what a layer holds: where some of it is packed, over either part,
    merged by the log-sum-exp of their logits.

    Args:
        store: to which the tokens were appended.
        seen_RS: as `append_` said: of the plain entries; 0 on padding.
        **how: the rest of what `attend` takes.
    """
    packed = store.packed
    if packed is None:
        return attend(store, queries_BQSD, seen_RS, sinks_Q=sinks_Q, **how)
    all_RS = torch.where(seen_RS > 0, packed.lengths_R[:, None].to(seen_RS.dtype), 0)
    parts = [(store, seen_RS), (packed, all_RS)]
    outs, lses = zip(
        *(attend(part, queries_BQSD, sees_RS, with_lse=True, **how) for part, sees_RS in parts), strict=True
    )
    return merged(list(outs), list(lses), sinks_Q)
