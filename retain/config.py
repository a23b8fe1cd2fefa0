"""Configuration: YAML and `key=value` overrides become one frozen dataclass, or one error with every problem.

In: a path, a dataclass type, overrides as typed on a command line. Out: an instance of it. The decision
taken here: the dataclass is the schema. Its annotations are the types, its defaults are the only defaults,
and nothing in the file that it does not name is accepted. What is left out of a nested section keeps the
value of the section's own default.

Annotations understood: `str`, `int`, `float`, `bool`, `Path`, `Any`, `Literal[...]`, `X | Y`,
`tuple[X, ...]`, `tuple[X, Y]`, `dict[str, X]`, and dataclasses of these. A whole number is accepted where a
float is wanted, and so is `2e-4`, which YAML reads as text.
"""

import os
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from numbers import Rational, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from retain.registry import suggest

X = TypeVar("X")

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def load(path: str | os.PathLike[str], cls: type[X], overrides: Sequence[str] = ()) -> X:
    """Read a YAML file into a dataclass.

    Args:
        path: the file. Relative paths inside it are left as written. cls: the (frozen) dataclass to build.
        overrides: `key=value` or `section.key=value`, the value read as YAML; applied in order, after the
        file.

    Returns:
        An instance of `cls`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file or an override does not fit `cls`; lists all problems at once.
    """
    path = Path(path)
    if not path.is_file():
        neighbours = [str(other) for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise FileNotFoundError(
            f"config file {str(path)!r} does not exist{suggest(str(path), neighbours)}. "
            f"Pass the path of a YAML file for {cls.__name__}; relative paths start at {str(Path.cwd())!r}."
        )
    problems: list[str] = []
    try:
        mapping = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if mapping is None:
        mapping = {}
    if not isinstance(mapping, dict):
        raise ValueError(f"{path} must hold `key: value` lines at its top, got {_shown(mapping)}.")
    for override in overrides:
        _override_(mapping, override, problems)
    value = _Builder(problems).section(mapping, cls, "", MISSING)
    _raise(problems, f"{path} does not fit {cls.__name__}")
    return value


def build(mapping: Mapping[str, Any], cls: type[X]) -> X:
    """Build a dataclass from a mapping, as `load` does from a file.

    Raises:
        ValueError: the mapping does not fit `cls`; lists all problems at once.
    """
    problems: list[str] = []
    value = _Builder(problems).section(mapping, cls, "", MISSING)
    _raise(problems, f"mapping does not fit {cls.__name__}")
    return value


def to_mapping(config: Any) -> dict[str, Any]:
    """Return the resolved config as dicts, lists and scalars: `build(to_mapping(c), type(c)) == c`."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config) if field.init}


def leaves(mapping: Mapping[Any, Any], separator: str = ".") -> dict[str, Any]:
    """Every value that is no mapping under its path: `{"a": {"b": 1}}` becomes `{"a.b": 1}`.

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


def save(config: Any, path: str | os.PathLike[str]) -> None:
    """Write the resolved config as YAML, so that `load(path, type(config)) == config`.

    Written beside and renamed, so that a failure leaves an earlier file as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    text = yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True)
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def plain_numbers(value: Any) -> Any:
    """The same with every number as Python has it: those of numpy, fractions and tensors of one number become
    an int or a float, by the digits that they show. Mappings, lists and tuples are walked through, and
    anything else is left as it is."""
    if isinstance(value, Mapping):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain_numbers(item) for item in value)
    if not isinstance(value, Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    if isinstance(value, Rational):  # whole numbers are
        return int(value.numerator) if value.denominator == 1 else float(value)
    return float(str(value))


@dataclass(frozen=True)
class _Builder:
    """One walk over a mapping; what does not fit is appended to `problems`, and the walk goes on."""

    problems: list[str]

    def section(self, mapping: Any, cls: type, where: str, base: Any) -> Any:
        """Build the dataclass `cls` from `mapping`; `base` (or MISSING) gives what the mapping leaves out."""
        if not isinstance(mapping, Mapping):
            return self.problem(where, f"expected a section with the keys of {cls.__name__}", mapping)
        hints = get_type_hints(cls)
        known = {field.name: field for field in fields(cls) if field.init}
        before = len(self.problems)
        for key in mapping:
            if key not in known:
                hint = suggest(str(key), known) or f"; known keys: {', '.join(known)}"
                self.problems.append(f"unknown key {_joined(where, key)!r}{hint}")
        values: dict[str, Any] = {}
        for name, field in known.items():
            default = _default(field) if base is MISSING else getattr(base, name)
            if name in mapping:
                values[name] = self.value(mapping[name], hints[name], _joined(where, name), default)
            elif default is not MISSING:
                values[name] = default
            else:
                self.problems.append(f"missing key {_joined(where, name)!r} ({_named(hints[name])})")
        if len(self.problems) > before:
            return None
        try:
            return cls(**values)
        except ValueError as error:  # what the dataclass itself refuses in __post_init__
            self.problems.append(f"{where}: {error}" if where else str(error))
            return None

    def value(self, value: Any, hint: Any, where: str, base: Any = MISSING) -> Any:
        """Fit one value to one annotation."""
        origin, arguments = get_origin(hint), get_args(hint)
        if hint is Any or hint is object:
            return value
        if origin in (Union, types.UnionType):
            return self.union(value, arguments, hint, where, base)
        if origin is Literal:
            return self.choice(value, arguments, where)
        if is_dataclass(hint) and isinstance(hint, type):
            return self.section(value, hint, where, base if isinstance(base, hint) else MISSING)
        if origin is tuple or hint is tuple:
            return self.items(value, arguments or (Any, ...), hint, where)
        if origin in (dict, Mapping) or hint is dict:
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                return self.problem(where, f"expected {_named(hint)}", value)
            item_hint = arguments[1] if arguments else Any
            return {key: self.value(item, item_hint, _joined(where, key)) for key, item in value.items()}
        return self.scalar(value, hint, where)

    def union(self, value: Any, options: tuple[Any, ...], hint: Any, where: str, base: Any) -> Any:
        """Take the first option that fits; where only one is not None, report its own problems."""
        if value is None and type(None) in options:
            return None
        options = tuple(option for option in options if option is not type(None))
        exact = [option for option in options if isinstance(option, type) and type(value) is option]
        for option in (*exact, *options):
            trial = _Builder([])
            fitted = trial.value(value, option, where, base)
            if not trial.problems:
                return fitted
        if len(options) == 1:
            self.problems.extend(trial.problems)
            return None
        return self.problem(where, f"expected {_named(hint)}", value)

    def choice(self, value: Any, choices: tuple[Any, ...], where: str) -> Any:
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        near = suggest(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else ""
        return self.problem(where, f"expected one of {', '.join(map(repr, choices))}", value, near)

    def items(self, value: Any, arguments: tuple[Any, ...], hint: Any, where: str) -> Any:
        if not isinstance(value, list | tuple):
            return self.problem(where, f"expected a list for {_named(hint)}", value)
        if arguments[-1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        if len(arguments) != len(value):
            return self.problem(where, f"expected {len(arguments)} items for {_named(hint)}", value)
        pairs = enumerate(zip(value, arguments, strict=True))
        return tuple(self.value(item, item_hint, f"{where}[{i}]") for i, (item, item_hint) in pairs)

    def scalar(self, value: Any, hint: Any, where: str) -> Any:
        if hint is float:
            if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
                return float(value)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        elif hint is Path:
            if isinstance(value, str | Path):
                return Path(value)
        elif hint is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        elif isinstance(hint, type) and isinstance(value, hint):
            return value
        return self.problem(where, f"expected {_named(hint)}", value)

    def problem(self, where: str, wanted: str, value: Any, hint: str = "") -> None:
        if isinstance(value, bool):
            hint = hint or " (YAML reads yes, no, on, off as true or false: quote a word)"
        self.problems.append(f"{where + ': ' if where else ''}{wanted}, got {_shown(value)}{hint}")


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, of which the first would be lost without a word."""


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            problem = f"key {key!r} is given twice"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)


def _override_(mapping: dict[str, Any], override: str, problems: list[str]) -> None:
    """Set `section.key=value` in a nested mapping, in place."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        problems.append(f"override {override!r}: expected key=value, for example section.key=value")
        return
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problems.append(f"override {override!r}: its value is not valid YAML: {error}")
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


def _raise(problems: list[str], what: str) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ValueError(f"{what}: {count}\n" + "\n".join(f"  - {problem}" for problem in problems))


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _joined(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _named(hint: Any) -> str:
    """Name an annotation as a reader would write it in the dataclass."""
    if isinstance(hint, type) and get_origin(hint) is None:
        return hint.__name__
    return str(hint).replace("typing.", "")


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
