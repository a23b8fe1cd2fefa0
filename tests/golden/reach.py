"""Connects the golden checks to the modules of this tree: the one file to edit when modules move.

The other files of this folder use public names only (`retain.Cache`, `retain.attach`, `retain.load_policy`,
the command line). Everything here that imports a module below `retain`, or reads an attribute that is not
public, is a thin function with a fixed meaning.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch


def load_reference(seed: int) -> Any:
    """The shipped reference model of a seed, in float64."""
    from retain.hf.model.named import load_named_model

    return load_named_model(f"reference:{seed}", dtype="float64")


def held_positions(cache: Any) -> list[list[list[int]]]:
    """Positions that a `retain.Cache` holds, in order: for each evicting layer, each row (sequence, then KV
    head), whatever tiers its entries are in."""
    layers = []
    for layer in cache.state.ragged:
        _, _, positions_N, rows_N = layer.store.flat()
        rows = range(layer.store.num_rows)
        layers.append([sorted(positions_N[rows_N == row].tolist()) for row in rows])
    return layers


def write_reports(folder: Path) -> None:
    """Write `report.md` and `cells.json` of a folder with the rows of a finished comparison."""
    from retain.eval.report.render import write_report
    from retain.eval.report.run import Run
    from retain.eval.stats.ceilings import write_cells

    run = Run.read(folder)
    write_cells(folder, run.tasks)
    write_report(run)


def config_classes() -> dict[str, Any]:
    """What each kind of YAML file is read into."""
    from retain.eval.config import CompareConfig
    from retain.presets import Policy
    from retain.train.recipe import DistillConfig

    return {"compare": CompareConfig, "distill": DistillConfig, "policy": Policy}


def yaml_keys(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a config's class, with their defaults; sections stand before what is in them."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        key = f"{prefix}{field.name}"
        if not field.init:
            continue
        sections = [own for own in _inside(hints[field.name]) if is_dataclass(own)]
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if default is MISSING:
            yield key, "required"
        elif is_dataclass(default):  # its keys say the rest
            yield key, "section"
        else:
            yield key, _plain(default)
        for section in sections:
            named = any(_is_mapping(own) for own in (hints[field.name], *get_args(hints[field.name])))
            yield from yaml_keys(section, f"{key}.{'NAME.' if named else ''}")


def _inside(hint: Any) -> list[Any]:
    """A type, or the types that a generic or a union is made of."""
    arguments = get_args(hint)
    return [inner for own in arguments for inner in _inside(own)] if arguments else [hint]


def _is_mapping(hint: Any) -> bool:
    origin = getattr(hint, "__origin__", hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _plain(value: Any) -> Any:
    """A default as JSON holds it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(own) for key, own in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(own) for own in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def jittered(module: torch.nn.Module, seed: int, size: float) -> torch.nn.Module:
    """Multiply every weight by `1 + size * normal noise`, in place: what another machine's rounding does."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
            weight.mul_(1 + size * noise.to(weight.dtype))
    return module
