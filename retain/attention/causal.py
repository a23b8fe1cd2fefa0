"""Computes causal attention of whole sequences, and of what is read behind one, with no matrix of all pairs.

Whatever PyTorch has a fast path for takes it whole, and the rest goes through the same function a few queries
at a time, under a mask of bounded size; caps and sinks go through `gated_attention`, without a gate. No
gradient is meant to pass, and nothing here knows transformers.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from retain.kernels.gated_attention import gated_attention

# Numbers of a mask that may exist at once, and fewest queries that are taken together: without a window,
# and with one.
MASK, ROWS = 2**22, (16, 128)


def causal_attention(
    queries_BQSD: Float[Tensor, "B Q S D"],
    keys_BHTD: Float[Tensor, "B H T D"],
    values_BHTV: Float[Tensor, "B H T V"],
    *,
    scaling: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_Q: Float[Tensor, " Q"] | None = None,
) -> Float[Tensor, "B Q S V"]:
    """Attention of the last S of T entries to all before: `softmax_{i <= j}(cap(scaling q_j . k_i)) v_i`.

    Args:
        scaling: factor on the logits.
        window: a query sees the last `window` entries, itself included; None: all.
        soft_cap: bound on the logits; None: none.
        sinks_Q: one extra logit per query head; None: none.
    """
    S, T = queries_BQSD.shape[2], keys_BHTD.shape[2]
    if window is not None and window >= T:
        window = None
    special = soft_cap is not None or sinks_Q is not None
    how: dict[str, Any] = {"scaling": scaling, "soft_cap": soft_cap}
    how["sinks_Q"] = None if sinks_Q is None else sinks_Q.detach()
    if special and window is None:
        return gated_attention(queries_BQSD, keys_BHTD, values_BHTV, **how)
    if window is None and S == T:
        grouped = queries_BQSD.shape[1] != keys_BHTD.shape[1]
        return scaled_dot_product_attention(
            queries_BQSD, keys_BHTD, values_BHTV, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    # Of a window, as many queries at once as it is long: half of what is multiplied is seen.
    at_once = MASK // T if window is None else min(window, MASK // (2 * window))
    first, pieces = T - S, []
    for queries in queries_BQSD.split(max(ROWS[window is not None], at_once), 2):
        stop = first + queries.shape[2]
        low = 0 if window is None else max(0, first - window + 1)
        keys, values = (x[:, :, low:stop] for x in (keys_BHTD, values_BHTV))
        if special and window is not None:  # gates hide all that the window does not protect from them
            shut_BHT = keys.new_full(keys.shape[:3], float("-inf"), dtype=torch.float32)
            pieces.append(gated_attention(queries, keys, values, shut_BHT, protected=window, **how))
        else:
            pieces.append(_masked(queries, keys, values, scaling, window))
        first = stop
    return torch.cat(pieces, 2)


def _masked(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None) -> Tensor:
    """Attention of the last queries of these entries under a mask."""
    entry_T = torch.arange(keys.shape[2], device=keys.device)
    place_S1 = entry_T[-queries.shape[2] :, None]
    mask_ST = entry_T <= place_S1
    if window is not None:
        mask_ST &= entry_T > place_S1 - window
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1 and keys.is_cuda:  # no fast kernel there takes a mask and fewer KV heads
        keys, values, groups = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1), 1
    return scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask_ST, scale=scaling, enable_gqa=groups > 1
    )
