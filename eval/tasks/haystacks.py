"""Provides haystacks (sentences without end), puts needles between them, and draws the words of both.

RULER's essays have no licence and are not here; other texts take their place under other names:

- `gen-prose`: sentences from frames, filled with words of wonderwords; the default, needs nothing;
- `file:PATH`: any UTF-8 text, split into sentences by pysbd, from a sentence that the row draws. The random
  numbers of a row depend on the content of the text (`identity`), not on its path.

Words are drawn from the lists of wonderwords (MIT), as RULER reads them, sorted and without repetitions.
"""

import hashlib
import random
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path

from retain.process.extras import require
from retain.process.registry import lookup

DEFAULT = "gen-prose"

# Frames of the generated prose. `a` adjective, `n` noun, `v` verb in its plain form.
_FRAMES = (
    "The {a} {n} would {v} near the {n2}.",
    "Nobody in the {n} had ever seen a {n2} so {a}.",
    "When the {n} began to {v}, the {n2} seemed {a}.",
    "She kept a {a} {n} beside the {n2}.",
    "They could not {v} the {n} without a {n2}.",
    "It was said that every {n} must {v} before the {n2} turns {a}.",
    "A {a} {n} and a {a2} {n2} stood by the road.",
    "He asked the {n} to {v}, but the {n2} stayed {a}.",
    "Some days the {n} is {a}, and some days it is {a2}.",
    "In the morning the {n} of the {n2} looked {a} again.",
    "There is nothing as {a} as a {n} that learns to {v}.",
    "The old {n} told them how to {v} a {a} {n2}.",
)


@dataclass
class Haystack:
    """Sentences without end.

    `sentence` makes the next one, given its number; `joint` stands between two; `known` are made.
    """

    name: str
    sentence: Callable[[int], str]
    joint: str = " "
    known: list[str] = field(default_factory=list)

    def sentences(self, count: int) -> list[str]:
        """The first `count` sentences."""
        while len(self.known) < count:
            self.known.append(self.sentence(len(self.known)))
        return self.known[:count]


def load_haystack(name: str, draw: random.Random) -> Haystack:
    """Load a haystack by its name ("gen-prose" or "file:PATH"); the same random state gives the same
    sentences.

    Raises:
        ValueError: No such haystack, or a file that cannot be read or holds nothing.
    """
    if name == DEFAULT:
        # Another stream: how many sentences are made must not change any other draw.
        prose = random.Random(draw.getrandbits(64))
        return Haystack(DEFAULT, lambda number: _prose(prose))
    if not name.startswith("file:"):
        lookup(name, {DEFAULT: None, "file:PATH": None}, what="haystack")
    path = name.removeprefix("file:")
    digest, sentences = _file_sentences(path)
    start = draw.randrange(len(sentences))
    # Two texts never share a name in a table, and the path stays private.
    shown = f"file:{Path(path).name}@{digest}"
    return Haystack(shown, lambda number: sentences[(start + number) % len(sentences)])


def identity(name: str) -> str:
    """A haystack's name as random numbers depend on it; of a file, `file:` and 16 digits of its SHA-256."""
    return f"file:{_file_sentences(name.removeprefix('file:'))[0]}" if name.startswith("file:") else name


def _prose(draw: random.Random) -> str:
    # The order of the fields is the order of the draws.
    frame = draw.choice(_FRAMES)
    parts = {"n": "noun", "n2": "noun", "v": "verb", "a": "adjective", "a2": "adjective"}
    sentence = frame.format(**{name: draw.choice(_plain(part)) for name, part in parts.items()})
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", sentence)  # "an" before a vowel


@lru_cache(maxsize=4)
def _file_sentences(path: str) -> tuple[str, tuple[str, ...]]:
    """Digest of a text, and its sentences."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"haystack 'file:{path}' cannot be read: {error}. Pass a text in UTF-8, or {DEFAULT!r}, which "
            "needs none."
        ) from error
    require("eval", "pysbd", what="a haystack from a file, which is split into sentences,")
    from pysbd import Segmenter

    # A paragraph at a time: pysbd's time grows faster than the text.
    segmenter = Segmenter(language="en", clean=False)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    found = tuple(
        sentence.strip() for part in paragraphs if part for sentence in segmenter.segment(part) if sentence
    )
    if not found:
        raise ValueError(f"haystack 'file:{path}' holds no sentence: pass another text.")
    return hashlib.sha256(text.encode()).hexdigest()[:16], found


def insert(hay: Haystack, size: int, placed: Sequence[tuple[int, str]], opening: str = "") -> str:
    """Put needles between the first `size` sentences of a haystack, behind `opening`. Each needle comes with
    the number of the sentence that it stands before (`size`: at the end)."""
    before: dict[int, list[str]] = {}
    for place, needle in placed:
        before.setdefault(place, []).append(needle)
    parts: list[str] = []
    for place, sentence in enumerate(hay.sentences(size)):
        parts += [*before.get(place, ()), sentence]
    return opening + hay.joint.join([*parts, *before.get(size, ())])


def spans(context: str, needles: Sequence[str]) -> list[tuple[int, int]]:
    """Spans `[start, stop)` of characters of the first occurrence of each needle in a context."""
    return [(start, start + len(needle)) for needle in needles for start in [context.index(needle)]]


@cache
def _listed(part: str) -> tuple[str, ...]:
    """All words of a part of speech ("noun", "verb" or "adjective"), sorted."""
    require("eval", "wonderwords", what="a generated task, which draws its words,")
    text = (files("wonderwords.assets") / f"{part}list.txt").read_text(encoding="utf-8")
    return tuple(sorted({word.strip() for word in text.splitlines()} - {""}))


@cache
def _plain(part: str) -> tuple[str, ...]:
    """The words of a part of speech that are one lower-case word."""
    return tuple(word for word in _listed(part) if word.isascii() and word.isalpha() and word.islower())


def draw_number(draw: random.Random) -> str:
    """Draw seven digits, the first not 0."""
    return str(draw.randint(10**6, 10**7 - 1))


def draw_word(draw: random.Random) -> str:
    """Draw an adjective and a noun, joined by a hyphen."""
    return f"{draw.choice(_listed('adjective'))}-{draw.choice(_listed('noun'))}"


# Kinds of keys and values, by the names that needles call them.
DRAWN: Mapping[str, Callable[[random.Random], str]] = {
    "numbers": draw_number,
    "words": draw_word,
    "uuids": lambda draw: str(uuid.UUID(int=draw.getrandbits(128), version=4)),
}


def draw_new(kind: str, draw: random.Random, taken: set[str]) -> str:
    """Draw a key or value of one kind that is not among `taken`, and add it to it."""
    make = lookup(kind, DRAWN, what="kind of key or value")
    while (one := make(draw)) in taken:
        pass
    taken.add(one)
    return one
