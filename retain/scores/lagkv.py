"""LagKV: scores entries by how far their key and value stray from the range of the entries that come next.

Reads keys and values only. A head's entries are taken in blocks, and each block is compared with the next.
The last blocks, which none follows, come before all others, and the first entries before those.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from retain.config import Many, Whole
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family

# Blocks that are compared at once, which bounds the float32 copies.
BLOCKS = 64


@family(
    "rank",
    paper="LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important, "
    "arXiv 2504.04704",
)
def lagkv(evidence: Evidence, *, lag: Many = 128, sinks: Whole = 4) -> Score:
    """Score by the spread, over channels, of the key and the value within the range of the next block.

    With an entry's place among those that its head holds, blocks are `lag` entries each, from `sinks` on. For
    block p that a whole block follows, channel by channel,
    `z_i = (k_i - min_{p+1} k) / (max_{p+1} k - min_{p+1} k)`, and
    `s_i = (softmax_{i in p} std(z^K_i) + softmax_{i in p} std(z^V_i)) / 2`.
    The score is the entry's rank by s in its block, over `lag`, so that all blocks lose alike. Entries that
    no whole block follows score 1, the sinks 2.

    As in the released press of kvpress 0.5.5, but for a channel that does not vary in the next block, which
    is left out here and gives NaN there. The authors' code never looks at what it has kept again; here every
    eviction starts from what a head holds.

    Args:
        evidence: the layer; its keys, after RoPE, as cached.
        lag: entries of a block.
        sinks: first entries, which are in no block.

    Returns:
        score in `rank`, within 0 .. 2.
    """
    exists_BHT = evidence.exists_BHT
    # The entries that a head holds first, in order; what follows them is of no block.
    order_BHT = (~exists_BHT).sort(dim=-1, stable=True).indices
    count_BH1 = exists_BHT.sum(-1, keepdim=True)
    blocks = (evidence.num_seen - sinks) // lag
    score_BHT = torch.ones_like(exists_BHT, dtype=torch.float32)
    score_BHT[..., :sinks] = 2.0
    if blocks > 1:
        parts = []
        for first in range(0, blocks - 1, BLOCKS):  # and one more, with which the last is compared
            last = min(first + BLOCKS, blocks - 1) + 1
            at_BHN1 = order_BHT[..., sinks + first * lag : sinks + last * lag, None]
            spread = [
                _spread(states.gather(2, at_BHN1.expand(-1, -1, -1, states.shape[-1])), lag)
                for states in (evidence.keys_BHTD, evidence.values_BHTD)
            ]
            parts.append((spread[0] + spread[1]) / 2)
        score_BHPL = torch.cat(parts, dim=2)
        score_BHPL = score_BHPL.argsort(dim=-1, stable=True).argsort(dim=-1) / lag
        whole_BHP = sinks + torch.arange(2, blocks + 1, device=exists_BHT.device) * lag <= count_BH1
        score_BHPL = score_BHPL.masked_fill(~whole_BHP[..., None], 1.0)
        score_BHT[..., sinks : sinks + (blocks - 1) * lag] = score_BHPL.flatten(2)
    values_BHT = torch.empty_like(score_BHT).scatter_(-1, order_BHT, score_BHT)
    return masked_score(values_BHT, exists_BHT, "rank")


def _spread(states_BHND: Float[Tensor, "B H N D"], lag: int) -> Float[Tensor, "B H P lag"]:
    """Softmax over each block of the spread over channels within the range of the next; all but the last."""
    states_BHND = states_BHND.to(torch.promote_types(states_BHND.dtype, torch.float32))
    block_BHPLD = states_BHND.unflatten(2, (-1, lag))
    next_BHPLD = block_BHPLD[:, :, 1:]
    least_BHP1D, most_BHP1D = next_BHPLD.amin(3, keepdim=True), next_BHPLD.amax(3, keepdim=True)
    range_BHP1D = most_BHP1D - least_BHP1D
    within = (block_BHPLD[:, :, :-1] - least_BHP1D) / range_BHP1D
    still = torch.finfo(within.dtype).eps * torch.maximum(least_BHP1D.abs(), most_BHP1D.abs())
    return _deviation(within, ~(range_BHP1D <= still)).softmax(-1)


def _deviation(x_BHPLD: Tensor, counts_BHP1D: Tensor) -> Tensor:
    """Standard deviation over the channels that count (unbiased), 0 where fewer than two do."""
    number = counts_BHP1D.sum(-1)
    x_BHPLD = x_BHPLD.masked_fill(~counts_BHP1D, 0.0)
    mean = x_BHPLD.sum(-1) / number.clamp_min(1)
    square = (x_BHPLD - mean[..., None]).masked_fill(~counts_BHP1D, 0.0).square().sum(-1)
    return (square / (number - 1).clamp_min(1)).sqrt()
