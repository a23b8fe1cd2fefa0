"""Collects everything that is wrong with settings into one error."""

from collections.abc import Iterable, Mapping
from typing import Any

from retain.registry import lookup


def broken(*rules: tuple[object, str]) -> list[str]:
    """The texts of the rules that are broken.

    Args:
        rules: (whether it is broken, what to say of it).
    """
    return [text for wrong, text in rules if wrong]


def unknown(names: Iterable[str], known: Mapping[str, Any], *, what: str, key: str = "") -> list[str]:
    """A text for every name that is not known.

    Args:
        names: as typed.
        known: all that there are.
        what: they are, in the singular.
        key: of the config, in front of each text.
    """
    problems = []
    for name in names:
        try:
            lookup(name, known, what=what)
        except ValueError as error:
            problems.append(f"{key}: {error}" if key else str(error))
    return problems


def refuse(problems: list[str]) -> None:
    """Raise ValueError with all problems, if there are any."""
    if problems:
        raise ValueError("; ".join(problems) + ".")
