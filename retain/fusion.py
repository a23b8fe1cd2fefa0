"""Fuses an observed score and a learned score into one.

Scores are compared only in the same unit; `rank_blend` blends unlike ones. `max` keeps an entry that either
side rates high: the learned risk is the prior for what a short window under-observes. Every fusion reads one
layer alone, so that a cascade can decide layer by layer, and only entries that the head holds.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from retain.attention.ranking import rank_entries
from retain.evidence import Score
from retain.process.registry import lookup


def fuse(observed: Score | None, learned: Score | None, how: str = "max", *, weight: float = 0.5) -> Score:
    """Fuse two scores of one layer.

    With `o` observed, `l` learned, and `w` the weight of the learned side:

    - `max`: `max(o, l)`; one unit.
    - `sum`: `o + l`; one unit. Between `max` and twice `max`; of two entries with equal learned
      risk, the one with more observed risk comes first.
    - `observed`, `learned`: that one alone.
    - `rank_blend`: `(1-w) * rank(o) + w * rank(l)`, where `rank` is the share of the head's other entries
      that rank below (0..1, ties to the later position); any units; the result is in `rank`.

    Args:
        observed: score over queries already seen; None if there is none.
        learned: a gate's score; None if there is none.
        how: which fusion.
        weight: of the learned side in `rank_blend`, in [0, 1].

    Returns:
        the fused score.

    Raises:
        ValueError: if a score is missing, or the units do not fit the fusion.
    """
    function = lookup(how, FUSIONS, what="fusion")
    for side, score, alone in (("observed", observed, "learned"), ("learned", learned, "observed")):
        if how == side and score is not None:
            return score
        if score is None and how != alone:
            step = "pass gates" if side == "learned" else "name an observed score"
            raise ValueError(
                f"fusion {how!r} needs the {side} score and there is none: {step}, or use fusion {alone!r}."
            )
    assert observed is not None and learned is not None and function is not None
    o_BHT, l_BHT = observed.values_BHT, learned.values_BHT
    if o_BHT.shape != l_BHT.shape:
        raise ValueError(
            f"observed scores {list(o_BHT.shape)} and learned scores {list(l_BHT.shape)} are not of the same "
            "entries [B, H, T]."
        )
    alike = observed.unit == learned.unit and (how != "sum" or observed.unit != "rank")
    if how != "rank_blend" and not alike:
        raise ValueError(
            f"fusion {how!r} takes numbers of one unit (of risk or mass, if added), and the observed score "
            f"is in {observed.unit!r} while the learned one is in {learned.unit!r}: use an observed score in "
            f"{learned.unit!r} (observed_risk is in 'risk'), or fusion 'rank_blend', which takes any units."
        )
    fused_BHT = function(o_BHT, l_BHT, weight)
    # NaN of either side stays, so that selection refuses it by name (ranks and masks would hide it).
    missing_BHT = o_BHT.isneginf()
    nan_BHT = (o_BHT.isnan() | l_BHT.isnan()) & ~missing_BHT
    fused_BHT = fused_BHT.masked_fill(missing_BHT, float("-inf")).masked_fill(nan_BHT, float("nan"))
    return Score(fused_BHT, "rank" if how == "rank_blend" else observed.unit)


def _rank_blend(o_BHT: Tensor, l_BHT: Tensor, weight: float) -> Tensor:
    return (1 - weight) * _rank_share(o_BHT) + weight * _rank_share(l_BHT)


def _rank_share(values_BHT: Tensor) -> Tensor:
    """Share of the head's other entries that rank below: 1 for the best, 0 for the worst that exists."""
    others_BH1 = (values_BHT > float("-inf")).sum(-1, keepdim=True) - 1
    return (others_BH1 - rank_entries(values_BHT)).float() / others_BH1.clamp_min(1)


# Of observed scores, learned scores, and the weight of the latter; None: one of them as it is.
FUSIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor] | None] = {
    "max": lambda o_BHT, l_BHT, weight: torch.maximum(o_BHT, l_BHT),
    "sum": lambda o_BHT, l_BHT, weight: o_BHT + l_BHT,
    "observed": None,
    "learned": None,
    "rank_blend": _rank_blend,
}
