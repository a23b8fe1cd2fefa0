"""Defines sections of a config whose fields say their meaning, and collects what is wrong with one.

A section is a class with `@section`: types and bounds are those of its fields, a field's meaning is the text
below it, its default stands nowhere else. `retain.config` reads, checks and lists it.
"""

from collections.abc import Collection, Iterable
from typing import Any, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

from retain.config import STRICT
from retain.process.registry import suggest

X = TypeVar("X")
SPOKEN = ConfigDict(use_attribute_docstrings=True, **STRICT)


@dataclass_transform(frozen_default=True)
def section(cls: type[X]) -> type[X]:
    """Makes a class of annotated fields a frozen section of a config, checked wherever it is made."""
    made: Any = pydantic_dataclass(frozen=True, config=SPOKEN)(cls)
    return cast(type[X], made)


def unknown(names: Iterable[str], known: Collection[str], *, what: str, key: str) -> list[str]:
    """Returns a text for every unknown name, after the config's `key`; `what` they are is in the singular."""
    return [
        f"{key}: unknown {what} {name!r}{suggest(name, known)}; known: {', '.join(known)}"
        for name in names
        if name not in known
    ]


def refuse(*rules: tuple[object, str], found: Iterable[str] = ()) -> None:
    """Raises ValueError with all problems, if there are any: those that were `found` already, then the texts
    of the rules that are broken; a rule is (whether it is broken, what to say of it)."""
    if problems := [*found, *(text for wrong, text in rules if wrong)]:
        raise ValueError("; ".join(problems) + ".")
