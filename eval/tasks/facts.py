"""Facts in prose: sentences that say something new, hidden in a text, and one question about them.

What a chat model of 135M parameters can answer of a text that it holds whole, and more than RULER's needles
ask: a number, a place, a price, who owns something, a line of a list, how a sentence of the text goes on.

Depths are drawn evenly over the text before its last sentences: a fact behind them would be kept by every
policy that keeps what is recent.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from retain.eval.tasks.haystacks import DEFAULT, identity, load_haystack, woven
from retain.eval.tasks.ruler import ANSWER_PREFIX, NEEDLE, QUESTION, singular
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.eval.tasks.words import draw_number
from retain.registry import lookup

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
    "plumber",
    "dentist",
    "farmer",
    "lawyer",
    "barber",
    "teacher",
    "butcher",
    "pianist",
    "gardener",
    "chemist",
)
COLOURS = ("green", "purple", "orange", "yellow", "brown", "white", "black", "pink", "red", "blue")
PETS = ("parrot", "rabbit", "turtle", "hamster", "lizard", "goat", "donkey", "snake", "pigeon", "spider")


def _of(words: tuple[str, ...]) -> Callable[[random.Random], str]:
    return lambda draw: draw.choice(words)


@dataclass(frozen=True)
class Kind:
    """A kind of fact.

    Attributes:
        says: The sentence, with `{key}` and `{value}`.
        asks: The question, with `{key}`.
        begins: The beginning of the answer, with `{key}`.
        keys: What `{key}` is one of.
        value: Draws a value.
        values: How many different ones there are.
    """

    says: str
    asks: str
    begins: str
    keys: tuple[str, ...]
    value: Callable[[random.Random], str]
    values: int = 100


KINDS: Mapping[str, Kind] = {
    "number": Kind(
        NEEDLE.replace("{kind}", "numbers"),
        singular(QUESTION).strip().format(kind="number", query="{key}"),
        singular(ANSWER_PREFIX).strip().format(kind="number", query="{key}"),
        NOUNS,
        draw_number,
    ),
    "place": Kind(
        "{key} keeps the old telescope in {value}.",
        "In which city does {key} keep the old telescope?",
        "{key} keeps the old telescope in",
        PEOPLE,
        _of(CITIES),
        len(CITIES),
    ),
    "price": Kind(
        "{key} bought the carpet for {value} dollars.",
        "For how many dollars did {key} buy the carpet?",
        "{key} bought the carpet for",
        PEOPLE,
        lambda draw: str(draw.randint(101, 989)),
    ),
    "owner": Kind(
        "The boat with the {key} on its sail is owned by {value}.",
        "Who owns the boat with the {key} on its sail?",
        "The boat with the {key} on its sail is owned by",
        NOUNS,
        _of(PEOPLE),
        len(PEOPLE),
    ),
    "password": Kind(
        "The password of the {key} room is {value}.",
        "What is the password of the {key} room?",
        "The password of the {key} room is",
        NOUNS,
        lambda draw: f"{draw.choice(COLOURS)}-{draw.choice(PETS)}-{draw.randint(10, 99)}",
    ),
    "trade": Kind(
        "{key} earns a living as a {value}.",
        "How does {key} earn a living?",
        "{key} earns a living as a",
        PEOPLE,
        _of(TRADES),
        len(TRADES),
    ),
    "colour": Kind(
        "The front door of {key}'s house was painted {value}.",
        "In which colour was the front door of {key}'s house painted?",
        "The front door of {key}'s house was painted",
        PEOPLE,
        _of(COLOURS),
        len(COLOURS),
    ),
    "year": Kind(
        "{key} came to this country in {value}.",
        "In which year did {key} come to this country?",
        "{key} came to this country in",
        PEOPLE,
        lambda draw: str(draw.randint(1902, 1998)),
    ),
    "pet": Kind(
        "At home {key} has a tame {value}.",
        "Which tame animal does {key} have at home?",
        "At home {key} has a tame",
        PEOPLE,
        _of(PETS),
        len(PETS),
    ),
}


def facts(
    asking: Asking,
    *,
    kind: str = "number",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    haystack: str = DEFAULT,
) -> TextItem:
    """Write facts of one kind in a text, and ask for the values of one key or more.

    Args:
        asking: Which item.
        kind: Of fact: a name in `KINDS`.
        keys: Facts with keys of their own; at least `queries`.
        values: Facts of each key, with values of their own.
        queries: Keys that are asked for.
        haystack: Name that `haystacks.load_haystack` knows.

    Raises:
        ValueError: an unknown kind, numbers below 1, or a context too short.
    """
    own = lookup(kind, KINDS, what="kind of fact")
    if min(keys, values, queries) < 1 or max(keys, queries) > len(own.keys):
        got = f"keys={keys}, values={values}, queries={queries}"
        raise ValueError(f"facts: keys, values and queries are 1 to {len(own.keys)}, got {got}.")
    keys = max(keys, queries)
    if keys * values > own.values:
        raise ValueError(
            f"facts: {kind} has {own.values} different values, and {keys * values} are asked for."
        )
    draw = random.Random(
        f"facts {kind} {keys} {values} {queries} {identity(haystack)} {asking.seed} {asking.index}"
    )
    said: dict[str, list[str]] = {key: [] for key in draw.sample(own.keys, keys)}
    taken: set[str] = set()
    for key in said:
        while len(said[key]) < values:
            value = own.value(draw)
            if value not in taken:
                taken.add(value)
                said[key].append(value)
    needles = [(key, own.says.format(key=key, value=value)) for key in said for value in said[key]]
    draw.shuffle(needles)
    asked = draw.sample([*said], queries)
    answers = tuple(value for key in asked for value in said[key])
    query = _listed(asked)
    many = len(answers) > 1
    question, begins = own.asks.format(key=query), own.begins.format(key=query)
    if many and kind == "number":
        question = QUESTION.strip().format(kind="numbers", query=query)
        begins = ANSWER_PREFIX.strip().format(kind="numbers", query=query)
    return _hidden(
        asking,
        haystack,
        draw,
        needles,
        lambda key: key in asked,
        TextQuestion(f"\n{question}\n", answers, begins, answer=f"{_listed(answers)}."),
    )


def codes(asking: Asking, *, lines: int = 16, haystack: str = DEFAULT) -> TextItem:
    """Write a list of codes, a line each, within a text, and ask for one of them.

    Args:
        asking: Which item.
        lines: Of the list; 1 to 16.
        haystack: Name that `haystacks.load_haystack` knows.

    Raises:
        ValueError: another number of lines, or a context too short for the list.
    """
    if not 1 <= lines <= len(CITIES):
        raise ValueError(f"codes: lines is 1 to {len(CITIES)}, got {lines}.")
    draw = random.Random(f"codes {lines} {identity(haystack)} {asking.seed} {asking.index}")
    places = draw.sample(CITIES, lines)
    values = [str(draw.randint(10_000, 99_999)) for _ in places]
    listed = [
        f"The code of the office in {place} is {value}." for place, value in zip(places, values, strict=True)
    ]
    asked = draw.randrange(lines)
    question = TextQuestion(
        f"\nWhat is the code of the office in {places[asked]}?\n",
        (values[asked],),
        f"The code of the office in {places[asked]} is",
    )
    needles = [("list", "\n" + "\n".join(listed) + "\n")]
    item = _hidden(asking, haystack, draw, needles, bool, question)
    start = item.context.index(listed[asked])
    return replace(item, needles=((start, start + len(listed[asked])),))


def quote(asking: Asking, *, words: int = 3, begin: int = 6, haystack: str = DEFAULT) -> TextItem:
    """Ask how a sentence of the text goes on, given its beginning. Any sentence may be asked for, and nothing
    in the text says which: no fact stands out.

    Args:
        asking: Which item.
        words: Of the sentence that are to be said.
        begin: Words of it that are given.
        haystack: Name that `haystacks.load_haystack` knows.

    Raises:
        ValueError: no sentence of the text is long enough.
    """
    draw = random.Random(f"quote {words} {begin} {identity(haystack)} {asking.seed} {asking.index}")
    found = load_haystack(haystack, draw)
    where = draw.random()

    def text_of(count: int) -> str:
        return OPENING + found.joint.join(found.sentences(count))

    size = asking.fit(text_of, least=LAST + 1, what="quote")
    sentences = found.sentences(size)
    text = " ".join(sentences)
    able = [
        place
        for place, sentence in enumerate(sentences[:-LAST])
        if len(sentence.split()) >= begin + words + 2
        and sentence[:1].isupper()
        and text.count(" ".join(sentence.split()[:begin])) == 1
    ]
    if not able:
        raise ValueError(
            f"quote: no sentence of this text has {begin + words + 2} words and a beginning of its own: "
            "lower begin or words, or take another haystack."
        )
    place = able[int(where * len(able))]
    own = sentences[place].split()
    start = len(OPENING) + sum(len(one) + len(found.joint) for one in sentences[:place])
    given, told = " ".join(own[:begin]), " ".join(own[begin : begin + words])
    return TextItem(
        context=text_of(size),
        questions=(
            TextQuestion(
                f'\nOne sentence of the text begins with the words "{given}". Repeat it exactly.\n',
                (told,),
                given,
            ),
        ),
        needles=((start, start + len(sentences[place])),),
        about={"haystack": found.name, "depth": 100.0 * place / size},
    )


def _listed(words: list[str] | tuple[str, ...]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _hidden(
    asking: Asking,
    haystack: str,
    draw: random.Random,
    needles: list[tuple[str, str]],
    is_asked: Callable[[str], bool],
    question: TextQuestion,
) -> TextItem:
    """Put sentences at evenly drawn depths of a text, none behind its last sentences."""
    found = load_haystack(haystack, draw)
    depths = [draw.random() for _ in needles]

    def written(count: int) -> tuple[str, list[tuple[int, int]]]:
        placed = [
            (int(depth * (count - LAST + 1)), text) for depth, (_, text) in zip(depths, needles, strict=True)
        ]
        return woven(found.sentences(count), placed, found.joint, OPENING)

    size = asking.fit(lambda count: written(count)[0], least=LAST + 1, what="facts")
    context, spans = written(size)
    about: dict[str, str | float] = {"haystack": found.name}
    if len(needles) == 1:
        about["depth"] = 100.0 * depths[0]
    return TextItem(
        context=context,
        questions=(question,),
        needles=tuple(span for (key, _), span in zip(needles, spans, strict=True) if is_asked(key)),
        about=about,
    )


GENERATORS = {"facts": facts, "codes": codes, "quote": quote}
