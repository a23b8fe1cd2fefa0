"""Calibrates trained gates: comparable scores across heads, and thresholds.

Everything is fitted on every second held-out document and reported on the others. `calibrate_` needs no
model: it takes scores and targets of each layer (`LayerLook`), puts calibrators into the gate set and returns
a record for the artifact. At most `MOST_ENTRIES` entries of a document are used (one drawn from each of as
many stretches of equal length), so memory and time are those of `L H MOST_ENTRIES` numbers a document.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor, nn

from retain.evidence import Evidence
from retain.gates import GateSet
from retain.gates.base import UNITS
from retain.train.calibration.isotonic import fit_shared
from retain.train.objectives.case import keyed_generator
from retain.train.settings import section

# Of a document: layer -> one number for each entry that counts, `[H, counted]`.
Rows = Mapping[int, Tensor]

# Entries of a document, spread evenly, that are fitted to and reported on.
MOST_ENTRIES = 4096
# Knots of the curve.
KNOTS = 16
# Set behind the key of a document, so that these draws are no others.
ENTRIES = 0xCA11


@section
class CalibrationSettings:
    """Settings of the calibration after training."""

    kind: Literal["none", "shared"] = "shared"
    """`shared`: one monotone curve, with four numbers a head, and the thresholds that keep .02 to .98 of the
    entries; `none`: scores stay as gates give them."""


@dataclass(frozen=True)
class LayerLook:
    """A layer's entries that count (those with a target, outside of the protected window) of one held-out
    document.

    Args:
        score_HN: the gate's score before any calibrator, as `GateSet.score` gives it.
        target_HN: the score that is wanted, at least 0.
    """

    score_HN: Float32[Tensor, "H N"]
    target_HN: Float32[Tensor, "H N"]


Look = Mapping[int, LayerLook]


@torch.no_grad()
def look_at(
    gates: GateSet,
    evidence: Evidence,
    target_HT: Float[Tensor, "H T"],
    counted_T: Bool[Tensor, " T"],
    *,
    key: int = 0,
) -> LayerLook:
    """Returns one layer's look, on the CPU, at one document (B = 1): at the entries that count, or at
    `MOST_ENTRIES` of them, drawn by the document's key."""
    assert not gates.calibrators, "calibrated gates give no scores to fit to"
    score_HT = gates.score(evidence).values_BHT[0]
    entries_N = sampled(counted_T, key)
    score_HN, target_HN = (
        values_HT[:, entries_N.to(values_HT.device)].float().cpu() for values_HT in (score_HT, target_HT)
    )
    return LayerLook(score_HN, target_HN)


def sampled(counted_T: Bool[Tensor, " T"], key: int) -> Int[Tensor, " N"]:
    """Entries that count, at most `MOST_ENTRIES`.

    Of N > n = `MOST_ENTRIES` entries, one is taken from each stretch `floor(i N / n) .. floor((i+1) N / n) -
    1`, drawn by the document's key: evenly spread, and in step with nothing that repeats in a text.
    """
    entries_N = counted_T.cpu().nonzero()[:, 0]
    if len(entries_N) <= MOST_ENTRIES:
        return entries_N
    ends_n = torch.arange(MOST_ENTRIES + 1) * len(entries_N) // MOST_ENTRIES
    draw_n = torch.rand(MOST_ENTRIES, generator=keyed_generator((key, ENTRIES)), dtype=torch.float64)
    return entries_N[ends_n[:-1] + (draw_n * ends_n.diff()).long()]


def calibrate_(gates: GateSet, looks: Sequence[Look], *, unit: str = "risk") -> dict[str, Any]:
    """Fits the curve, and puts calibrators and record into the gate set.

    Args:
        looks: of held-out documents that were not trained on: layer -> look, the gates' layers each.
        unit: of the targets: `risk` or `mass`.

    Returns:
        the record, plain JSON: `settings`, `documents`, `unit`, `layers` (dimensions of the calibrators) and
        `curve` (`threshold_curve`); also at `gates.metadata["calibration"]`.

    Raises:
        ValueError: fewer than two documents.
    """
    if len(looks) < 2:
        raise ValueError(
            f"calibration fits on one half of the held-out documents and reports on the other, and there "
            f"are {len(looks)}: hold out two at least, or set calibration.kind none."
        )
    raw_unit = str(gates.metadata.get("score_unit") or UNITS[gates[gates.layers[0]].unit])
    raw, targets = (
        [{layer: getattr(found, name) for layer, found in look.items()} for look in looks]
        for name in ("score_HN", "target_HN")
    )
    scores, wanted = (
        {layer: list(torch.cat([look[layer] for look in rows[0::2]], dim=1)) for layer in gates.layers}
        for rows in (raw, targets)
    )
    # Scores that may have a sign lie on another axis: those of `rank`, of a family that says so, and any that
    # have one.
    signed = raw_unit == "rank" or gates[gates.layers[0]].signed
    signed = signed or any(bool((score_N < 0).any()) for of_heads in scores.values() for score_N in of_heads)
    space = "asinh" if signed else "log"
    calibrators = fit_shared(scores, wanted, K=KNOTS, space=space, unit=unit)
    made = [
        {layer: calibrators[layer](score_HN[None])[0] for layer, score_HN in look.items()} for look in raw
    ]
    gates.calibrators = nn.ModuleDict(
        {str(layer): calibrator.to(gates[layer].device) for layer, calibrator in calibrators.items()}
    )
    record: dict[str, Any] = {
        "settings": {"kind": "shared"},
        "documents": {"fitted": len(looks[0::2]), "reported": len(looks[1::2])},
        "unit": {"before": raw_unit, "after": gates.unit},
        "layers": {str(layer): calibrator.dims() for layer, calibrator in calibrators.items()},
        "curve": threshold_curve(made[0::2], made[1::2]),
    }
    gates.metadata["calibration"] = record
    return record


def threshold_curve(fitted: Sequence[Rows], reported: Sequence[Rows]) -> dict[str, list[float]]:
    """For keep_ratios from .02 to .98, the threshold at which the fitted documents keep that share.

    Each document counts alike: the threshold is the largest score `s` at which the mean over documents of the
    share of entries with a score (after calibration) of at least `s` reaches the keep_ratio.

    Returns:
        `keep_ratio` and `threshold`, and of the reported documents the `mean` and `spread` (standard
        deviation) of the share that they keep at it.
    """
    ratios = [number / 50 for number in range(1, 50)]
    pooled, others = (
        [torch.cat([score_HN.flatten() for score_HN in rows.values()]) for rows in part]
        for part in (fitted, reported)
    )
    value_N = torch.cat(pooled)
    weight_N = torch.cat([torch.full_like(one, 1 / (len(one) * len(pooled))).double() for one in pooled])
    order_N = value_N.sort(descending=True).indices
    reached_N = weight_N[order_N].cumsum(0)
    idx = torch.searchsorted(reached_N, torch.tensor(ratios, dtype=torch.float64) * (1 - 1e-12))
    thresholds = value_N[order_N][idx.clamp_max(len(value_N) - 1)]
    share_DR = torch.stack(
        [torch.stack([(one >= threshold).double().mean() for threshold in thresholds]) for one in others]
    )
    return {
        "keep_ratio": ratios,
        "threshold": thresholds.double().tolist(),
        "mean": share_DR.mean(0).tolist(),
        "spread": share_DR.std(0, correction=0).tolist(),
    }
