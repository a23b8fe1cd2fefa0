"""Calibrates trained gates: comparable scores across heads, and thresholds.

Everything is fitted on every second held-out document and reported on the others. `calibrate_` needs no
model: it takes scores and targets of each layer (`LayerLook`), puts calibrators into the gate
set and returns a record for the artifact. At most `MOST_ENTRIES` entries of a document are used (one drawn
from each of as many stretches of equal length), so memory and time are those of `L H MOST_ENTRIES` numbers a
document.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Float, Float32
from pydantic import Field
from torch import Tensor, nn

from retain.budget.largest_remainder import exact
from retain.config import ProperShare
from retain.evidence import Evidence
from retain.gates import GateSet
from retain.gates.base import UNITS
from retain.gates.calibrate import UNITS as CALIBRATED_UNITS
from retain.gates.calibrate import Calibrator
from retain.ranking import order_entries, rank_entries
from retain.train.calibration.isotonic import fit_shared, space_of
from retain.train.objectives.case import keyed_generator
from retain.train.settings import section

# Of a document: layer -> one number for each entry that counts, `[H, counted]`.
Rows = Mapping[int, Tensor]

# Entries of a document, spread evenly, that are fitted to and reported on.
MOST_ENTRIES = 4096
# Set behind the key of a document, so that these draws are no others.
ENTRIES = 0xCA11


@section
class CalibrationSettings:
    """Settings of the calibration after training."""

    kind: Literal["none", "shared"] = "shared"
    """`shared`: one monotone curve, with four numbers a head; `none`: scores stay as gates give them."""
    knots: Annotated[int, Field(ge=2, le=1024)] = 16
    """Of the curve."""
    curve: bool = True
    """Whether thresholds are stored for keep_ratios."""
    keep_ratios: tuple[ProperShare, ...] = (0.05, 0.1, 0.2, 0.3, 0.5)
    """At which the report is made."""

    def __post_init__(self) -> None:
        if not self.keep_ratios:
            raise ValueError("keep_ratios is empty: name one at least.")

    @property
    def wanted(self) -> bool:
        """True where there is anything to fit."""
        return self.kind != "none" or self.curve


@dataclass(frozen=True)
class LayerLook:
    """One layer of one held-out document.

    Args:
        score_HT: the gate's score before any calibrator, as `GateSet.score` gives it.
        target_HT: what it should have predicted, at least 0.
        counted_T: entries that have a target (outside of the protected window).
    """

    score_HT: Float32[Tensor, "H T"]
    target_HT: Float32[Tensor, "H T"]
    counted_T: Bool[Tensor, " T"]


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
    `MOST_ENTRIES` of them, drawn by the document's key. Calibrators that the gates have are left out."""
    calibrators, gates.calibrators = gates.calibrators, nn.ModuleDict()
    try:
        score_HT = gates.score(evidence).values_BHT[0]
    finally:
        gates.calibrators = calibrators
    return sampled(LayerLook(score_HT, target_HT.float(), counted_T), key)


def sampled(look: LayerLook, key: int) -> LayerLook:
    """Keeps only entries that count, on the CPU, at most `MOST_ENTRIES`.

    Of N > n = `MOST_ENTRIES` entries, one is taken from each stretch `floor(i N / n) .. floor((i+1) N / n) -
    1`, drawn by the document's key: evenly spread, and in step with nothing that repeats in a text.
    """
    entries_N = look.counted_T.cpu().nonzero()[:, 0]
    if len(entries_N) > MOST_ENTRIES:
        ends_n = torch.arange(MOST_ENTRIES + 1) * len(entries_N) // MOST_ENTRIES
        draw_n = torch.rand(MOST_ENTRIES, generator=keyed_generator((key, ENTRIES)), dtype=torch.float64)
        entries_N = entries_N[ends_n[:-1] + (draw_n * ends_n.diff()).long()]

    def taken(values_HT: Tensor) -> Tensor:
        return values_HT[:, entries_N.to(values_HT.device)].cpu()

    return LayerLook(
        taken(look.score_HT),
        taken(look.target_HT),
        torch.ones(len(entries_N), dtype=torch.bool),
    )


def calibrate_(
    gates: GateSet, looks: Sequence[Look], settings: CalibrationSettings, *, unit: str = "risk"
) -> dict[str, Any]:
    """Fits what the settings ask for, and puts calibrators and record into the gate set.

    Args:
        looks: of held-out documents that were not trained on: layer -> what it shows, the gates' layers each.
        unit: of the targets: `risk` or `mass`.

    Returns:
        the record, plain JSON: `settings`, `documents`, `layers` (dimensions of the calibrators), `curve`
        (keep_ratio -> threshold, with what the reported documents kept at it) and `report`; also at
        `gates.metadata["calibration"]`.

    Raises:
        ValueError: fewer than two documents, targets in another unit, or looks that do not fit the gates.
    """
    if not settings.wanted:
        gates.calibrators = nn.ModuleDict()
        gates.metadata.pop("calibration", None)
        return {}
    _check(gates, looks, settings, unit)
    # From here on every entry of a look counts.
    looks = [
        {layer: sampled(own, number) for layer, own in look.items()} for number, look in enumerate(looks)
    ]
    fitted, reported = looks[0::2], looks[1::2]
    raw_unit = str(gates.metadata.get("score_unit") or UNITS[gates[gates.layers[0]].unit])
    calibrators = _calibrators(gates, fitted, settings, raw_unit, unit)
    gates.calibrators = nn.ModuleDict(
        {str(layer): calibrator.to(gates[layer].device) for layer, calibrator in calibrators.items()}
    )
    score_unit = gates.unit
    scores = [_calibrated(look, calibrators) for look in looks]
    record: dict[str, Any] = {
        "settings": {**asdict(settings), "keep_ratios": list(settings.keep_ratios)},
        "documents": {"fitted": len(fitted), "reported": len(reported)},
        "unit": {"before": raw_unit, "after": score_unit},
        "layers": {str(layer): calibrator.dims() for layer, calibrator in calibrators.items()},
        "report": report(reported, scores[1::2], settings.keep_ratios, raw_unit, score_unit),
    }
    if settings.curve:
        record["curve"] = threshold_curve(scores[0::2], scores[1::2])
    gates.metadata["calibration"] = record
    return record


def _check(gates: GateSet, looks: Sequence[Look], settings: CalibrationSettings, unit: str) -> None:
    """Refuse what cannot be fitted."""
    if settings.kind != "none" and unit not in CALIBRATED_UNITS:
        raise ValueError(
            f"targets are in {unit!r}, and a calibrated score is in {' or '.join(CALIBRATED_UNITS)}: take "
            "targets weighted by value_norm (risk) or by nothing (mass), or set calibration.kind none."
        )
    if len(looks) < 2:
        raise ValueError(
            f"calibration fits on one half of the held-out documents and reports on the other, and there "
            f"are {len(looks)}: hold out two at least, or set calibration.kind none and "
            "curve false."
        )
    for number, look in enumerate(looks):
        if tuple(look) != gates.layers:
            raise ValueError(
                f"look {number} is of layers {list(look)}, and the gates are of {list(gates.layers)}: pass "
                "each."
            )
        for layer, own in look.items():
            shapes = {tuple(own.score_HT.shape), tuple(own.target_HT.shape)}
            if shapes != {(gates[layer].H, len(own.counted_T))} or not own.counted_T.any():
                raise ValueError(
                    f"look {number}, layer {layer}: scores {tuple(own.score_HT.shape)}, targets "
                    f"{tuple(own.target_HT.shape)} and {int(own.counted_T.sum())} counted of "
                    f"{len(own.counted_T)} entries: wanted [{gates[layer].H}, T] each, and one counted."
                )


def _calibrators(
    gates: GateSet, looks: Sequence[Look], settings: CalibrationSettings, raw_unit: str, unit: str
) -> dict[int, Calibrator]:
    """Fitted on these looks; none where none are wanted."""
    if settings.kind == "none":
        return {}
    scores, targets = (
        {
            layer: list(torch.cat([getattr(look[layer], name) for look in looks], dim=1))
            for layer in gates.layers
        }
        for name in ("score_HT", "target_HT")
    )
    space = space_of(raw_unit, scores, signed=gates[gates.layers[0]].signed)
    return fit_shared(scores, targets, K=settings.knots, space=space, unit=unit)


def _calibrated(look: Look, calibrators: Mapping[int, Calibrator]) -> dict[int, Tensor]:
    """The scores as they will be, `[H, counted]` a layer."""
    made = {layer: own.score_HT for layer, own in look.items()}
    for layer, calibrator in calibrators.items():
        made[layer] = calibrator(made[layer][None].to(calibrator.scale_H.device))[0].cpu()
    return made


def _kept_in_order(order_RT: Tensor, target_RT: Tensor, keep_ratios: Sequence[float]) -> Tensor:
    so_far_RT = target_RT.double().gather(-1, order_RT).cumsum(-1)
    counts = torch.tensor([count_of(order_RT.shape[-1], ratio) for ratio in keep_ratios])
    kept, total_R1 = so_far_RT[:, counts - 1], so_far_RT[:, -1:]
    return torch.where(total_R1 > 0, kept / total_R1.clamp_min(1e-300), 1.0).T


def overlaps_in_order(order_RT: Tensor, rank_RT: Tensor, keep_ratios: Sequence[float]) -> Tensor:
    """Share of each row's first entries by target (`rank_RT`) that are among its first by score (`order_RT`),
    `ceil(keep_ratio T)` each, for each keep_ratio."""
    counts = [count_of(order_RT.shape[-1], ratio) for ratio in keep_ratios]
    ranked_RT = rank_RT.gather(-1, order_RT)
    return torch.stack([(ranked_RT[:, :count] < count).sum(-1).double() / count for count in counts])


def count_of(entries: int, keep_ratio: float) -> int:
    """`ceil(keep_ratio * entries)`, exactly as written, at least one."""
    return max(1, math.ceil(exact(keep_ratio) * entries))


def report(
    looks: Sequence[Look], scores: Sequence[Rows], keep_ratios: Sequence[float], raw_unit: str, unit: str
) -> dict[str, Any]:
    """Compares scores before (`looks`) and after calibration, on documents that it was not fitted to.

    Returns:
        for `before` and `after`: `keep` -> keep_ratio -> scope (`head`: each head on its own; `layer` and
        `model`: they compete by score) -> `kept`, the share of the target that is kept, and `overlap` with
        the target's own choice; and `r2`, of log targets, in the mean over documents (None where scores are
        in a unit of their own). Inside a head the order is the same, so `head` is too.
    """
    raw = [{layer: own.score_HT for layer, own in look.items()} for look in looks]
    targets = [{layer: own.target_HT for layer, own in look.items()} for look in looks]
    found: dict[str, Any] = {}
    for name, of_documents, own_unit in (("before", raw, raw_unit), ("after", scores, unit)):
        pairs = list(zip(of_documents, targets, strict=True))
        keep: dict[str, dict[str, Any]] = {f"{ratio:g}": {} for ratio in keep_ratios}
        for scope in ("head", "layer", "model"):
            shares = [_compared(_rows(score, scope), _rows(own, scope), keep_ratios) for score, own in pairs]
            for of_ratio, both_D2 in zip(keep.values(), torch.stack(shares).unbind(-1), strict=True):
                kept, overlap = (float(share_D.mean()) for share_D in both_D2.unbind(1))
                of_ratio[scope] = {"kept": kept, "overlap": overlap}
        fits = [] if own_unit == "rank" else [_log_r2(*pair) for pair in pairs]
        found[name] = {"keep": keep, "r2": sum(fits) / len(fits) if fits else None}
    return found


def _compared(scores: Sequence[Tensor], targets: Sequence[Tensor], keep_ratios: Sequence[float]) -> Tensor:
    """Kept share and overlap at each keep_ratio, `[2, ratios]`, the mean over all rows. Each row is
    sorted once, whatever the number of keep_ratios."""
    orders = [order_entries(score_RT) for score_RT in scores]
    kept = [_kept_in_order(*pair, keep_ratios) for pair in zip(orders, targets, strict=True)]
    ranks = [rank_entries(target_RT) for target_RT in targets]
    same = [overlaps_in_order(*pair, keep_ratios) for pair in zip(orders, ranks, strict=True)]
    return torch.stack([torch.cat(parts, dim=1).mean(1) for parts in (kept, same)])


def _rows(values: Rows, scope: str) -> list[Tensor]:
    """One row for each group that shares a budget: a head, a layer, or the whole model."""
    if scope == "head":
        return list(values.values())
    flat = [values_HT.flatten()[None] for values_HT in values.values()]
    return flat if scope == "layer" else [torch.cat(flat, dim=1)]


def _log_r2(score: Rows, target: Rows) -> float:
    """R2 of the logarithm of targets by that of scores, over all heads; a thousandth of the mean target is
    added to both."""
    wanted, got = (torch.cat([part.flatten() for part in x.values()]).double() for x in (target, score))
    floor = max(1e-3 * float(wanted.mean()), 1e-30)
    wanted, got = (wanted + floor).log(), (got.clamp_min(0) + floor).log()
    spread = (wanted - wanted.mean()).square().sum()
    return float(1 - (wanted - got).square().sum() / spread.clamp_min(1e-30))


def threshold_curve(fitted: Sequence[Rows], reported: Sequence[Rows]) -> dict[str, list[float]]:
    """For keep_ratios from .02 to .98, the threshold at which the fitted documents keep that share.

    Each document counts alike: the threshold is the largest score `s` at which the mean over documents of the
    share of entries with a score (after calibration) of at least `s` reaches the keep_ratio.

    Returns:
        `keep_ratio` and `threshold`, and of the reported documents the `mean`, `least`, `most` and `spread`
        (standard deviation) of the share that they keep at it.
    """
    ratios = [number / 50 for number in range(1, 50)]
    pooled, others = ([_rows(score, "model")[0][0] for score in part] for part in (fitted, reported))
    value_N = torch.cat(pooled)
    weight_N = torch.cat([torch.full_like(own, 1 / (len(own) * len(pooled))).double() for own in pooled])
    order_N = value_N.sort(descending=True).indices
    reached_N = weight_N[order_N].cumsum(0)
    idx = torch.searchsorted(reached_N, torch.tensor(ratios, dtype=torch.float64) * (1 - 1e-12))
    thresholds = value_N[order_N][idx.clamp_max(len(value_N) - 1)]
    share_DR = torch.stack(
        [torch.stack([(own >= threshold).double().mean() for threshold in thresholds]) for own in others]
    )
    return {
        "keep_ratio": ratios,
        "threshold": thresholds.double().tolist(),
        "mean": share_DR.mean(0).tolist(),
        "least": share_DR.amin(0).tolist(),
        "most": share_DR.amax(0).tolist(),
        "spread": share_DR.std(0, correction=0).tolist(),
    }
