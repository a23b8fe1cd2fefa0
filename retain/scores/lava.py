"""LAVa: scores entries by the window's mean attention times the largest value of the head.

Made to compete across the heads of a layer: a head with larger values gets more. The value enters as one
number a head, so inside a head the order is that of the attention; it has not gone through W_O, so the unit
is `mass`. `entropy_weight` makes LAVa's layer budgets.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.config import Many
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.window import Odd, Pooling, group_heads, pool_entries, window_received


@family(
    "mass",
    needs=("window",),
    paper="LAVa: Layer-wise KV Cache Eviction with Dynamic Budget Allocation, arXiv 2509.09754",
)
def lava(
    evidence: Evidence,
    *,
    window: Many = 32,
    pool: Pooling = "max",
    pool_size: Odd = 7,
    value_max_over: Literal["prefix", "all"] = "prefix",
) -> Score:
    """Score by an upper bound of what an entry's eviction costs the layer's output.

    `s_h[i] = Vbar_h * max_{q in group(h)} pool(mean_{j in window} a_qj)[i]`, with
    `Vbar_h = max_k ||v_h[k]||_1` over the entries before the window (`prefix`, released) or over all (`all`,
    paper, Eq. 5; only this one makes the paper's bound on the output true, since window entries are read
    too). A head that is all window has nothing before it: its maximum is over all its entries either way.
    What a head does not hold is in no maximum.

    The maximum over the group is the released code's; the pool (max, 7) is the paper's and the released
    code's.

    Returns:
        score in `mass` (times the size of the head's largest value).
    """
    (sum_BQT,) = window_received(evidence, window, "sum")
    mass_BQT = pool_entries(sum_BQT / window, pool, pool_size, window=window, place_BT=evidence.place_BT)
    mass_BHT = group_heads(mass_BQT, evidence.num_heads).amax(2)
    size_BHT = torch.linalg.vector_norm(evidence.values_BHTD, 1, dim=-1, dtype=mass_BHT.dtype)
    exists_BHT = evidence.exists_BHT
    counted_BHT = exists_BHT
    if value_max_over == "prefix":
        before_BHT = exists_BHT.clone()
        before_BHT[..., evidence.num_seen - window :] = False
        counted_BHT = torch.where(before_BHT.any(-1, keepdim=True), before_BHT, exists_BHT)
    largest_BH1 = size_BHT.masked_fill(~counted_BHT, 0.0).amax(-1, keepdim=True)
    return masked_score(mass_BHT * largest_BH1, exists_BHT, "mass", window=window)


def entropy_weight(
    score_BHT: Float[Tensor, "B H T"], competes_BHT: Bool[Tensor, "B H T"]
) -> Float[Tensor, " B"]:
    """Compute LAVa's weight of a layer: the entropy of its scores, `-sum p log(p + tiny)`, `p = s / (sum s +
    tiny)`.

    Over the entries of all heads that compete (not padding, not protected), in float64. Its code divides by
    `ln(H * m)`, its paper by `H * N`; both are the same for all layers of a prompt, and change no share. A
    score below zero counts as zero.
    """
    tiny = 1e-16
    score = score_BHT.double().masked_fill(~competes_BHT, 0.0).clamp_min(0.0).flatten(1)
    p = score / (score.sum(-1, keepdim=True) + tiny)
    return -(p * (p + tiny).log()).sum(-1).clamp_max(0.0)
