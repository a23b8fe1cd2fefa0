"""Writes several questions on one compressed context, asked apart (requests) or one after another (turns).

After the idea of Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods" (arXiv
2412.10319): a cache compressed with the first question in view also serves the others, so scores are read per
question. The contexts are ours: pairs of keys and values (its Retr.KV), chains of variables (Retr.MultiHop),
a log of deliveries to be counted (global, as its Math.Find and summaries), and all three in one context.

Questions are spread over the context, one for each of as many equal stretches, in an order drawn by the item;
so a policy that keeps one end cannot answer them all.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from retain.eval.tasks.haystacks import with_articles, woven
from retain.eval.tasks.ruler import NOISE
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.eval.tasks.words import draw_different, plain

KV_OPENING = "Below is a JSON object. I will ask for the values of some of its keys afterwards.\n\n"
VT_OPENING = "Below, variables are assigned values or other variables. I will ask about them afterwards.\n\n"
LOG_OPENING = "Below is a log of deliveries. I will ask about all of it afterwards.\n\n"
_TOWNS = ("Ashford", "Belmont", "Clifton", "Dover", "Easton", "Farley")


def multi_turn_kv(
    asking: Asking, *, questions: int = 5, turns: bool = False, kind: str = "uuids"
) -> TextItem:
    """Ask for values of `questions` keys in a JSON object.

    Args:
        asking: Which item.
        questions: How many keys are asked for.
        turns: Whether questions follow each other, with right answers between.
        kind: Of keys and values: "uuids", "words" or "numbers".

    Raises:
        ValueError: no question, or a context too short for as many pairs.
    """
    draw = _draw("kv", asking, questions, kind)
    pairs = _Pairs(kind, draw)
    size = asking.fit(lambda count: _joined(pairs.text(count)), least=questions, what="multi_turn_kv")
    asked = _spread(size, questions, draw)
    return _item(
        _joined(pairs.text(size)),
        [_about(pairs.question(place), "kv", 100 * place / size) for place in asked],
        [pairs.line(place) for place in asked],
        turns,
        {"pairs": float(size)},
    )


def multi_turn_tracing(asking: Asking, *, questions: int = 4, turns: bool = False, hops: int = 2) -> TextItem:
    """Ask for the variables that hold a value, through assignments to each other, among noise.

    Args:
        asking: Which item.
        questions: How many chains there are; each is asked for once.
        turns: As `multi_turn_kv` takes it.
        hops: Assignments of one variable to the next.

    Raises:
        ValueError: no question, no hop, or a context too short for the chains.
    """
    if hops < 1:
        raise ValueError(f"multi_turn_tracing: hops is 1 or more, got {hops}.")
    chains = _Chains(questions, hops, _draw("tracing", asking, questions, hops))
    size = asking.fit(lambda count: _joined(chains.text(count)), least=1, what="multi_turn_tracing")
    asked = [_about(chains.question(number), "tracing") for number in range(questions)]
    return _item(_joined(chains.text(size)), asked, sum(chains.lines, []), turns, {})


def multi_turn_counting(asking: Asking, *, questions: int = 4, turns: bool = False) -> TextItem:
    """Ask how many deliveries of a log went to each of `questions` towns, at most six: every line counts.

    Raises:
        ValueError: no question or more than six, or a context too short for a log.
    """
    if questions > len(_TOWNS):
        raise ValueError(f"multi_turn_counting asks about at most {len(_TOWNS)} towns, got {questions}.")
    draw = _draw("counting", asking, questions)
    log = _Log(draw)
    size = asking.fit(lambda count: _joined(log.text(count)), least=len(_TOWNS), what="multi_turn_counting")
    counted = Counter(log.towns[:size])
    asked = [
        TextQuestion(
            f"How many of the deliveries above went to {town}?",
            (str(counted[town]),),
            answer_prefix=f" Number of deliveries to {town}:",
        )
        for town in draw.sample(_TOWNS, questions)
    ]
    about = {"lines": float(size)}
    return _item(_joined(log.text(size)), [_about(one, "counting") for one in asked], [], turns, about)


def multi_turn_mixed(asking: Asking, *, turns: bool = False, kind: str = "words") -> TextItem:
    """Ask six questions of three kinds on one context: pairs, then chains among noise, then a log.

    A pair, then in an order of the item another pair, two chains and the town with the most deliveries
    (global), and at last a third pair. No question is asked twice, or its answer would stand in the turns
    before; the third pair as the last turn, and asked apart, shows what a conversation costs.

    Raises:
        ValueError: a context too short for the three parts.
    """
    draw = _draw("mixed", asking, kind)
    pairs, chains, log = _Pairs(kind, draw), _Chains(2, 2, draw), _Log(draw)

    def written(count: int) -> str:
        # Three parts of about a third each: a pair, a noise and a delivery are about as long.
        return _joined(pairs.text(count), chains.text(count), log.text(count))

    size = asking.fit(written, least=3, what="multi_turn_mixed")
    text, asked = written(size), _spread(size, 3, draw)
    lines = [pairs.line(place) for place in asked]
    first, second, third = (
        _about(pairs.question(place), "kv", 100 * text.index(line) / len(text))
        for place, line in zip(asked, lines, strict=True)
    )
    middle = [
        second,
        *(_about(chains.question(number), "tracing") for number in (0, 1)),
        _about(log.most(size), "global"),
    ]
    draw.shuffle(middle)
    return _item(text, [first, *middle, third], sum(chains.lines, lines), turns, {"lines": float(size)})


def _draw(task: str, asking: Asking, *settings: object) -> random.Random:
    """The item's random numbers, equal for turns and requests, so that the two can be compared."""
    if settings and isinstance(settings[0], int) and settings[0] < 1:
        raise ValueError(f"multi_turn_{task}: questions is 1 or more, got {settings[0]}.")
    return random.Random(f"multi_turn_{task} {settings} {asking.seed} {asking.index}")


def _joined(*parts: str) -> str:
    return "\n\n".join((*parts, ""))


def _item(
    text: str,
    questions: Sequence[TextQuestion],
    needles: Sequence[str],
    turns: bool,
    about: Mapping[str, float],
) -> TextItem:
    """An item whose needles are lines of its text."""
    starts = sorted((text.index(line), len(line)) for line in needles)
    spans = tuple((start, start + length) for start, length in starts)
    return TextItem(context=text, questions=tuple(questions), turns=turns, needles=spans, about=about)


def _about(question: TextQuestion, kind: str, depth: float | None = None) -> TextQuestion:
    return replace(question, about={"kind": kind} | ({} if depth is None else {"depth": depth}))


def _spread(size: int, count: int, draw: random.Random) -> list[int]:
    """Draw a place in each of `count` equal stretches of `size` places, in random order."""
    edges = [size * number // count for number in range(count + 1)]
    places = [draw.randrange(start, stop) for start, stop in pairwise(edges)]
    draw.shuffle(places)
    return places


class _Pairs:
    """A JSON object of any size."""

    def __init__(self, kind: str, draw: random.Random) -> None:
        self.kind, self.draw = kind, random.Random(draw.getrandbits(64))
        self.taken: set[str] = set()
        self.known: list[tuple[str, str]] = []

    def line(self, place: int) -> str:
        """A key with its value, as written in the object."""
        while len(self.known) <= place:
            key, value = draw_different(self.kind, 2, self.draw, self.taken)
            self.known.append((key, value))
        return '"{}": "{}"'.format(*self.known[place])

    def text(self, count: int) -> str:
        return KV_OPENING + "{" + ",\n ".join(self.line(place) for place in range(count)) + "}"

    def question(self, place: int) -> TextQuestion:
        key, value = self.known[place]
        return TextQuestion(
            f'What is the value of the key "{key}"?', (value,), answer_prefix=f' The value of "{key}" is'
        )


class _Chains:
    """Chains of variables, whose assignments stand among any number of noise sentences."""

    def __init__(self, chains: int, hops: int, draw: random.Random) -> None:
        taken: set[str] = set()
        self.values = draw_different("numbers", chains, draw, taken)
        names = draw.sample(range(26**3), chains * (hops + 1))
        every = ["".join(chr(65 + name // 26**power % 26) for power in (2, 1, 0)) + "V" for name in names]
        self.names = [every[start : start + hops + 1] for start in range(0, len(every), hops + 1)]
        self.lines = [
            [f"VAR {own[0]} = {value}."] + [f"VAR {name} = VAR {before}." for before, name in pairwise(own)]
            for own, value in zip(self.names, self.values, strict=True)
        ]
        self.depths = [sorted(draw.random() for _ in lines) for lines in self.lines]

    def text(self, count: int) -> str:
        """All assignments among so much noise; those of a chain in order."""
        placed = [
            (int(depth * count), line)
            for lines, depths in zip(self.lines, self.depths, strict=True)
            for line, depth in zip(lines, depths, strict=True)
        ]
        return woven([NOISE] * count, placed, "\n", VT_OPENING)[0]

    def question(self, number: int) -> TextQuestion:
        value = self.values[number]
        return TextQuestion(
            f"Which variables hold the value {value}?",
            tuple(self.names[number]),
            answer_prefix=f" The {len(self.names[number])} variables that hold the value {value} are:",
            answer=" ".join(self.names[number]),
        )


class _Log:
    """Deliveries to a few towns, of unlike shares."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = random.Random(draw.getrandbits(64))
        self.order = draw.sample(_TOWNS, len(_TOWNS))
        self.towns: list[str] = []
        self.known: list[str] = []

    def text(self, count: int) -> str:
        while len(self.known) < count:
            (town,) = self.draw.choices(self.order, weights=(6, 4, 3, 3, 2, 2))
            self.towns.append(town)
            self.known.append(with_articles(f"A {self.draw.choice(plain('noun'))} was delivered to {town}."))
        return LOG_OPENING + "\n".join(self.known[:count])

    def most(self, count: int) -> TextQuestion:
        """The town with most of the first `count` deliveries; of equals, the first to reach that number."""
        counted = Counter(self.towns[:count])
        best = max(counted.values())
        last = {town: place for place, town in enumerate(self.towns[:count]) if counted[town] == best}
        town = min(last, key=last.__getitem__)
        return TextQuestion(
            "Which town had the most deliveries (of equals, the one that reached that number first)?",
            (town,),
            answer_prefix=" The town with the most deliveries is",
        )


GENERATORS = {
    "multi_turn_kv": multi_turn_kv,
    "multi_turn_tracing": multi_turn_tracing,
    "multi_turn_counting": multi_turn_counting,
    "multi_turn_mixed": multi_turn_mixed,
}
