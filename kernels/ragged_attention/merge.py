"""Merges attention over several stores that hold parts of the same rows."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def merged(
    outs: Sequence[Float[Tensor, "B Q S V"]],
    lses: Sequence[Float[Tensor, "B Q S"]],
    sinks_Q: Float[Tensor, " Q"] | None = None,
) -> Float[Tensor, "B Q S V"]:
    """Attention over the entries of all stores, from its result over each of them.

    `out = sum_t exp(lse_t - lse) out_t` with `lse = log(exp(sink) + sum_t exp(lse_t))`, where `t` runs over
    stores, and no `exp(sink)` without sinks. A query that sees nothing in any store gives zeros.

    Args:
        outs: of each store, the output of `ragged_attention`, called without sinks.
        lses: of each store, the log-sum-exp that came with it.
        sinks_Q: one more logit per query head, counted once over all stores.

    Returns:
        the output, in the precision of the first; added up in float32 at least.

    Raises:
        ValueError: no stores, or not one log-sum-exp for each output.

    Examples:
        >>> outs = [torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2)]
        >>> merged(outs, [torch.full((1, 1, 1), 0.5)] * 2).tolist()
        [[[[0.5, 0.5]]]]
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"{len(outs)} outputs and {len(lses)} log-sum-exps of stores: pass one of each for every store, "
            "as ragged_attention(..., with_lse=True) returns them."
        )
    dtype = torch.promote_types(outs[0].dtype, torch.float32)
    every_TBQS = torch.stack([lse_BQS.to(dtype) for lse_BQS in lses])
    lse_BQS = every_TBQS.logsumexp(0)
    if sinks_Q is not None:
        lse_BQS = torch.logaddexp(lse_BQS, sinks_Q.to(dtype)[:, None])
    # Where nothing is seen, -inf less -inf is nothing to go on with.
    share_TBQS = (every_TBQS - lse_BQS.clamp(min=torch.finfo(dtype).min)).exp_()
    out_BQSV = torch.zeros_like(outs[0], dtype=dtype)
    for out, share_BQS in zip(outs, share_TBQS, strict=True):
        out_BQSV.addcmul_(out.to(dtype), share_BQS[..., None])
    return out_BQSV.to(outs[0].dtype)
