"""Builds frozen dataclasses from YAML files and `key=value` overrides, and reports all problems in one error.

pydantic checks them: annotations are the types, defaults are the only defaults, unknown keys are refused with
a suggestion. Types are strict, as in JSON: a whole number is a float too, and text is no number. A section
that is checked wherever it is made is a `pydantic.dataclasses.dataclass(frozen=True, config=STRICT)`.
"""

import inspect
import json
import os
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, make_dataclass
from dataclasses import field as dataclass_field
from fractions import Fraction
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from retain.process.registry import suggest
from retain.process.removed import hint_of

X = TypeVar("X")

# The largest number of any config: its square is still finite.
LARGEST = 1e30
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

Whole = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
# A number of 64 bits.
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# Of one text; of documents or items that are in memory together.
Tokens = Annotated[int, Field(ge=1, le=2**24)]
Many = Annotated[int, Field(ge=1, le=10**6)]
Positive = Annotated[float, Field(ge=1e-30, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(ge=1e-6, le=1)]
# Neither nothing nor all.
ProperShare = Annotated[float, Field(gt=0, lt=1)]


def load(
    path: str | os.PathLike[str] | None,
    cls: type[X],
    overrides: Sequence[str] = (),
    *,
    check: Callable[[X], object] | None = None,
) -> X:
    """Read a YAML file into a dataclass.

    Args:
        path: the file. Relative paths inside it are left as written. None: no file, the overrides alone.
        cls: the (frozen) dataclass to build; if it has `KINDS`, the union of dataclasses that it stands for.
        overrides: `key=value` or `section.key=value`, the value read as YAML; applied after the file, in
            order.
        check: raises a ValueError with what else is wrong; asked where only keys are unknown, so that one
            message has both.

    Returns:
        An instance of `cls`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file or an override does not fit `cls`; lists all problems at once.
    """
    mapping = {} if path is None else read_mapping(Path(path))
    problems: list[str] = []
    for override in overrides:
        _override_(mapping, override, problems)
    return _built(mapping, cls, "", problems, f"{path or 'command line'} does not fit {cls.__name__}", check)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file as a mapping; an empty file gives an empty one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, is no YAML, or no mapping.
    """
    if not path.is_file():
        near = [str(other) for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        problem = "is a folder" if path.is_dir() else f"does not exist{suggest(str(path), near)}"
        raise FileNotFoundError(
            f"config file {str(path)!r} {problem}: pass the path of a YAML file; relative paths start at "
            f"{str(Path.cwd())!r}."
        )
    try:
        mapping = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error
    except _UNREADABLE as error:
        raise ValueError(f"{path} is not valid YAML: {error!s:.1000}") from error
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise ValueError(f"{path} must hold `key: value` lines at its top, got {_shown(mapping)}.")
    return mapping


def build(mapping: Mapping[str, Any], cls: type[X], where: str = "") -> X:
    """Build a dataclass from a mapping, as `load` does from a file.

    Args:
        mapping: of values.
        cls: the dataclass.
        where: section that the mapping stands in, for errors; empty: none.

    Raises:
        ValueError: the mapping does not fit `cls`; lists all problems at once.
    """
    return _built(mapping, cls, where, [], f"mapping does not fit {cls.__name__}")


def problems_of(config: Any) -> list[str]:
    """List what of a dataclass that was made in code does not fit its annotations or ranges."""
    return _problems(to_mapping(config), type(config), "")[1]


def checked(
    settings: Mapping[str, Any], function: Callable[..., Any], where: str, others: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Check a function's settings by its annotations.

    Args:
        settings: keyword arguments by name.
        function: a function, or a class by its constructor.
        where: their name in messages.
        others: arguments that are no settings.

    Returns:
        the settings, whole numbers for fractions as fractions, and no problem; or none, and all problems.
    """
    made, problems = _problems(settings, _settings_class(function, tuple(others)), where)
    return {name: getattr(made, name) for name in settings} if not problems else {}, problems


@cache
def _settings_class(function: Callable[..., Any], others: tuple[str, ...]) -> type[Any]:
    """A dataclass of a function's settings."""
    parameters = inspect.signature(function).parameters.values()
    made = [
        (one.name, one.annotation, dataclass_field(default=one.default))
        for one in parameters
        if one.name not in others
    ]
    return make_dataclass(function.__name__, made)


def to_mapping(config: Any) -> dict[str, Any]:
    """Return the resolved config as dicts, lists and scalars: `build(to_mapping(c), type(c)) == c`."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config) if field.init}


def stated_of(config: Any) -> dict[str, Any]:
    """Return what of a config differs from its defaults, as `to_mapping` does."""
    stated: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if value != default:
            stated[field.name] = stated_of(value) if is_dataclass(value) else _plain(value)
    return stated


def key_help(cls: type[Any], prefix: str = "") -> Iterator[str]:
    """Yield a line for each key of a config, those of its sections included: name, type, default, meaning."""
    meanings = meanings_of(cls)
    hints, whole = get_type_hints(cls), get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        if is_dataclass(hints[field.name]):
            yield from key_help(hints[field.name], f"{prefix}{field.name}.")
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        shown = "required" if default is MISSING else json.dumps(default, ensure_ascii=False)
        kind = _typed(TypeAdapter(whole[field.name]).json_schema())
        yield f"{prefix}{field.name} ({kind}; {shown}): {meanings[field.name]}"


def meanings_of(cls: type[Any]) -> dict[str, str]:
    """Return the meaning of each field: the text below it, or its line of `Attributes` in the docstring."""
    if hasattr(cls, "__pydantic_fields__"):
        texts = {name: field.description or "" for name, field in cls.__pydantic_fields__.items()}
    else:
        _, _, attributes = (inspect.getdoc(cls) or "").partition("Attributes:\n")
        pattern = r"^    (\w+): ((?:.*\n?)(?:^        .*\n?)*)"
        texts = dict(re.findall(pattern, attributes, re.MULTILINE))
    return {name: " ".join(text.split()) for name, text in texts.items()}


def _typed(schema: dict[str, Any]) -> str:
    if options := schema.get("anyOf"):
        return " or ".join(map(_typed, options))
    if words := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return " | ".join(map(json.dumps, words))
    if "items" in schema:
        return f"list of {_typed(schema['items'])}"
    if isinstance(inside := schema.get("additionalProperties"), dict):
        return f"name: {_typed(inside)}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:,}" for key, sign in signs.items() if abs(schema.get(key, 1e18)) < 1e18]
    names = {"integer": "int", "number": "float", "string": "text", "boolean": "true | false"}
    return " ".join([names.get(kind := schema.get("type", "any"), kind), *bounds])


def leaves(mapping: Mapping[Any, Any], separator: str = ".") -> dict[str, Any]:
    """Flatten nested mappings to paths: `{"a": {"b": 1}}` becomes `{"a.b": 1}`.

    Args:
        mapping: of mappings; an empty one has no leaves.
        separator: between the names of a path.
    """
    found: dict[str, Any] = {}
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{separator}{path}": leaf for path, leaf in leaves(value, separator).items()}
        else:
            found[str(name)] = value
    return found


def plain_numbers(value: Any) -> Any:
    """Convert numbers of numpy, fractions and tensors of one number to int or float, also inside mappings,
    lists and tuples."""
    if isinstance(value, Mapping):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain_numbers(item) for item in value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return float(value) if isinstance(value, Fraction) else value


def _built(
    mapping: Any,
    cls: type[X],
    where: str,
    problems: list[str],
    what: str,
    check: Callable[[X], object] | None = None,
) -> X:
    """Build a dataclass, or raise all problems."""
    value, found = _problems(mapping, cls, where)
    if problems := problems + found:
        try:
            if check is not None and value is not None:
                check(value)
        except ValueError as error:
            problems.append(str(error))
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ValueError("\n  - ".join([f"{what}: {count}", *problems]))
    return value


def _problems(mapping: Any, cls: Any, where: str) -> tuple[Any, list[str]]:
    """The dataclass, and what did not fit it. Unknown keys are left out, so that they hide no other problem;
    None where there is one."""
    data: Any = _plain(mapping)
    said: list[str] = []
    while True:
        try:
            # As JSON, so that lists are tuples and text is a path, and all else is strict.
            return _adapter(cls).validate_json(json.dumps([data], default=str))[0], said
        except ValidationError as error:
            found = error.errors(include_url=False)
        unknown = [one for one in found if one["type"] == "unexpected_keyword_argument"]
        said += [_said(one, data, cls, where) for one in unknown or found]
        if not unknown:
            return None, said
        for one in unknown:
            *path, last = _keys(one, data)
            reduce(getitem, path, data).pop(last)


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    listed: Any = types.GenericAlias(list, (getattr(cls, "KINDS", cls),))
    return TypeAdapter(listed, config=STRICT)


def _keys(error: Any, data: Any) -> list[Any]:
    """The keys that lead to an error: of its place, which names members of unions too, those that are in the
    data, and the last one of a key that is missing."""
    keys: list[Any] = []
    for name in error["loc"][1:]:  # of the list that holds the data
        there = (
            name in data if isinstance(data, dict) else isinstance(data, list) and name in range(len(data))
        )
        if there:
            data = data[name]
        if there or (error["type"] == "missing" and name == error["loc"][-1]):
            keys.append(name)
    return keys


def _said(error: Any, data: Any, cls: Any, where: str) -> str:
    """Put a problem into words."""
    keys, name = _keys(error, data), where
    for key in keys:
        name = _joined(name, key)
    kind, value = error["type"], error["input"]
    if kind == "missing":
        return f"missing key {name!r}"
    if kind == "unexpected_keyword_argument":
        sections = _sections(getattr(cls, "KINDS", cls), keys[:-1])
        known = {field.name: None for section in sections for field in fields(section)}
        hint = hint_of(name) or suggest(str(keys[-1]), known) or f"; known keys: {', '.join(known)}"
        if keys[-1] in known:
            hint = ", which goes with other settings of its section (docs/policies.md)"
        return f"unknown key {name!r}{hint}"
    context, said, hint = error.get("ctx", {}), error["msg"], ""
    expected = context.get("expected", "")
    if kind == "union_tag_invalid":  # named by the key, or a function, that tells the members apart
        key, expected = context["discriminator"].strip("'()"), context["expected_tags"]
        name, value, said = _joined(name, key), value.get(key, value), f"input should be one of {expected}"
    start = f"{name}: " if name else ""
    if kind == "value_error":  # what the dataclass itself refuses
        return f"{start}{context['error']}"
    if isinstance(value, str):
        hint = suggest(value, re.findall("'([^']*)'", expected))
    elif isinstance(value, bool):
        hint = " (YAML reads yes, no, on, off as true or false: quote a word)"
    return f"{start}{said[0].lower()}{said[1:]}, got {_shown(value)}{hint}"


def _sections(hint: Any, keys: Sequence[Any]) -> list[Any]:
    """The dataclasses that may stand where these keys lead, from an annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _sections(arguments[0], keys)
    if origin in (Union, types.UnionType):
        return [found for one in arguments for found in _sections(one, keys)]
    if is_dataclass(hint):
        inside = get_type_hints(hint, include_extras=True) if keys else {}
        return _sections(inside.get(keys[0]), keys[1:]) if keys else [hint]
    return _sections(arguments[-1 if origin is dict else 0], keys[1:]) if arguments and keys else []


class _Loader(yaml.SafeLoader):
    """Loads YAML safely, refuses duplicate keys, and reads dates as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - of PyYAML
        first: [rule for rule in known if rule[0] != "tag:yaml.org,2002:timestamp"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        if twice := [key for number, key in enumerate(keys) if key in keys[:number]]:
            problem = f"key {twice[0]!r} is given twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep=True)  # deep: a mapping inside itself is refused


# `2e-4`, which YAML 1.1 reads as text.
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
# Errors of reading YAML; ValueError and its kin come from explicit tags (`!!int x`).
_UNREADABLE = (yaml.YAMLError, RecursionError, ValueError, TypeError, AttributeError, KeyError)


def _override_(mapping: dict[str, Any], override: str, problems: list[str]) -> None:
    """Set `section.key=value` in a nested mapping, in place."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        problems.append(f"override {override!r}: expected key=value, for example section.key=value")
        return
    try:
        value = yaml.load(text, Loader=_Loader)
    except _UNREADABLE as error:
        problems.append(f"override {override!r:.200}: its value is not valid YAML: {error!s:.1000}")
        return
    section = mapping
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            parent = ".".join(keys[:depth])
            problems.append(f"override {override!r}: {parent} is {_shown(section)}, not a section")
            return
    section[keys[-1]] = value


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _joined(where: str, key: Any) -> str:
    if isinstance(key, int):
        return f"{where}[{key}]"
    return f"{where}.{key}" if where else str(key)


def _shown(value: Any) -> str:
    return f"{value!r:.200} ({type(value).__name__})"


def whole(value: Any, name: str, least: int, most: int = 2**31) -> int:
    """A whole number (numpy's too) between two bounds.

    Raises:
        ValueError: it is none, or lies outside.
    """
    number = getattr(value, "item", lambda: value)()
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise ValueError(f"{name} is {value!r:.60}: pass a whole number of at least {least}, at most {most}.")
    return number
