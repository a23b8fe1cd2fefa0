"""Checks the description of gates in `gates.json`, before anything is built from it.

Errors name the entry, its value and what it should be. Types are checked first, entry by entry, so that a
damaged file neither raises inside a constructor nor allocates what the weights do not have.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from retain.gates.base import UNITS, GateSet
from retain.gates.calibrate import EDGE, PARTS, REACH, Calibrator, Scale, Shared
from retain.gates.families import GATES, fits_default, settings_of
from retain.registry import suggest

# More layers than any model has, and more knots than any curve needs: what is built takes time for each.
MOST_LAYERS, MOST_KNOTS = 2048, 2**16
# Units that a score can be said to have.
SCORE_UNITS = tuple(sorted(set(UNITS.values())))


def check_score_unit(unit: Any) -> None:
    """Refuse an unknown `score_unit`.

    Raises:
        ValueError: it is neither None (the family's own) nor one of `SCORE_UNITS`.
    """
    if unit is not None and unit not in SCORE_UNITS:
        hint = suggest(unit, SCORE_UNITS) if isinstance(unit, str) else ""
        raise ValueError(f"score_unit is {unit!r}{hint}: wanted one of {', '.join(SCORE_UNITS)}.")


def check_record(record: Mapping[str, Any]) -> None:
    """Refuse a description that does not fit gates.

    Args:
        record: `gates.json`, of a schema that is read.

    Raises:
        ValueError: naming the first entry that is wrong.
    """
    family = record.get("family")
    if not isinstance(family, str) or family not in GATES:
        raise ValueError(
            f"family is {family!r}: it describes no gates that this retain knows, which are {sorted(GATES)}"
        )
    layers = _layers(record.get("layers"), "layers")
    for layer, dims in layers.items():
        _check_dims(family, layer, dims)
    for name in ("fingerprint", "ties", "extension", "calibration", "settings"):
        if record.get(name) is not None:
            _mapping(record[name], name)
    if record.get("extension") is not None and GATES[family].extension is None:
        raise ValueError(f"extension is there, and gates of family {family!r} extend nothing")
    ties = record.get("ties") or {}
    if any(not isinstance(first, str) for first in ties.values()):
        raise ValueError(f"ties is {ties!r}: wanted name of a tensor -> name of a tensor")
    check_score_unit(record.get("score_unit"))
    heads = {layer: dims["H"] for layer, dims in layers.items()}
    _check_calibration(record.get("calibration") or {}, heads)


def _check_calibration(calibration: Mapping[str, Any], heads: Mapping[int, int]) -> None:
    """Check calibrators of the gates' layers, weights for their heads, a curve of numbers."""
    if calibration.get("layers"):
        calibrators = _layers(calibration["layers"], "calibration.layers")
        for layer, dims in calibrators.items():
            for name, most in (("H", None), ("K", MOST_KNOTS)):
                _size(dims.get(name), f"calibration.layers.{layer}.{name}", most)
            for name in ("kind", "space", "unit"):
                if name in dims and not isinstance(dims[name], str):
                    raise ValueError(f"calibration.layers.{layer}.{name} is {dims[name]!r}: wanted a name")
    if calibration.get("curve") is not None:
        curve = _mapping(calibration["curve"], "calibration.curve")
        ratios, thresholds = (
            _numbers(curve.get(name), f"calibration.curve.{name}") for name in ("keep_ratio", "threshold")
        )
        if not ratios or len(ratios) != len(thresholds) or ratios != sorted(ratios):
            raise ValueError(
                f"calibration.curve has keep_ratio {ratios} and threshold {thresholds}: wanted as many of "
                "one as of the other, keep_ratio ascending"
            )
    if calibration.get("quotas") is not None:
        _check_quotas(_mapping(calibration["quotas"], "calibration.quotas"), heads)
    fusion = _mapping(calibration.get("fusion") or {}, "calibration.fusion")
    for how, of_layers in fusion.items():
        weights = _layers(of_layers, f"calibration.fusion.{how}", of=list)
        if set(weights) != set(heads):
            raise ValueError(
                f"calibration.fusion.{how} is for layers {sorted(weights)}: wanted {sorted(heads)}"
            )
        for layer, listed in weights.items():
            if len(_numbers(listed, f"calibration.fusion.{how}.{layer}")) != heads[layer]:
                raise ValueError(
                    f"calibration.fusion.{how}.{layer} is {listed!r}: wanted a weight for each of "
                    f"{heads[layer]} KV heads"
                )


def _check_quotas(quotas: Mapping[str, Any], heads: Mapping[int, int]) -> None:
    """Check that quotas are, for each keep_ratio, whole parts of `PARTS` for every head of the layers."""
    ratios = _numbers(quotas.get("keep_ratio"), "calibration.quotas.keep_ratio")
    if not ratios or ratios != sorted({*ratios}) or not 0 < ratios[0] <= ratios[-1] < 1:
        raise ValueError(
            f"calibration.quotas.keep_ratio is {_shown(ratios)}: wanted numbers between 0 and 1, ascending"
        )
    parts = _layers(quotas.get("parts"), "calibration.quotas.parts", of=list)
    if set(parts) != set(heads):
        raise ValueError(f"calibration.quotas.parts is for layers {sorted(parts)}: wanted {sorted(heads)}")
    for layer, rows in parts.items():
        whole = all(
            isinstance(row, list) and len(row) == heads[layer] and all(type(own) is int for own in row)
            for row in rows
        )
        if len(rows) != len(ratios) or not whole or min(map(min, rows)) < 0:
            raise ValueError(
                f"calibration.quotas.parts.{layer} is {_shown(rows)}: wanted a list for each of "
                f"{len(ratios)} keep_ratios, of one whole number of at least 0 for each of {heads[layer]} KV "
                "heads"
            )
    for number, ratio in enumerate(ratios):
        total = sum(sum(rows[number]) for rows in parts.values())
        if total != PARTS:
            raise ValueError(f"calibration.quotas.parts sum to {total} at keep_ratio {ratio}: wanted {PARTS}")


def _check_dims(family: str, layer: int, dims: Mapping[str, Any]) -> None:
    """Check names and types of the constructor's keyword arguments."""
    sizes, settings = GATES[family].sizes, settings_of(family)
    for name in sizes:
        _size(dims.get(name), f"layers.{layer}.{name}")
    for name, value in dims.items():
        where = f"layers.{layer}.{name}"
        if name not in sizes and name not in settings:
            raise ValueError(
                f"layers.{layer} has {name!r}, which is no setting of family {family!r}"
                f"{suggest(name, settings)}; it has {', '.join(sorted(settings)) or 'none'}"
            )
        if name in settings and not fits_default(value, settings[name]):
            raise ValueError(f"{where} is {value!r}: wanted a {type(settings[name]).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where} is {value!r}: wanted a finite number")


def check_values(gates: GateSet) -> None:
    """Refuse gates whose values no training gives.

    Raises:
        ValueError: a tensor that is not finite, or calibrators whose curves do not rise.
    """
    for name, tensor in gates.state_dict().items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name!r} holds numbers that are not finite")
    for layer, module in gates.calibrators.items():
        calibrator = cast(Calibrator, module)
        positive: list[Tensor] = [calibrator.scale_H]
        if isinstance(calibrator, Shared):
            positive += [calibrator.spread_H, calibrator.gain_H]
        if isinstance(calibrator, Scale):
            positive.append(calibrator.factor)
        knots_HK, values_HK = calibrator.knots()
        rises = bool((knots_HK.diff(dim=-1) > 0).all()) and bool((values_HK.diff(dim=-1) >= 0).all())
        inside = float(knots_HK.abs().max()) <= EDGE and float(values_HK.abs().max()) <= REACH
        if not rises or not inside or not all(bool((each > 0).all()) for each in positive):
            raise ValueError(
                f"the calibrator of layer {layer} is no curve: its knots are not increasing, or lie outside "
                f"of -{EDGE:g} .. {EDGE:g}, or its values outside of -{REACH:g} .. {REACH:g}"
            )


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {_shown(value)}: wanted a mapping")
    return value


def _layers(value: Any, name: str, of: type = dict) -> dict[int, Any]:
    """Check a mapping by layer: each key as `str` writes the index, so that no layer is named twice."""
    found = {}
    if not _mapping(value, name):
        raise ValueError(f"{name} is empty: it describes no gates")
    if len(value) > MOST_LAYERS:
        raise ValueError(f"{name} has {len(value)} layers: wanted {MOST_LAYERS} at most")
    for key, inner in _mapping(value, name).items():
        if not key.isascii() or not key.isdecimal() or len(key) > 6 or str(int(key)) != key:
            raise ValueError(f"{name} has a layer {key!r}: wanted an index, as in '0' or '17'")
        if not isinstance(inner, of):
            raise ValueError(f"{name}.{key} is {_shown(inner)}: wanted a {of.__name__}")
        found[int(key)] = inner
    return found


def _size(value: Any, name: str, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value > (most or value):
        bounds = "of at least 1" if most is None else f"from 1 to {most}"
        raise ValueError(f"{name} is {_shown(value)}: wanted a whole number {bounds}")


def _numbers(value: Any, name: str) -> list[float]:
    """Check a list of finite numbers."""
    if not isinstance(value, list) or any(
        isinstance(each, bool) or not isinstance(each, int | float) or not math.isfinite(each)
        for each in value
    ):
        raise ValueError(f"{name} is {_shown(value)}: wanted a list of finite numbers")
    return value


def _shown(value: Any) -> str:
    return f"{value!r:.60}"
