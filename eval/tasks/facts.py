"""Facts in prose: sentences that say something new, hidden in a text, and one question about them.

A chat model of 135M parameters can answer these of a text that it holds whole, and they ask more than RULER's
needles: a number, a place, a price, a year.

Depths are drawn evenly over the text before its last sentences: a fact behind them would be kept by every
policy that keeps what is recent.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from retain.eval.tasks.haystacks import DEFAULT, draw_number, identity, insert, load_haystack, spans
from retain.eval.tasks.row import Request, Row, Source, one_by_one
from retain.eval.tasks.ruler import ANSWER_PREFIX, NEEDLE, QUESTION, singular
from retain.process.registry import lookup

OPENING = "Read the following text carefully. I will ask you a question about it afterwards.\n"
# Sentences at the end of a text that no fact stands behind.
LAST = 3

NOUNS = (
    *("apple", "river", "candle", "garden", "violin", "meadow", "anchor", "copper", "falcon", "harbor"),
    *("lantern", "marble", "needle", "orchard", "pepper", "quartz", "saddle", "thunder", "velvet", "walnut"),
)
PEOPLE = (
    *("Anna", "Bruno", "Carla", "Denis", "Erika", "Felix", "Greta", "Hugo", "Irene", "Jonas"),
    *("Klara", "Lukas", "Maria", "Nils", "Olga", "Peter", "Rosa", "Simon", "Tilda", "Viktor"),
)
CITIES = (
    *("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Turin", "Osaka", "Denver", "Cairo", "Lima"),
    *("Madrid", "Vienna", "Delhi", "Boston", "Athens", "Dublin"),
)
COLOURS = ("green", "purple", "orange", "yellow", "brown", "white", "black", "pink", "red", "blue")


@dataclass(frozen=True)
class Kind:
    """A kind of fact.

    Attributes:
        says: The sentence, with `{key}` and `{value}`.
        asks: The question, with `{key}`.
        keys: What `{key}` is one of.
        draw: Draws `{value}`, of at least 10 different ones.
        begins: The beginning of the answer, with `{key}`; "": what the sentence says before the value.
    """

    says: str
    asks: str
    keys: tuple[str, ...]
    draw: Callable[[random.Random], str]
    begins: str = ""


KINDS: Mapping[str, Kind] = {
    "number": Kind(
        NEEDLE.replace("{kind}", "numbers"),
        singular(QUESTION).strip().format(kind="number", query="{key}"),
        NOUNS,
        draw_number,
        singular(ANSWER_PREFIX).strip().format(kind="number", query="{key}"),
    ),
    "place": Kind(
        "{key} keeps the old telescope in {value}.",
        "In which city does {key} keep the old telescope?",
        PEOPLE,
        lambda draw: draw.choice(CITIES),
    ),
    "price": Kind(
        "{key} bought the carpet for {value} dollars.",
        "For how many dollars did {key} buy the carpet?",
        PEOPLE,
        lambda draw: str(draw.randint(101, 989)),
    ),
    "colour": Kind(
        "The front door of {key}'s house was painted {value}.",
        "In which colour was the front door of {key}'s house painted?",
        PEOPLE,
        lambda draw: draw.choice(COLOURS),
    ),
    "year": Kind(
        "{key} came to this country in {value}.",
        "In which year did {key} come to this country?",
        PEOPLE,
        lambda draw: str(draw.randint(1902, 1998)),
    ),
}


@one_by_one
def facts(
    request: Request, *, kind: str = "number", keys: int = 1, values: int = 1, haystack: str = DEFAULT
) -> Row:
    """Write facts of one kind in a text, and ask for the values of one key.

    Args:
        request: Which row.
        kind: Of fact: a name in `KINDS`.
        keys: Facts with different keys; at most 10 times `values`.
        values: Facts of each key, with different values.
        haystack: Name that `haystacks.load_haystack` knows.

    Raises:
        ValueError: An unknown kind, numbers out of range, or a context too short.
    """
    chosen = lookup(kind, KINDS, what="kind of fact")
    if min(keys, values) < 1 or keys * values > 10:
        raise ValueError(f"facts: keys times values is 1 to 10, got keys={keys}, values={values}.")
    # The number 1 once counted the keys that are asked for: rows stay what they were.
    draw = random.Random(f"facts {kind} {keys} {values} 1 {identity(haystack)} {request.seed} {request.item}")
    said: dict[str, list[str]] = {key: [] for key in draw.sample(chosen.keys, keys)}
    taken: set[str] = set()
    for found in said.values():
        while len(found) < values:
            if (value := chosen.draw(draw)) not in taken:
                taken.add(value)
                found.append(value)
    needles = [(key, chosen.says.format(key=key, value=value)) for key in said for value in said[key]]
    draw.shuffle(needles)
    (asked,) = draw.sample([*said], 1)
    *most, last = answers = tuple(said[asked])
    question = chosen.asks.format(key=asked)
    begins = (chosen.begins or chosen.says.partition(" {value}")[0]).format(key=asked)
    if most and kind == "number":
        question = QUESTION.strip().format(kind="numbers", query=asked)
        begins = ANSWER_PREFIX.strip().format(kind="numbers", query=asked)
    hay = load_haystack(haystack, draw)
    depths = [draw.random() for _ in needles]

    def written(size: int) -> str:
        placed = zip((int(depth * (size - LAST + 1)) for depth in depths), needles, strict=True)
        return insert(hay, size, [(place, text) for place, (_, text) in placed], OPENING)

    context = written(request.fit(written, least=LAST + 1, what="facts"))
    return Row(
        task="facts",
        context=context,
        question=f"\n{question}\n",
        answer_prefix=begins,
        answers=answers,
        extra={
            "haystack": hay.name,
            **({"depth": 100.0 * depths[0]} if len(needles) == 1 else {}),
            "full_answer": f"{', '.join(most)} and {last}." if most else f"{last}.",
            "evidence": spans(context, [text for key, text in needles if key == asked]),
        },
    )


_TASKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "colour": ("the colour of a door", 8, {"kind": "colour"}),
    "number": ("a number of seven digits", 16, {}),
    "number_of_four": ("one of four numbers of seven digits", 16, {"keys": 4}),
    "number_of_values": ("two numbers of one key", 28, {"values": 2}),
    "place": ("in which city somebody keeps something", 8, {"kind": "place"}),
    "price": ("what somebody paid", 8, {"kind": "price"}),
    "year": ("a year, one of three facts", 8, {"kind": "year", "keys": 3}),
}
SOURCES: dict[str, Source] = {
    f"facts/{name}": Source(f"{about}, in prose", facts, {"max_new_tokens": most, **settings})
    for name, (about, most, settings) in _TASKS.items()
}
