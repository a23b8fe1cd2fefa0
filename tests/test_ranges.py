"""Every number of every config has a range, which is checked when the config is read."""

import math
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from retain.config import build
from retain.eval.config import CompareConfig
from retain.presets import Policy
from retain.train.recipe import DistillConfig

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {
    DistillConfig: {"output": "o"},
    CompareConfig: {"run": "r", "seeds": [0], "items_per_task": 1, "gates": "g"},
    Policy: {"name": "p"},
}
# What training was killed by after its last step, or refused only once the model was there.
OUTSIDE = {
    **dict.fromkeys(("training.clip", "training.eps", "training.lr"), 0.0),
    **dict.fromkeys(("loss.temperature", "loss.band"), 0.0),
    **dict.fromkeys(("training.final_lr", "training.weight_decay"), -1.0),
    "soft.hard_temperature": 0.0,
    **dict.fromkeys(("soft.keep_from", "soft.keep_to"), 1.5),
    **dict.fromkeys(("seed", "training.warmup_steps", "data.pack_tokens", "soft.sinks"), -1),
    **dict.fromkeys(("training.steps", "training.micro_batch", "target.horizon"), 0),
    **dict.fromkeys(("data.shuffle_rows", "target.repeat_chunk"), 0),
    "soft.budget": 0,
    **dict.fromkeys(("data.max_tokens", "data.documents"), 10**12),
    "calibration.knots": 1,
    "data.held_out_share": 0.0,
    "training.betas": [1.5, 2],
    "loss.keep_ratios": [1.2],
    "loss.terms": {"mse": -1.0},
    "soft.terms": {"admitted": -1.0},
    "target.sources": {"own": -1.0},
}


def numbers(hint: Any, path: tuple[str, ...], found: Any = None) -> Iterator[tuple[Any, Any, Any]]:
    """Every number in an annotation: (path, `int` or `float`, its range or None)."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from numbers(arguments[0], path, arguments[1])
    elif origin in (Union, types.UnionType):
        for one in arguments:
            yield from numbers(one, path)
    elif origin is tuple:
        items = "[]" if arguments[-1] is Ellipsis else "[]" * len(arguments)
        yield from numbers(arguments[0], (*path, items))
    elif origin is dict:
        yield from numbers(arguments[1], (*path, "{}"))
    elif hint in (int, float):
        yield path, hint, found
    elif isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        for field in fields(hint):
            yield from numbers(hints[field.name], (*path, field.name))
    else:
        assert origin is Literal or hint in (str, bool, Path, Any, type(None)), f"{path}: {hint}"


def wrapped(path: tuple[str, ...], value: Any) -> Any:
    """A mapping that has the value at a path, beside what else a config needs there."""
    for name in reversed(path):
        value = [value] * name.count("[]") if "[]" in name else {name if name != "{}" else "some": value}
    return value


ALL = [(cls, path, kind) for cls in CONFIGS for path, kind, _ in numbers(cls, ())]


def test_every_number_states_its_range() -> None:
    for cls in CONFIGS:
        bare = [".".join(path) for path, _, bounds in numbers(cls, ()) if bounds is None]
        assert not bare, f"{cls.__name__}: no range on {', '.join(bare)}"
    assert len(ALL) > 50


@pytest.mark.parametrize("cls", CONFIGS)
def test_what_is_no_number_is_refused_by_its_key(cls: type) -> None:
    """NaN, infinity and fractions of whole numbers, of every key: none waits for the end of a run."""
    for own, path, kind in ALL:
        if own is not cls:
            continue
        beyond: tuple[Any, ...] = (math.nan, math.inf, -math.inf) if kind is float else (1.5,)
        for value in beyond:
            with pytest.raises(ValueError) as caught:
                build({**CONFIGS[cls], **wrapped(path, value)}, cls)
            assert path[0] in str(caught.value), f"{cls.__name__} {path}={value}: {caught.value}"


@pytest.mark.parametrize("key", OUTSIDE)
def test_what_is_outside_is_refused_by_its_key(key: str) -> None:
    mapping: dict[str, Any] = {"output": "o"} | wrapped(tuple(key.split(".")), OUTSIDE[key])
    with pytest.raises(ValueError, match="problem") as caught:
        build(mapping, DistillConfig)
    assert f"- {key}" in str(caught.value)
