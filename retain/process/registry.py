"""Looks names up in dicts, with an error that suggests the nearest known name.

Tables are plain dicts beside what they name (`SCORES`, `GATES`); there is no registration and no import by
dotted string.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar

from retain.process.removed import hint_of

X = TypeVar("X")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` most likely stands for, or None.

    Case, `-` against `_`, and a missing ending are forgiven.
    """
    plain = {key.lower().replace("-", "_"): key for key in sorted(known)}
    typed = name.lower().replace("-", "_")
    close = get_close_matches(typed, plain, n=1, cutoff=0.6)
    if not close and len(typed) >= 3:
        close = [key for key in plain if key.startswith(typed)][:1]
    return plain[close[0]] if close else None


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the nearest known name, or `""` if none is near.

    Examples:
        >>> suggest("fusoin", ["fusion", "floor"])
        " (did you mean 'fusion'?)"
    """
    match = nearest(name, known)
    return hint_of(name) or ("" if match is None else f" (did you mean {match!r}?)")


def lookup(name: str, table: Mapping[str, X], *, what: str) -> X:
    """Return `table[name]`.

    Args:
        name: the given name.
        table: everything that there is, by name.
        what: what the table holds, in the singular, for the error ("score", "gate family").

    Raises:
        ValueError: the table has no such name; says the nearest one and lists all.

    Examples:
        >>> lookup("mlp", {"linear": 1, "mlp": 2}, what="gate family")
        2
    """
    if name in table:
        return table[name]
    match = nearest(str(name), table)
    hint = "." if match is None else f": did you mean {match!r}?"
    if removed := hint_of(str(name)):
        hint = f"{removed}."
    raise ValueError(f"unknown {what} {name!r}{hint} Known: {', '.join(sorted(table)) or 'none'}.")


def check_choice(setting: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is none of the choices.

    Raises:
        ValueError: with the setting's name and all choices.
    """
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{setting} is {', '.join(others)} or {last}; got {value!r}.")
