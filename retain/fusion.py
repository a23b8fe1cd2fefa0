"""Fuses an observed score and a learned score into one.

Scores are fused only in the same unit. `max` keeps an entry that either side rates high: the learned risk is
the prior for risks that a short window under-observes. Every fusion reads one layer alone, so that a cascade
can decide layer by layer, and only entries that the head holds.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from retain.evidence import Score
from retain.process.registry import lookup

# Functions of observed and learned scores.
FUSIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max": torch.maximum,
    "sum": torch.add,
    "observed": lambda o_BHT, l_BHT: o_BHT,
    "learned": lambda o_BHT, l_BHT: l_BHT,
}


def fuse(observed: Score | None, learned: Score | None, how: str = "max") -> Score:
    """Fuse two scores of one layer.

    With `o` observed and `l` learned:

    - `max`: `max(o, l)`; one unit.
    - `sum`: `o + l`; one unit, risk or mass. Between `max` and twice `max`; of two entries with equal learned
      risk, the one with more observed risk comes first.
    - `observed`, `learned`: that one alone.

    Args:
        observed: score over queries already seen; None if there is none.
        learned: a gate's score; None if there is none.
        how: which fusion.

    Raises:
        ValueError: if a score is missing, or the units do not fit the fusion.
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
    if observed.unit != learned.unit or (how == "sum" and observed.unit == "rank"):
        raise ValueError(
            f"fusion {how!r} wants two scores in one unit{', risk or mass' if how == 'sum' else ''}, and the "
            f"observed one is in {observed.unit!r}, the learned one in {learned.unit!r}: take another "
            "observed score (observed_risk is in 'risk'), or fusion 'learned'."
        )
    missing_BHT = o_BHT.isneginf()
    fused_BHT = function(o_BHT, l_BHT).masked_fill(missing_BHT, float("-inf"))
    return Score(fused_BHT, observed.unit)
