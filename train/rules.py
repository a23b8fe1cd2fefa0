"""Collects everything that is wrong with settings into one error."""

from collections.abc import Iterable, Mapping
from typing import Any

from retain.registry import lookup


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
