"""Facts in prose: sentences that say something new, hidden in a text, and one question about them.

A chat model of 135M parameters can answer these of a text that it holds whole, and they ask more than RULER's
needles: a number, a place, a price, who owns something.

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
TRADES = (
    *("plumber", "dentist", "farmer", "lawyer", "barber"),
    *("teacher", "butcher", "pianist", "gardener", "chemist"),
)
COLOURS = ("green", "purple", "orange", "yellow", "brown", "white", "black", "pink", "red", "blue")
PETS = ("parrot", "rabbit", "turtle", "hamster", "lizard", "goat", "donkey", "snake", "pigeon", "spider")


@dataclass(frozen=True)
class Kind:
    """A kind of fact.

    Attributes:
        says: The sentence, with `{key}` and `{value}`.
        asks: The question, with `{key}`.
        keys: What `{key}` is one of.
        values: What `{value}` is one of, or a function that draws it (of at least 100 different ones).
        begins: The beginning of the answer, with `{key}`; "": what the sentence says before the value.
    """

    says: str
    asks: str
    keys: tuple[str, ...]
    values: tuple[str, ...] | Callable[[random.Random], str]
    begins: str = ""

    def draw(self, draw: random.Random) -> str:
        """Draw a value."""
        return draw.choice(self.values) if isinstance(self.values, tuple) else self.values(draw)


def _between(least: int, most: int) -> Callable[[random.Random], str]:
    return lambda draw: str(draw.randint(least, most))


KINDS: Mapping[str, Kind] = {
    "number": Kind(
        NEEDLE.replace("{kind}", "numbers"),
        singular(QUESTION).strip().format(kind="number", query="{key}"),
        *(NOUNS, draw_number),
        singular(ANSWER_PREFIX).strip().format(kind="number", query="{key}"),
    ),
    "place": Kind(
        "{key} keeps the old telescope in {value}.",
        "In which city does {key} keep the old telescope?",
        *(PEOPLE, CITIES),
    ),
    "price": Kind(
        "{key} bought the carpet for {value} dollars.",
        "For how many dollars did {key} buy the carpet?",
        *(PEOPLE, _between(101, 989)),
    ),
    "owner": Kind(
        "The boat with the {key} on its sail is owned by {value}.",
        "Who owns the boat with the {key} on its sail?",
        *(NOUNS, PEOPLE),
    ),
    "password": Kind(
        "The password of the {key} room is {value}.",
        "What is the password of the {key} room?",
        NOUNS,
        lambda draw: f"{draw.choice(COLOURS)}-{draw.choice(PETS)}-{draw.randint(10, 99)}",
    ),
    "trade": Kind("{key} earns a living as a {value}.", "How does {key} earn a living?", PEOPLE, TRADES),
    "colour": Kind(
        "The front door of {key}'s house was painted {value}.",
        "In which colour was the front door of {key}'s house painted?",
        *(PEOPLE, COLOURS),
    ),
    "year": Kind(
        "{key} came to this country in {value}.",
        "In which year did {key} come to this country?",
        *(PEOPLE, _between(1902, 1998)),
    ),
    "pet": Kind(
        "At home {key} has a tame {value}.", "Which tame animal does {key} have at home?", PEOPLE, PETS
    ),
}


@one_by_one
def facts(
    request: Request,
    *,
    kind: str = "number",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    haystack: str = DEFAULT,
) -> Row:
    """Write facts of one kind in a text, and ask for the values of one key or more.

    Args:
        request: Which row.
        kind: Of fact: a name in `KINDS`.
        keys: Facts with different keys; at least `queries`.
        values: Facts of each key, with different values.
        queries: Keys that are asked for.
        haystack: Name that `haystacks.load_haystack` knows.

    Raises:
        ValueError: An unknown kind, numbers below 1, or a context too short.
    """
    chosen = lookup(kind, KINDS, what="kind of fact")
    if min(keys, values, queries) < 1 or max(keys, queries) > len(chosen.keys):
        got = f"keys={keys}, values={values}, queries={queries}"
        raise ValueError(f"facts: keys, values and queries are 1 to {len(chosen.keys)}, got {got}.")
    keys = max(keys, queries)
    different = len(chosen.values) if isinstance(chosen.values, tuple) else 100
    if keys * values > different:
        raise ValueError(
            f"facts: {kind} has {different} different values, and {keys * values} are asked for."
        )
    draw = random.Random(
        f"facts {kind} {keys} {values} {queries} {identity(haystack)} {request.seed} {request.item}"
    )
    said: dict[str, list[str]] = {key: [] for key in draw.sample(chosen.keys, keys)}
    taken: set[str] = set()
    for found in said.values():
        while len(found) < values:
            value = chosen.draw(draw)
            if value not in taken:
                taken.add(value)
                found.append(value)
    needles = [(key, chosen.says.format(key=key, value=value)) for key in said for value in said[key]]
    draw.shuffle(needles)
    asked = draw.sample([*said], queries)
    answers = tuple(value for key in asked for value in said[key])
    query = _listed(asked)
    question = chosen.asks.format(key=query)
    begins = (chosen.begins or chosen.says.partition(" {value}")[0]).format(key=query)
    if len(answers) > 1 and kind == "number":
        question = QUESTION.strip().format(kind="numbers", query=query)
        begins = ANSWER_PREFIX.strip().format(kind="numbers", query=query)
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
            "full_answer": f"{_listed(answers)}.",
            "evidence": spans(context, [text for key, text in needles if key in asked]),
        },
    )


def _listed(words: list[str] | tuple[str, ...]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


_TASKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "colour": ("the colour of a door", 8, {"kind": "colour"}),
    "number": ("a number of seven digits", 16, {}),
    "number_of_four": ("one of four numbers of seven digits", 16, {"keys": 4}),
    "number_of_queries": ("the numbers of two keys of four", 28, {"keys": 4, "queries": 2}),
    "number_of_values": ("two numbers of one key", 28, {"values": 2}),
    "owner": ("who owns something, one of three facts", 8, {"kind": "owner", "keys": 3}),
    "password": ("a password of two words and a number", 16, {"kind": "password"}),
    "pet": ("somebody's animal, one of three facts", 8, {"kind": "pet", "keys": 3}),
    "place": ("in which city somebody keeps something", 8, {"kind": "place"}),
    "price": ("what somebody paid", 8, {"kind": "price"}),
    "trade": ("somebody's trade, one of three facts", 8, {"kind": "trade", "keys": 3}),
    "year": ("a year, one of three facts", 8, {"kind": "year", "keys": 3}),
}
SOURCES: dict[str, Source] = {
    f"facts/{name}": Source(f"{about}, in prose", facts, {"max_new_tokens": most, **settings})
    for name, (about, most, settings) in _TASKS.items()
}
