"""Builds frozen dataclasses from YAML files and `key=value` overrides, and reports all problems in one error.

The dataclass is the schema: its annotations are the types, its defaults are the only defaults, and unknown
keys are refused. Keys that a nested section leaves out keep the section's own defaults.

Supported annotations: `str`, `int`, `float`, `bool`, `Path`, `Any`, `Literal[...]`, `X | Y`, `tuple[X, ...]`,
`tuple[X, Y]`, `dict[str, X]`, `Annotated[X, Range(...)]`, and dataclasses of these. A float field accepts
whole numbers and `2e-4`, which YAML reads as text. A number must lie in its `Range`; without one, a float
must be finite and an int must fit into 64 bits.

Ours and not pydantic: these messages (all problems at once, the nearest known key, ranges in words) are held
by tests, and the core needs no further dependency.
"""

import os
import re
import stat
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral, Rational, Real
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from retain.gone import hint_of
from retain.registry import suggest

X = TypeVar("X")

# The largest number of any config: its square is still finite.
LARGEST = 1e30
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
# Values of a file, and sections within sections. An alias (`*name`) counts as often as it is used.
MOST_VALUES = 100_000
DEEPEST = 50
# Problems of a file that are listed.
SHOWN = 100


@dataclass(frozen=True)
class Range:
    """Bounds a number of a config: `lr: Annotated[float, Range(above=0)]`.

    Args:
        least: smallest value.
        most: largest value.
        above: exclusive lower bound.
        below: exclusive upper bound.
    """

    least: int | float = -LARGEST
    most: int | float = LARGEST
    above: int | float | None = None
    below: int | float | None = None

    def __contains__(self, value: Any) -> bool:
        return (
            self.least <= value <= self.most
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        low = f"at least {self.least:,}" if self.above is None else f"above {self.above:,}"
        high = f"at most {self.most:,}" if self.below is None else f"below {self.below:,}"
        bounds = [low] * (self.above is not None or self.least > -LARGEST)
        bounds += [high] * (self.below is not None or self.most < LARGEST)
        return " and ".join(bounds) or "finite"


Whole = Annotated[int, Range(least=0)]
Count = Annotated[int, Range(least=1)]
# Of one text; of documents or items that are in memory together.
Tokens = Annotated[int, Range(least=1, most=2**24)]
Many = Annotated[int, Range(least=1, most=10**6)]
Positive = Annotated[float, Range(least=1e-30)]
NotNegative = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
PositiveShare = Annotated[float, Range(least=1e-6, most=1)]
# Neither nothing nor all.
ProperShare = Annotated[float, Range(above=0, below=1)]


def load(path: str | os.PathLike[str], cls: type[X], overrides: Sequence[str] = ()) -> X:
    """Read a YAML file into a dataclass.

    Args:
        path: the file. Relative paths inside it are left as written.
        cls: the (frozen) dataclass to build.
        overrides: `key=value` or `section.key=value`, the value read as YAML; applied after the file, in
            order.

    Returns:
        An instance of `cls`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file or an override does not fit `cls`; lists all problems at once.
    """
    mapping, problems = read_overridden(path, overrides, cls.__name__)
    value = _Builder(problems).section(mapping, cls, "", MISSING)
    _raise(problems, f"{path} does not fit {cls.__name__}")
    return value


def read_overridden(
    path: str | os.PathLike[str] | None, overrides: Sequence[str], what: str
) -> tuple[dict[str, Any], list[str]]:
    """Read a YAML file (None: an empty one), and set `section.key=value` in it, in order.

    Args:
        path: the file. Relative paths inside it are left as written.
        overrides: values are read as YAML.
        what: the file is to hold, for errors.

    Returns:
        the mapping, and the problems of overrides.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, or is no YAML.
    """
    mapping: dict[str, Any] = {}
    if path is not None:
        path = Path(path)
        if not path.is_file():
            found = what_is_at(path)
            neighbours = [str(other) for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
            raise FileNotFoundError(
                f"config file {str(path)!r} "
                f"{found or 'does not exist' + suggest(str(path), neighbours)}. "
                f"Pass the path of a YAML file for {what}; relative paths start at {str(Path.cwd())!r}."
            )
        mapping = read_mapping(path)
    problems: list[str] = []
    for override in overrides:
        _override_(mapping, override, problems)
    return mapping, problems


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file as a mapping; an empty file gives an empty one.

    Raises:
        ValueError: it cannot be read, is no YAML, or no mapping.
    """
    try:
        mapping = _parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (*_UNREADABLE, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {_why(error)}") from error
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise ValueError(f"{path} must hold `key: value` lines at its top, got {_shown(mapping)}.")
    return mapping


def what_is_at(path: Path) -> str:
    """Describe what a path holds instead of a file, as the end of a sentence; empty if it holds nothing."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return f"is a symbolic link to {os.readlink(path)}, which does not exist" if path.is_symlink() else ""
    except OSError as error:
        return f"cannot be reached: {error.strerror}"  # a circle of symbolic links, a folder that is closed
    except ValueError as error:
        return f"is no path: {error}"
    kinds = ((stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "named pipe"), (stat.S_ISSOCK, "socket"))
    kind = next((name for is_kind, name in kinds if is_kind(mode)), "device")
    return f"is a {kind}, and a file is wanted"


def build(mapping: Mapping[str, Any], cls: type[X], where: str = "") -> X:
    """Build a dataclass from a mapping, as `load` does from a file.

    Args:
        mapping: of values.
        cls: the dataclass.
        where: section that the mapping stands in, for errors; empty: none.

    Raises:
        ValueError: the mapping does not fit `cls`; lists all problems at once.
    """
    problems: list[str] = []
    value = _Builder(problems).section(mapping, cls, where, MISSING)
    _raise(problems, f"mapping does not fit {cls.__name__}")
    return value


def problems_of(config: Any) -> list[str]:
    """List the fields of a dataclass made in code that do not fit their annotations or ranges."""
    builder, hints = _Builder([]), _hints(config.__class__)
    for name, value in to_mapping(config).items():
        builder.value(value, hints[name], name)
    return builder.problems


def check_fields(config: Any, name: str) -> None:
    """Refuse a dataclass whose fields do not fit their annotations; for its `__post_init__`.

    Args:
        config: the dataclass.
        name: what the message calls it.

    Raises:
        ValueError: with all that does not fit.
    """
    if problems := problems_of(config):
        raise ValueError(f"{name}: {'; '.join(problems)}.")


def to_mapping(config: Any) -> dict[str, Any]:
    """Return the resolved config as dicts, lists and scalars: `build(to_mapping(c), type(c)) == c`."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config) if field.init}


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
    """Convert numbers of numpy, fractions and one-element tensors to int or float, by the digits that they
    show. Walks through mappings, lists and tuples, and leaves other values alone."""
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
    """Walks over one mapping, collects what does not fit in `problems`, and goes on."""

    problems: list[str]

    def section(self, mapping: Any, cls: type, where: str, base: Any) -> Any:
        """Build the dataclass `cls` from `mapping`; `base` (or MISSING) gives what the mapping leaves out."""
        if not isinstance(mapping, Mapping):
            return self.problem(where, f"expected a section with the keys of {cls.__name__}", mapping)
        hints = _hints(cls)
        known = {field.name: field for field in fields(cls) if field.init}
        before = len(self.problems)
        for key in mapping:
            if key not in known:
                name = _joined(where, key)
                hint = hint_of(name) or suggest(str(key), known) or f"; known keys: {', '.join(known)}"
                self.problems.append(f"unknown key {name!r}{hint}")
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
            return self.anything(value, where)
        if origin is Annotated:
            return self.number(value, arguments[0], arguments[1], where)
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
        """Take the first option that fits; else report the problems of the only one, or, of sections, of that
        which knows most of the keys."""
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
        if isinstance(value, Mapping) and all(is_dataclass(option) for option in options):
            known = [len({*value} & {field.name for field in fields(option)}) for option in options]
            return self.value(value, options[known.index(max(known))], where, base)
        return self.problem(where, f"expected {_named(hint)}", value)

    def choice(self, value: Any, choices: tuple[Any, ...], where: str) -> Any:
        if any(type(value) is type(choice) and value == choice for choice in choices):
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
        if hint in (int, float):
            return self.number(value, hint, Range(), where)
        if hint is Path:
            if isinstance(value, str | Path):
                return Path(value)
        elif isinstance(hint, type) and isinstance(value, hint):
            return value
        return self.problem(where, f"expected {_named(hint)}", value)

    def anything(self, value: Any, where: str) -> Any:
        """Accept any value, but check the numbers in it."""
        if isinstance(value, Mapping):
            return {key: self.anything(item, _joined(where, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.anything(item, f"{where}[{i}]") for i, item in enumerate(value))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self.number(value, type(value), Range(), where)
        return value

    def number(self, value: Any, hint: type, bounds: Range, where: str) -> Any:
        """Fit a number to `int` or `float` and to its range."""
        if hint is float and isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            value = float(value)
        fits = isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
        if not fits:
            gone = hint_of(value) if isinstance(value, str) else ""
            return self.problem(where, f"expected {hint.__name__}", value, gone)
        if value not in bounds:
            return self.problem(where, f"expected {hint.__name__} {bounds}", value)
        if hint is int and abs(value) >= 2**63:
            return self.problem(where, "expected an int of 64 bits", value)
        return hint(value)

    def problem(self, where: str, wanted: str, value: Any, hint: str = "") -> None:
        if isinstance(value, bool):
            hint = hint or " (YAML reads yes, no, on, off as true or false: quote a word)"
        self.problems.append(f"{where + ': ' if where else ''}{wanted}, got {_shown(value)}{hint}")


class _Loader(yaml.SafeLoader):
    """Loads YAML safely, refuses duplicate keys, and reads dates as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - of PyYAML
        first: [rule for rule in known if rule[0] != "tag:yaml.org,2002:timestamp"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            problem = "a list or a mapping stands where a key is wanted"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            problem = f"key {key!r} is given twice"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int:
    try:
        return loader.construct_yaml_int(node)
    except ValueError as error:  # Python reads no more than 4300 digits
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _number)
# Errors of reading YAML; ValueError and its kin come from explicit tags (`!!int x`).
_UNREADABLE = (yaml.YAMLError, RecursionError, ValueError, TypeError, AttributeError, KeyError)


def _parsed(text: str) -> Any:
    """Parse a YAML text.

    Raises:
        one of `_UNREADABLE`: it is no YAML, or holds more than any config.
    """
    value = yaml.load(text, Loader=_Loader)
    count, open_ = 0, [(value, 0)]
    while open_:
        one, depth = open_.pop()
        count += 1
        if count > MOST_VALUES or depth > DEEPEST:
            raise ValueError(
                f"it holds more than {MOST_VALUES:,} values, or sections more than {DEEPEST} deep; an alias "
                "counts as often as it is used"
            )
        inside = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        open_ += ((item, depth + 1) for item in inside)
    return value


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply."
    return str(error) or type(error).__name__


def _override_(mapping: dict[str, Any], override: str, problems: list[str]) -> None:
    """Set `section.key=value` in a nested mapping, in place."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        problems.append(f"override {override!r}: expected key=value, for example section.key=value")
        return
    if len(keys) > DEEPEST:
        problems.append(f"override {_SHORT.repr(override)}: no section is more than {DEEPEST} deep")
        return
    try:
        value = _parsed(text)
    except _UNREADABLE as error:
        problems.append(f"override {_SHORT.repr(override)}: its value is not valid YAML: {_why(error)}")
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
        lines = [f"  - {problem}" for problem in problems[:SHOWN]]
        lines += [f"  - and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ValueError("\n".join([f"{what}: {count}", *lines]))


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
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{_named(arguments[0])} {arguments[1]}"
    if origin in (Union, types.UnionType):
        return " | ".join(map(_named, arguments))
    if arguments and origin is not Literal:
        inside = ", ".join("..." if own is Ellipsis else _named(own) for own in arguments)
        return f"{origin.__name__}[{inside}]"
    if isinstance(hint, type):
        return "None" if hint is type(None) else hint.__name__
    return str(hint).replace("typing.", "")


# Values in messages: as they are, but for what would fill a screen.
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = 20


def _shown(value: Any) -> str:
    return f"{_SHORT.repr(value)} ({type(value).__name__})"


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)
