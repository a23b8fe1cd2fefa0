"""Checks the description of gates in `gates.json`, before anything is built from it.

Types are checked first, all of them, so that a damaged file neither raises inside a constructor nor allocates
what the weights do not have.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from retain.gates.base import GateSet
from retain.gates.calibrate import EDGE, REACH, Calibrator
from retain.gates.families import GATES, fits_default, settings_of
from retain.process.registry import lookup, suggest

# More layers than any model has, and more knots than any curve needs: building takes time for each.
MOST_LAYERS, MOST_KNOTS = 2048, 2**16
ScoreUnit = Literal["mass", "rank", "risk"]
SCORE_UNITS: tuple[str, ...] = get_args(ScoreUnit)

# As `str` writes an index, so that no layer is named twice.
LayerName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,5})$")]
Size = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _CalibratorDims(_Part):
    H: Size
    K: Annotated[int, Field(ge=1, le=MOST_KNOTS)]
    kind: str = ""
    space: str = ""
    unit: str = ""


class _Curve(_Part):
    keep_ratio: list[FiniteFloat] = Field(min_length=1)
    threshold: list[FiniteFloat]

    @model_validator(mode="after")
    def _matched(self) -> "_Curve":
        if len(self.keep_ratio) != len(self.threshold) or self.keep_ratio != sorted(self.keep_ratio):
            raise ValueError("wanted as many keep_ratio as threshold, keep_ratio ascending")
        return self


class _Calibration(_Part):
    layers: dict[LayerName, _CalibratorDims] | None = None
    curve: _Curve | None = None


class _Record(_Part):
    family: str
    layers: dict[LayerName, dict[str, Any]] = Field(min_length=1, max_length=MOST_LAYERS)
    fingerprint: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None
    ties: dict[str, str] | None = None
    extension: dict[str, Any] | None = None
    score_unit: ScoreUnit | None = None
    calibration: _Calibration | None = None


def check_score_unit(unit: Any) -> None:
    """Refuse a `score_unit` that is neither None (the family's) nor one of `SCORE_UNITS`; a ValueError."""
    if unit is not None:
        lookup(unit, dict.fromkeys(SCORE_UNITS), what="score_unit")


def check_record(record: Mapping[str, Any]) -> None:
    """Refuse a description (`gates.json`, of a schema that is read) that does not fit gates.

    Raises:
        ValueError: naming what is wrong.
    """
    try:
        _Record.model_validate(record)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise ValueError("; ".join(found[:5])) from None
    family = record["family"]
    lookup(family, GATES, what="gate family")
    if record.get("extension") is not None and GATES[family].extension is None:
        raise ValueError(f"extension is there, and gates of family {family!r} extend nothing")
    for layer, dims in record["layers"].items():
        _check_dims(family, layer, dims)


def _check_dims(family: str, layer: str, dims: Mapping[str, Any]) -> None:
    """Check names and types of the constructor's keyword arguments."""
    sizes, settings = GATES[family].sizes, settings_of(family)
    for name in (*sizes, *dims):
        value, where = dims.get(name), f"layers.{layer}.{name}"
        if name in sizes:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{where} is {value!r}: wanted a whole number of at least 1")
        elif name not in settings:
            raise ValueError(f"{where} is no setting of family {family!r}{suggest(name, settings)}")
        elif not fits_default(value, settings[name]) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            raise ValueError(f"{where} is {value!r}: wanted a {type(settings[name]).__name__}")


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
