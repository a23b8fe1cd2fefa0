"""Tasks of the reference model on documents that differ from those that gates are trained on.

All items are held out. Every context states everything (facts, keys of several values, chains, lists,
frequent words), any of which may be asked. Each task changes one thing more, so that a loss names its cause;
`everything` changes all of it at once. Needles are first statements: where facts are repeated, retention is
understated.

Gates are trained on contexts of 256 to 768 tokens, code as filler, three formats of a fact, no lists, half of
the statements facts, everything stated asked once. Different here:

- lengths: half, one and a half and two times the length asked for; at 1,000 tokens 500, 1,500 and 2,000 (the
  models' positions were stretched up to 2,200 in their training);
- filler: English (`retain.eval.tasks.prose`), or the words of the needles' own pool, drawn at random;
- formats of facts, chains and lists that neither the gates nor the model met;
- popularity: what is said again and again is not what is asked.

`crowd` is a ladder, not a shift: 8 to 120 facts in one context, of which one is asked.

The model answers what is asked with the full cache. Questions beyond it are not asked: facts with an
unfamiliar token between key and value, where it guesses among the values, so that a format here is unfamiliar
in what stands around the pair; four keys in one question, and the values of one key in most formats, where
these are unfamiliar; frequent words among random ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np

from retain.eval.tasks.prose import prose
from retain.eval.tasks.reference_basic import MODEL, asked_of, item_writer, reference_suite, span
from retain.eval.tasks.suite import Item, Suite, Task
from retain.reference import documents
from retain.reference.documents import (
    LIST_FORMAT,
    NUM_TOPICS,
    Content,
    Question,
    Segment,
    Writer,
    fill,
    take,
    taken_words,
)
from retain.registry import lookup

FACT_FORMATS = (" @{key}{value}\n", "({key}{value})", "[{key}{value}]", " <{key} is{value}>")
# Of a key with several values: the one found in which the models give them all.
MULTI_FORMATS = ("@{key}({value}),",)
LINK_FORMATS = ("#{key} to{value}.", " move{key} to{value};", "\n{key} to{value}.")
# The items of a list stand where its first one does.
LIST_FORMATS = ("({key}:{value})", "\n{key}:{value}\n")
KINDS = ("get", "each", "all", "trace", "list", "common")
# Facts in a context of the crowd.
CROWD = (8, 16, 24, 40, 60, 80, 100, 120)
# Of a longer context: decoys need words of the pool too.
MOST_FACTS, MOST_OTHERS = 48, 10

Filler = Literal["code", "prose", "words"]


@dataclass(frozen=True)
class Shift:
    """Changes of a document, besides stating everything.

    Attributes:
        lengths: Shares of the length asked for, in turn.
        fillers: Text between the statements, in turn.
        unfamiliar: Whether formats are those of this file, and not those of the model's training.
        rare: Whether the asked statement stands once, and others many times.
        kinds: Kinds of the questions, in turn; all kinds are stated.
    """

    lengths: tuple[float, ...] = (1.0,)
    fillers: tuple[Filler, ...] = ("code",)
    unfamiliar: bool = False
    rare: bool = False
    kinds: tuple[str, ...] = KINDS


SHIFTS: Mapping[str, Shift] = {
    "mixed": Shift(),
    "short": Shift(lengths=(0.5,)),
    "long": Shift(lengths=(1.5,)),
    "longest": Shift(lengths=(2.0,)),
    "prose": Shift(fillers=("prose",)),
    "words": Shift(fillers=("words",), kinds=("get", "each", "all", "trace", "list")),
    "unfamiliar": Shift(unfamiliar=True, kinds=("get", "all", "trace", "list", "common")),
    "rare": Shift(rare=True),
    "everything": Shift(
        (0.5, 1.5, 2.0), ("prose", "words"), unfamiliar=True, rare=True, kinds=("get", "all", "trace", "list")
    ),
}
ABOUT = {
    "mixed": "any of the families, all stated in one context",
    "short": "the same in half the length",
    "long": "the same in one and a half times the length",
    "longest": "the same in twice the length",
    "prose": "the same in English",
    "words": "the same among random words",
    "unfamiliar": "the same in formats that no training saw",
    "rare": "the same, asked of what is stated once while other statements come again and again",
    "everything": "all of these shifts at once, in half, one and a half times or twice the length",
    "crowd": f"one fact of {CROWD[0]} to {CROWD[-1]}",
}


def reference_shift_item(task: str, seed: int, index: int, context_tokens: int) -> Item:
    """Write item `index` of a task, for the model of one seed; the same arguments give the same item.

    Kinds of questions, lengths, fillers and sizes of a crowd take turns; `Shift.lengths` are shares of
    `context_tokens`.

    Raises:
        ValueError: unknown task, or a context too short for its statements.
    """
    lookup(task, ABOUT, what="task")
    writer = item_writer(f"shift/{task}", seed, index)
    if task == "crowd":
        return crowd_item(writer, CROWD[index % len(CROWD)], context_tokens)
    shift = SHIFTS[task]
    kind = shift.kinds[index % len(shift.kinds)]
    # Lengths and fillers turn more slowly than kinds, so that every kind meets every one of them.
    turn = index // len(shift.kinds)
    length = round(shift.lengths[turn % len(shift.lengths)] * context_tokens)
    filler = shift.fillers[turn // len(shift.lengths) % len(shift.fillers)]
    return _mixed(writer, shift, kind, length, filler)


def reference_shift_suite(model: str = MODEL) -> Suite:
    """The suite; models, documents and gates are those of `reference`."""
    tasks = {name: Task(name, "held-out", about, single_key=name == "crowd") for name, about in ABOUT.items()}
    return replace(reference_suite(model), name="reference_shift", tasks=tasks, item=reference_shift_item)


@cache
def random_words() -> np.ndarray:
    """Draw words of the needle pool at random: filler of decoys only."""
    return np.random.default_rng(0).choice(documents.words(), size=1 << 16)


FILLERS: Mapping[str, Callable[[], np.ndarray]] = {"prose": prose, "words": random_words}
# What a question may ask for, (key, value) or (name,), and the tokens that state it.
Statement = tuple[tuple[int, ...], tuple[int, ...]]


def _mixed(writer: Writer, shift: Shift, kind: str, length: int, filler: str) -> Item:
    if filler in FILLERS:
        writer.text = FILLERS[filler]()
    # Of each family as many as a context of this length holds without a crowd; lists and keys of several
    # values, which gates meet seldom or never, as often as chains.
    many, few = min(max(8, length // 80), MOST_FACTS), min(max(2, length // 350), MOST_OTHERS)
    pool = writer.draw(2 * many + 14 * few + NUM_TOPICS)

    content = Content(
        facts=[(pool.pop(), pool.pop()) for _ in range(many)],
        multis=[(pool.pop(), take(pool, 4)) for _ in range(few)],
        chains=[take(pool, 5) for _ in range(few)],
        lists=[(pool.pop(), take(pool, 3)) for _ in range(few)],
        topics=take(pool, NUM_TOPICS),
    )
    stated = _statements(writer, content, shift)
    groups = _groups(stated)
    said_again = _repeat(writer, content, shift, groups, count=length // (40 if shift.rare else 100))
    ids, _, _ = writer.weave(groups, length, taken_words(content), content.topics)
    facts = [fact for fact in content.facts if fact not in said_again] if shift.rare else content.facts
    chains = content.chains[1:] if shift.rare else content.chains
    question, asked = _ask(writer, kind, content, facts, chains)
    about: dict[str, str | float] = {"kind": kind, "length": float(length), "filler": filler}
    return _item(ids.tolist(), question, stated, asked, about)


def _statements(writer: Writer, content: Content, shift: Shift) -> list[list[Statement]]:
    """Every statement of a document, once: facts, values of a key, links, lists, in this order; links of a
    chain are a group, whose order is kept when statements are woven in."""
    facts, links = _formats(shift)
    multis, lists = (
        (MULTI_FORMATS, LIST_FORMATS) if shift.unfamiliar else (facts, (LIST_FORMAT + "{value};",))
    )
    stated: list[list[Statement]] = [[(fact, fill(writer.pick(facts), *fact))] for fact in content.facts]
    for key, values in content.multis:
        template = writer.pick(multis)
        stated += [[((key, value), fill(template, key, value))] for value in values]
    for chain in content.chains:
        template = writer.pick(links)
        stated.append([(link, fill(template, *link)) for link in pairwise(chain)])
    for name, items in content.lists:
        ids = fill(writer.pick(lists), name, items[0])
        behind = ids.index(items[0]) + 1
        stated.append([((name,), (*ids[:behind], *items[1:], *ids[behind:]))])
    return stated


def _formats(shift: Shift) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Formats of facts and of links."""
    own = (FACT_FORMATS, LINK_FORMATS)
    return own if shift.unfamiliar else (documents.FACT_FORMATS, documents.LINK_FORMATS)


def _groups(stated: Sequence[Sequence[Statement]]) -> list[list[Segment]]:
    return [[Segment(ids) for _, ids in group] for group in stated]


def _repeat(
    writer: Writer, content: Content, shift: Shift, groups: list[list[Segment]], count: int
) -> set[tuple[int, int]]:
    """Repeat facts, and links of the first chain if the asked statements are rare; returns which."""
    facts, links = _formats(shift)
    # A few facts are popular, or all of them by rank as in the documents of `reference`.
    popular = content.facts[: len(content.facts) // 4] if shift.rare else content.facts
    chosen = writer.rng.choice(len(popular), size=count, p=writer.popularity(len(popular))).tolist()
    for place in chosen:
        key, value = popular[place]
        groups[place].append(writer.again(key, value, (value,), facts, turn=True))
    if shift.rare:
        chain = content.chains[0]
        template = writer.pick(links)
        # Chains stand behind the facts and the values of keys.
        group = groups[len(content.facts) + sum(len(values) for _, values in content.multis)]
        for at in writer.rng.integers(1, len(chain), size=4).tolist():
            group.append(Segment(fill(template, chain[at - 1], chain[at])))
    return {popular[place] for place in chosen}


def _ask(
    writer: Writer,
    kind: str,
    content: Content,
    facts: Sequence[tuple[int, int]],
    chains: Sequence[tuple[int, ...]],
) -> tuple[Question, list[tuple[int, ...]]]:
    """Write a question of a kind, and the statements that answer it."""

    def one(count: int) -> int:
        return int(writer.rng.integers(count))

    if kind == "get":
        fact = facts[int(writer.rng.choice(len(facts), p=writer.popularity(len(facts))))]
        return writer.ask_get(*fact), [fact]
    if kind == "each":
        four = [facts[place] for place in writer.rng.permutation(len(facts))[:4].tolist()]
        return writer.ask_each(four), [*four]
    if kind == "all":
        key, values = content.multis[one(len(content.multis))]
        return writer.ask_all(key, values), [(key, value) for value in values]
    if kind == "trace":
        chain = chains[one(len(chains))]
        return writer.ask_trace(chain), [*pairwise(chain)]
    if kind == "list":
        name, items = content.lists[one(len(content.lists))]
        return writer.ask_list(name, items), [(name,)]
    return writer.ask_common(content.topics), []


def crowd_item(writer: Writer, count: int, length: int) -> Item:
    """Write a context of `length` tokens with `count` facts, each once, and ask for any one of them.

    Raises:
        ValueError: the facts do not fit.
    """
    pool = writer.draw(2 * count)
    content = Content([(pool.pop(), pool.pop()) for _ in range(count)])
    stated = _statements(writer, content, Shift())
    ids, _, _ = writer.weave(_groups(stated), length, taken_words(content), ())
    fact = content.facts[int(writer.rng.integers(count))]
    about = {"facts": float(count), "length": float(length)}
    return _item(ids.tolist(), writer.ask_get(*fact), stated, [fact], about)


def _item(
    ids: Sequence[int],
    question: Question,
    stated: Sequence[Sequence[Statement]],
    asked: Sequence[tuple[int, ...]],
    about: Mapping[str, str | float],
) -> Item:
    first = {pair: tokens for group in stated for pair, tokens in group}
    spans = [span(ids, first[pair]) for pair in asked]
    return Item(
        context_ids=tuple(ids),
        asked=(asked_of(question),),
        needles=tuple(sorted(one for one in spans if one is not None)),
        about=about,
    )
