"""Lists what users type: commands and their options, YAML keys, public names and their parameters."""

import contextlib
import importlib
import inspect
import io
import os
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import retain
from retain.eval.config import CompareConfig
from retain.presets import Policy
from retain.train.recipe import DistillConfig

ROOT = Path(__file__).resolve().parents[2]
# Files that are run by their path.
SCRIPTS = ("eval/compare.py", "train/distill.py")
# Its help is another program's.
FOREIGN = ("lm-eval",)
# What each kind of YAML file is read into.
CONFIGS: dict[str, Any] = {"compare": CompareConfig, "distill": DistillConfig, "policy": Policy}


def collect() -> dict[str, Any]:
    """The manifest."""
    commands = {name: {} if name in FOREIGN else options(_command, name) for name in commands_of_help()}
    return {
        "commands": commands,
        "scripts": {name: options(_script, name) for name in SCRIPTS},
        "yaml": {kind: dict(yaml_keys(cls)) for kind, cls in CONFIGS.items()},
        "names": {name: parameters(getattr(retain, name)) for name in sorted(retain.__all__)},
        "methods": {name: dict(methods(getattr(retain, name))) for name in sorted(retain.__all__)},
    }


def yaml_keys(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a config's class, with their defaults; sections stand before what is in them."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        key = f"{prefix}{field.name}"
        if not field.init:
            continue
        sections = [kind for kind in _inside(hints[field.name]) if is_dataclass(kind)]
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if default is MISSING:
            yield key, "required"
        elif is_dataclass(default):  # its keys say the rest
            yield key, "section"
        else:
            yield key, _plain(default)
        for section in sections:
            named = any(_is_mapping(kind) for kind in (hints[field.name], *get_args(hints[field.name])))
            yield from yaml_keys(section, f"{key}.{'NAME.' if named else ''}")


def _inside(hint: Any) -> list[Any]:
    """A type, or the types that a generic or a union is made of."""
    arguments = get_args(hint)
    return [inner for kind in arguments for inner in _inside(kind)] if arguments else [hint]


def _is_mapping(hint: Any) -> bool:
    origin = getattr(hint, "__origin__", hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _plain(value: Any) -> Any:
    """A default as JSON holds it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def commands_of_help() -> list[str]:
    """The commands that `retain --help` lists."""
    return re.findall(r"^  (\S+)  ", help_of(_command), re.MULTILINE)


def options(call: Callable[..., None], name: str) -> dict[str, list[str]]:
    """Options and positional arguments that a command's help lists."""
    text = help_of(call, name)
    _, _, behind = text.partition("positional arguments:\n")
    positional = re.findall(r"^  (\S+)", behind.partition("\n\n")[0], re.MULTILINE)
    found = re.findall(r"^  (?:-\w(?: \S+)?, )?(--[a-z][a-z0-9-]*)", text, re.MULTILINE)
    return {"arguments": positional, "options": sorted(set(found) - {"--help"})}


def help_of(call: Callable[..., None], *name: str) -> str:
    """The text that a command prints for `--help`."""
    out, columns, typed = io.StringIO(), os.environ.get("COLUMNS"), sys.argv
    os.environ["COLUMNS"] = "200"
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            call(*name)
    finally:
        sys.argv = typed
        os.environ.pop("COLUMNS")
        os.environ.update({} if columns is None else {"COLUMNS": columns})
    assert out.getvalue(), f"{' '.join(name) or 'retain'} --help prints nothing"
    return out.getvalue()


def run_command(*typed: str) -> None:
    """Run `retain` in this process, by the entry that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["retain"].partition(":")
    if status := getattr(importlib.import_module(module), function)([*typed]):
        raise RuntimeError(f"retain {' '.join(typed)} ended with status {status}")


def _command(*name: str) -> None:
    """Ask `retain` for the help of a command."""
    run_command(*name, "--help")


def _script(name: str) -> None:
    """Ask a script for its help."""
    sys.argv = [name, "--help"]
    runpy.run_path(str(ROOT / name), run_name="__main__")


def parameters(what: Any) -> str:
    """Parameters of a function or class with their defaults; annotations name modules, and are left out."""
    signature = inspect.signature(what)
    plain = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def methods(what: Any) -> Iterator[tuple[str, str]]:
    """Public methods and properties that this package defines on a class, inherited ones included."""
    if not inspect.isclass(what):
        return
    for name in sorted(name for name in dir(what) if not name.startswith("_")):
        found = inspect.getattr_static(what, name)
        function = getattr(found, "fget", None) or getattr(found, "__func__", found)
        if not (getattr(function, "__module__", None) or "").startswith("retain"):
            continue
        yield name, "property" if isinstance(found, property) else parameters(function)


def differences(found: Any, golden: Any, where: str = "") -> Iterator[str]:
    """Differences of two nested mappings, one text each."""
    if isinstance(found, dict) and isinstance(golden, dict):
        for key in sorted({*found, *golden}):
            place = f"{where} / {key}" if where else key
            if key not in found:
                yield f"{place}: gone"
            elif key not in golden:
                yield f"{place}: new"
            else:
                yield from differences(found[key], golden[key], place)
    elif found != golden:
        yield f"{where}: {found!r}, golden: {golden!r}"
