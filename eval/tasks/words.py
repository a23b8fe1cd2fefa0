"""Draws the words of generated tasks from the lists of wonderwords (MIT), as RULER reads them.

Lists are sorted and without repetitions, so that a draw does not depend on the order of a file.
"""

import random
import uuid
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files

from retain.process.extras import require
from retain.registry import lookup


@cache
def listed(part: str) -> tuple[str, ...]:
    """All words of a part of speech ("noun", "verb" or "adjective"), sorted.

    Raises:
        ValueError: wonderwords is not installed.
    """
    require("eval", "wonderwords", what="a generated task, which draws its words,")
    text = (files("wonderwords.assets") / f"{part}list.txt").read_text(encoding="utf-8")
    return tuple(sorted({word.strip() for word in text.splitlines()} - {""}))


@cache
def all_words() -> tuple[str, ...]:
    """Nouns, verbs and adjectives together, each word once, sorted."""
    return tuple(sorted({word for part in ("noun", "verb", "adjective") for word in listed(part)}))


@cache
def plain(part: str) -> tuple[str, ...]:
    """The words of a part of speech that are one lower-case word."""
    return tuple(word for word in listed(part) if word.isascii() and word.isalpha() and word.islower())


def draw_number(draw: random.Random) -> str:
    """Draw seven digits, the first not 0."""
    return str(draw.randint(10**6, 10**7 - 1))


def draw_word(draw: random.Random) -> str:
    """Draw an adjective and a noun, joined by a hyphen."""
    return f"{draw.choice(listed('adjective'))}-{draw.choice(listed('noun'))}"


# Kinds of keys and values, by the names that needles call them.
DRAWN: Mapping[str, Callable[[random.Random], str]] = {
    "numbers": draw_number,
    "words": draw_word,
    "uuids": lambda draw: str(uuid.UUID(int=draw.getrandbits(128), version=4)),
}


def draw_different(kind: str, count: int, draw: random.Random, taken: set[str]) -> list[str]:
    """Draw `count` different keys or values of one kind, none of which is among `taken`, and add them to it.

    Raises:
        ValueError: no such kind.
    """
    make = lookup(kind, DRAWN, what="kind of key or value")
    found: list[str] = []
    while len(found) < count:
        one = make(draw)
        if one not in taken:
            taken.add(one)
            found.append(one)
    return found
