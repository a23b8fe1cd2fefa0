"""Checks the description of gates in `gates.json`, before anything is built from it.

Errors name the entry, its value and what it should be. Types are checked first, entry by entry, so that a
damaged file neither raises inside a constructor nor allocates what the weights do not have.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

from retain.gates.base import UNITS, GateSet
from retain.gates.calibrate import EDGE, REACH, Calibrator
from retain.gates.families import GATES, fits_default, settings_of
from retain.registry import suggest

# More layers than any model has, and more knots than any curve needs: building takes time for each.
MOST_LAYERS, MOST_KNOTS = 2048, 2**16
SCORE_UNITS = tuple(sorted(set(UNITS.values())))


def check_score_unit(unit: Any) -> None:
    """Refuse a `score_unit` that is neither None (the family's own) nor one of `SCORE_UNITS`.

    Raises:
        ValueError: with the nearest unit.
    """
    if unit is not None and unit not in SCORE_UNITS:
        hint = suggest(unit, SCORE_UNITS) if isinstance(unit, str) else ""
        raise ValueError(f"score_unit is {unit!r}{hint}: wanted one of {', '.join(SCORE_UNITS)}.")


def check_record(record: Mapping[str, Any]) -> None:
    """Refuse a description (`gates.json`, of a schema that is read) that does not fit gates.

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
    names = all(isinstance(first, str) for first in ties.values())
    _demand(names, "ties", ties, "name of a tensor -> name of a tensor")
    check_score_unit(record.get("score_unit"))
    _check_curves(record.get("calibration") or {})


def _check_curves(calibration: Mapping[str, Any]) -> None:
    """Check calibrators of the gates' layers, and a curve of thresholds."""
    if calibration.get("layers"):
        for layer, dims in _layers(calibration["layers"], "calibration.layers").items():
            where = f"calibration.layers.{layer}"
            _size(dims.get("H"), f"{where}.H")
            _size(dims.get("K"), f"{where}.K", MOST_KNOTS)
            for name in ("kind", "space", "unit"):
                _demand(isinstance(dims.get(name, ""), str), f"{where}.{name}", dims.get(name), "a name")
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
        if name in settings:
            fits = fits_default(value, settings[name])
            _demand(fits, where, value, f"a {type(settings[name]).__name__}")
        _demand(not isinstance(value, float) or math.isfinite(value), where, value, "a finite number")


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
        positive = (calibrator.scale_H, calibrator.spread_H, calibrator.gain_H)
        knots_HK, values_HK = calibrator.knots()
        rises = bool((knots_HK.diff(dim=-1) > 0).all()) and bool((values_HK.diff(dim=-1) >= 0).all())
        inside = float(knots_HK.abs().max()) <= EDGE and float(values_HK.abs().max()) <= REACH
        if not rises or not inside or not all(bool((each > 0).all()) for each in positive):
            raise ValueError(
                f"the calibrator of layer {layer} is no curve: its knots are not increasing, or lie outside "
                f"of -{EDGE:g} .. {EDGE:g}, or its values outside of -{REACH:g} .. {REACH:g}"
            )


def _demand(fits: bool, name: str, value: Any, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{name} is {value!r:.60}: wanted {wanted}")


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    _demand(isinstance(value, Mapping), name, value, "a mapping")
    return value


def _layers(value: Any, name: str, of: type = dict) -> dict[int, Any]:
    """Check a mapping by layer: each key as `str` writes the index, so that no layer is named twice."""
    found = {}
    if not _mapping(value, name):
        raise ValueError(f"{name} is empty: it describes no gates")
    if len(value) > MOST_LAYERS:
        raise ValueError(f"{name} has {len(value)} layers: wanted {MOST_LAYERS} at most")
    for key, inner in value.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 6 or str(int(key)) != key:
            raise ValueError(f"{name} has a layer {key!r}: wanted an index, as in '0' or '17'")
        _demand(isinstance(inner, of), f"{name}.{key}", inner, f"a {of.__name__}")
        found[int(key)] = inner
    return found


def _size(value: Any, name: str, most: int | None = None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    bounds = "of at least 1" if most is None else f"from 1 to {most}"
    _demand(whole and 1 <= value <= (most or value), name, value, f"a whole number {bounds}")


def _numbers(value: Any, name: str) -> list[float]:
    """Check a list of finite numbers."""
    numbers = isinstance(value, list) and all(
        isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each) for each in value
    )
    _demand(numbers, name, value, "a list of finite numbers")
    return value
