"""Defines sections of a config whose fields say their meaning, collects what is wrong with one, and lists all
keys for `--help`.

A section is a class with `@section`: types and bounds are those of its fields, a field's meaning is the text
below it, its default stands nowhere else. `retain.config` reads and checks it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, cast, dataclass_transform, get_type_hints

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as pydantic_dataclass

from retain.config import STRICT
from retain.process.registry import lookup

X = TypeVar("X")
SPOKEN = ConfigDict(use_attribute_docstrings=True, **STRICT)


@dataclass_transform(frozen_default=True)
def section(cls: type[X]) -> type[X]:
    """Makes a class of annotated fields a frozen section of a config, checked wherever it is made."""
    made: Any = pydantic_dataclass(frozen=True, config=SPOKEN)(cls)
    return cast(type[X], made)


def described(cls: type[Any], prefix: str = "") -> Iterator[str]:
    """Yields a line for each key below a section: its name, type, default and meaning."""
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        name = prefix + field.name
        inside: Any = get_type_hints(cls)[field.name]
        if is_dataclass(inside):
            yield from described(cast(type[Any], inside), f"{name}.")
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        shown = "required" if default is MISSING else json.dumps(default, ensure_ascii=False)
        meaning = cls.__pydantic_fields__[field.name].description or ""
        yield f"{name} ({typed(hints[field.name])}; {shown}): {' '.join(meaning.split())}"


def typed(hint: Any) -> str:
    """Returns a type with its bounds, in words: `int >= 1`."""
    return _typed(TypeAdapter(hint).json_schema())


def _typed(schema: dict[str, Any]) -> str:
    if options := schema.get("anyOf"):
        return " or ".join(map(_typed, options))
    if words := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return " | ".join(map(json.dumps, words))
    name = {"integer": "int", "number": "float", "string": "text", "boolean": "true | false"}.get(
        schema.get("type", ""), schema.get("type", "any")
    )
    if name == "array":
        return f"list of {_typed(schema.get('items') or {})}" if "items" in schema else "list"
    if name == "object":
        inside = schema.get("additionalProperties")
        return f"name: {_typed(inside)}" if isinstance(inside, dict) else "mapping"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [
        f"{sign} {schema[key]:,}" for key, sign in signs.items() if key in schema and abs(schema[key]) < 1e18
    ]
    return " ".join([name, *bounds])


def broken(*rules: tuple[object, str]) -> list[str]:
    """Returns the texts of the rules that are broken; a rule is (whether it is broken, what to say of it)."""
    return [text for wrong, text in rules if wrong]


def unknown(names: Iterable[str], known: Mapping[str, Any], *, what: str, key: str = "") -> list[str]:
    """Returns a text for every unknown name, after the config's `key`; `what` they are is in the singular."""
    problems = []
    for name in names:
        try:
            lookup(name, known, what=what)
        except ValueError as error:
            problems.append(f"{key}: {error}" if key else str(error))
    return problems


def refuse(
    *rules: tuple[object, str], found: Iterable[str] = (), separator: str = "; ", end: str = "."
) -> None:
    """Raises ValueError with all problems, if there are any: those that were `found` already, then the rules
    that are broken."""
    if problems := [*found, *broken(*rules)]:
        raise ValueError(separator.join(problems) + end)
