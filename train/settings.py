"""Reads the settings of a run: YAML and `key=value` become frozen pydantic dataclasses, checked as a whole.

A section is a class with `@section`: types and bounds are those of its fields, a field's meaning is the text
below it, its default stands nowhere else. `read_settings` reports every problem at once, an unknown key with
the nearest known one; `described` lists every key for `--help`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, dataclass_transform, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from retain.config import read_overridden
from retain.gone import hint_of
from retain.registry import suggest

X = TypeVar("X")
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
SHOWN = 100  # problems of a file that are listed


def _number(value: object) -> object:
    """`2e-4`, which YAML reads as text, as a number; anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


NUMBER = BeforeValidator(_number)
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Many = Annotated[int, Field(ge=1, le=10**6)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]
# Up to a number whose square is still finite.
Positive = Annotated[float, Field(ge=1e-30, le=1e30), NUMBER]
NotNegative = Annotated[float, Field(ge=0, le=1e30), NUMBER]
PositiveShare = Annotated[float, Field(ge=1e-6, le=1), NUMBER]
# Neither nothing nor all.
ProperShare = Annotated[float, Field(gt=0, lt=1), NUMBER]


@dataclass_transform(frozen_default=True)
def section(cls: type[X]) -> type[X]:
    """Makes a class of annotated fields a frozen section of a config."""
    made: Any = pydantic_dataclass(frozen=True, config=STRICT)(cls)
    return cast(type[X], made)


def read_settings(path: str | Path | None, cls: type[X], overrides: Sequence[str] = ()) -> X:
    """Returns a YAML file, changed by `section.key=value` in order, as settings; None: no file, only these.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: with all that does not fit `cls`.
    """
    mapping, problems = read_overridden(path, overrides, cls.__name__)
    return build_settings(mapping, cls, str(path or "the command line"), problems)


def build_settings(
    mapping: Mapping[str, Any], cls: type[X], what: str = "a mapping", problems: Sequence[str] = ()
) -> X:
    """Returns a mapping as settings; ValueError: with all that does not fit, behind the known `problems`."""
    problems = [*problems]
    try:
        # As JSON: in strict mode it may hold lists for tuples and mappings for sections.
        read = TypeAdapter(cls).validate_json(json.dumps(mapping, default=str))
    except ValidationError as error:
        problems += problems_of(error, cls)
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        lines = "".join(f"\n  - {line}" for line in (*problems[:SHOWN], *more))
        raise ValueError(f"{what} does not fit {cls.__name__}: {count}{lines}")
    return read


def problems_of(error: ValidationError, cls: type[Any]) -> list[str]:
    """Returns a line for each of pydantic's errors."""
    lines = []
    for one in error.errors(include_url=False):
        *above, last = one["loc"] or ("",)
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in one["loc"])[1:]
        if one["type"] == "unexpected_keyword_argument":
            known = [field.name for field in fields(_section(cls, above))]
            hint = hint_of(name) or suggest(str(last), known) or f"; known keys: {', '.join(known)}"
            lines.append(f"unknown key {name!r}{hint}")
        elif one["type"] in ("missing", "missing_argument"):
            lines.append(f"missing key {name!r}")
        elif one["type"] == "value_error":  # what a section refuses in __post_init__
            lines.append(f"{name}: {one['ctx']['error']}" if name else str(one["ctx"]["error"]))
        else:
            given, message = one["input"], one["msg"]
            hint = hint_of(given) or suggest(given, _choices(one)) if isinstance(given, str) else ""
            if isinstance(given, bool):
                hint = " (YAML reads yes, no, on, off as true or false: quote a word)"
            shown = repr(given) if len(repr(given)) < 200 else f"{repr(given)[:200]}..."
            lines.append(f"{name}: {message[0].lower()}{message[1:]}, got {shown}{hint}")
    return lines


def _section(cls: Any, names: Sequence[Any]) -> Any:
    """The class of a section within a section."""
    for name in names:
        cls = get_type_hints(cls)[name]
    return cls


def _choices(error: Any) -> list[str]:
    """The words that a field takes, of pydantic's error."""
    return error.get("ctx", {}).get("expected", "").replace(" or ", ", ").replace("'", "").split(", ")


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
