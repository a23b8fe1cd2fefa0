"""Fuses an observed score and a learned score into one.

Scores are compared only in the same unit; `rank_blend` blends unlike ones. `max` keeps an entry that either
side rates high: the learned risk is the prior for what a short window under-observes. Every fusion reads one
layer alone, so that a cascade can decide layer by layer, and only entries that the head holds.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from retain.evidence import Score
from retain.ranking import rank_entries
from retain.registry import check_choice, lookup

# Fusions whose weight a calibration can fit (the weight of `veto` is always stated), and the name of that
# weight.
WEIGHTED = ("log_linear", "rank_blend")
CALIBRATED = "calibrated"
# Fusions that take two scores in `risk`, and no others.
IN_RISK = ("log_linear", "prior", "veto")


def fuse(
    observed: Score | None, learned: Score | None, how: str = "max", *, weight: float | str | Tensor = 0.5
) -> Score:
    """Fuse two scores of one layer.

    With `o` observed, `l` learned, `w` the weight of the learned side, and means over the entries that the
    head holds:

    - `max`: `max(o, l)`; one unit.
    - `sum`: `o + l`; one unit. Between `max` and twice `max`; of two entries with equal learned
      risk, the one with more observed risk comes first.
    - `observed`, `learned`: that one alone.
    - `prior`: `max(o, l * mean(o) / mean(l))`, both in `risk`: the floor of DefensiveKV (arXiv 2510.13334),
      which lifts unobserved entries to the head's mean, with the gate redistributing that mean. A constant
      gate gives exactly that floor; the scale of the gate has no effect.
    - `veto`: `min(o, l)` for the `round(w * n)` of the head's `n` entries that the gate ranks lowest (ties:
      the earlier position is lower; rounded as float64, half to even), `o` for the others; both in `risk`.
      The gate can lower a score but not raise one.
    - `log_linear`: `o^(1-w) * l^w`, both in `risk`; for 0 < w < 1 an entry that either side calls 0 scores 0.
    - `rank_blend`: `(1-w) * rank(o) + w * rank(l)`, where `rank` is the share of the head's other entries
      that rank below (0..1, ties to the later position); any units; the result is in `rank`.

    Args:
        observed: score over queries already seen; None if there is none.
        learned: a gate's score; None if there is none.
        how: which fusion.
        weight: of the learned side in `log_linear`, `rank_blend` and `veto`, in [0, 1]: one number, or one
            per KV head `[H]`; `calibrated` (not for `veto`): the one per KV head that the learned score
            brings (`train/calibration/fit.py`).

    Returns:
        the fused score.

    Raises:
        ValueError: if a score is missing, the units do not fit the fusion, or weights are to be the
            calibrated ones and there are none.
    """
    function = lookup(how, FUSIONS, what="fusion")
    for side, score, alone in (("observed", observed, "learned"), ("learned", learned, "observed")):
        if score is None and how != alone:
            step = "pass gates" if side == "learned" else "name an observed score"
            raise ValueError(
                f"fusion {how!r} needs the {side} score and there is none: {step}, or use fusion {alone!r}."
            )
    if observed is None or learned is None:
        only = observed or learned
        assert only is not None
        return only
    o_BHT, l_BHT = observed.values_BHT, learned.values_BHT
    if o_BHT.shape != l_BHT.shape:
        raise ValueError(
            f"observed scores {list(o_BHT.shape)} and learned scores {list(l_BHT.shape)} are not of the same "
            "entries [B, H, T]."
        )
    if how in ("observed", "learned"):
        return observed if how == "observed" else learned
    _check_units(how, observed.unit, learned.unit)
    if isinstance(weight, str) and how in WEIGHTED:
        known = learned.fusion_weights or {}
        if weight != CALIBRATED or how not in known:
            raise ValueError(
                f"weight {weight!r} for fusion {how!r}: it is a number in 0..1, or {CALIBRATED!r} where the "
                f"gates were given weights for it (these have them for: {', '.join(known) or 'none'}); train "
                "them with calibration.fusion_weights true."
            )
        weight = known[how]
    if isinstance(weight, Tensor) and weight.dim() == 1:
        weight = weight[:, None]
    fused_BHT = function(o_BHT, l_BHT, weight)
    # NaN of either side stays, so that selection refuses it by name (ranks and masks would hide it).
    missing_BHT = o_BHT.isneginf()
    nan_BHT = (o_BHT.isnan() | l_BHT.isnan()) & ~missing_BHT
    fused_BHT = fused_BHT.masked_fill(missing_BHT, float("-inf")).masked_fill(nan_BHT, float("nan"))
    return Score(fused_BHT, "rank" if how == "rank_blend" else observed.unit)


def _check_units(how: str, observed: str, learned: str) -> None:
    """Refuse units that a fusion does not take."""
    both = f"the observed score is in {observed!r} while the learned one is in {learned!r}: use "
    if how == "max" and observed != learned:
        raise ValueError(
            f"fusion 'max' compares numbers, and {both}an observed score in {learned!r} (observed_risk is in "
            "'risk'), or fusion 'rank_blend', which takes any units."
        )
    if how == "sum" and (observed != learned or observed == "rank"):
        raise ValueError(
            f"fusion 'sum' adds numbers of one unit, and {both}an observed score in {learned!r}, both in "
            "risk or in mass, or fusion 'rank_blend', which takes any units."
        )
    if how in IN_RISK and (observed, learned) != ("risk", "risk"):
        raise ValueError(
            f"fusion {how!r} takes two scores in 'risk'; got {observed!r} and {learned!r}: use observed_risk "
            "and a risk gate, or fusion 'rank_blend', which takes any units."
        )


def floor(score: Score, kind: str | None) -> Score:
    """Lift every entry of a head to a prior: `mean: max(s_h[i], mean_i s_h[i])` over the entries that exist.

    The prior of DefensiveKV (arXiv 2510.13334) for entries that the window did not observe. It makes ties, so
    `retain/policy.py` lets a floored score share a budget between heads, and the score before the floor order
    each head. `kind` None: no floor.
    """
    check_choice("floor", kind, ("mean", None))
    if kind is None:
        return score
    values_BHT = score.values_BHT
    missing_BHT = ~(values_BHT > float("-inf"))
    mean_BH1 = _mean_held(values_BHT, missing_BHT)
    return Score(torch.maximum(values_BHT, mean_BH1).masked_fill(missing_BHT, float("-inf")), score.unit)


def _mean_held(values_BHT: Tensor, missing_BHT: Tensor) -> Tensor:
    """Mean over the entries that a head holds, `[B, H, 1]`; 0 for a head that holds none.

    Summed in float64, so that it does not depend on the order of the sum, or on how many columns stand
    between the entries: heads whose means are equal stay equal, and their ties go by position.
    """
    total_BH1 = values_BHT.masked_fill(missing_BHT, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    return (total_BH1 / (~missing_BHT).sum(-1, keepdim=True).clamp_min(1)).float()


def _log_linear(o_BHT: Tensor, l_BHT: Tensor, weight: float | Tensor) -> Tensor:
    return o_BHT.clamp_min(0.0) ** (1 - weight) * l_BHT.clamp_min(0.0) ** weight


def _prior(o_BHT: Tensor, l_BHT: Tensor, weight: float | Tensor) -> Tensor:
    missing_BHT = o_BHT.isneginf()
    # NaN has no part in the means: it would spread to entries that are not to blame.
    blank_BHT = missing_BHT | o_BHT.isnan() | l_BHT.isnan()
    o_BHT = o_BHT.masked_fill(blank_BHT, 0.0)
    l_BHT = l_BHT.masked_fill(blank_BHT, 0.0).clamp_min(0.0)
    # As shares of the head's largest: means near either end of float32 are neither lost nor infinite.
    top_BH1 = l_BHT.amax(-1, keepdim=True)
    share_BHT = torch.where(top_BH1 == 0, 1.0, l_BHT / top_BH1)
    relative_BHT = share_BHT / _mean_held(share_BHT, missing_BHT)
    return torch.maximum(o_BHT, relative_BHT * _mean_held(o_BHT, missing_BHT))


def _veto(o_BHT: Tensor, l_BHT: Tensor, weight: float | str | Tensor) -> Tensor:
    if isinstance(weight, str):
        raise ValueError(
            f"weight {weight!r} for fusion 'veto': no calibration fits one; state the share of a head's "
            "entries that the gate may veto, a number in 0..1."
        )
    missing_BHT = o_BHT.isneginf()
    held_BH1 = (~missing_BHT).sum(-1, keepdim=True)
    # In float64: float32 is off by entries in a share of millions.
    share = weight.double() if isinstance(weight, Tensor) else weight
    vetoed_BH1 = (share * held_BH1.double()).round().long()
    lowest_BHT = rank_entries(l_BHT.masked_fill(missing_BHT, float("-inf"))) >= held_BH1 - vetoed_BH1
    return torch.where(lowest_BHT, torch.minimum(o_BHT, l_BHT), o_BHT)


def _rank_blend(o_BHT: Tensor, l_BHT: Tensor, weight: float | Tensor) -> Tensor:
    return (1 - weight) * _rank_share(o_BHT) + weight * _rank_share(l_BHT)


def _rank_share(values_BHT: Tensor) -> Tensor:
    """Share of the head's other entries that rank below: 1 for the best, 0 for the worst that exists."""
    others_BH1 = (values_BHT > float("-inf")).sum(-1, keepdim=True) - 1
    return (others_BH1 - rank_entries(values_BHT)).float() / others_BH1.clamp_min(1)


# Of observed scores, learned scores, and the weight of the latter.
FUSIONS: dict[str, Callable[..., Tensor]] = {
    "max": lambda o_BHT, l_BHT, weight: torch.maximum(o_BHT, l_BHT),
    "sum": lambda o_BHT, l_BHT, weight: o_BHT + l_BHT,
    "observed": lambda o_BHT, l_BHT, weight: o_BHT,
    "learned": lambda o_BHT, l_BHT, weight: l_BHT,
    "prior": _prior,
    "veto": _veto,
    "log_linear": _log_linear,
    "rank_blend": _rank_blend,
}
