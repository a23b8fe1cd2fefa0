"""Writes documents with needles: statements woven into real text, and questions on them.

Keys, values, chain links and list items are drawn from one pool of ordinary words that also occur in the
filler: a needle is recognised by the statement around it, not by its tokens.

Families (the question's verb): `get` a fact's value, `all` values of a key, `each` of several keys, `trace` a
chain of variables, `common` words of the text, `list` the items of a list. The last is held out: gate
training never sees it. The reference model was trained on it, on `who` and `after`, and on two more formats
of a fact, all of which are still among the bits of phrasing of the decoys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from retain.reference.corpus import Split, stream
from retain.reference.tokenizer import ANSWER_ID, BOS_ID, EOS_ID, QUESTION_ID, load_tokenizer

FACT_FORMATS = (" set{key}{value};", " note:{key} is{value}.", "#{key} ->{value}\n")
HELD_OUT_FACT_FORMATS = ("\n{key} ={value}\n", "{key}({value}),")
LINK_FORMATS = (" pass{key}{value};", " move{key} to{value}.")
USE_FORMAT = " use{key}{value};"
LIST_FORMAT = " list{key}:"
WORD = re.compile(r"{key}|{value}")
VERBS = {name: f" {name}" for name in ("get", "all", "each", "trace", "common", "list", "who")}
VERBS["quote"] = " after"
# The statements without their words.
PHRASES = [
    WORD.sub("", template)
    for template in (*FACT_FORMATS, *HELD_OUT_FACT_FORMATS, *LINK_FORMATS, USE_FORMAT, LIST_FORMAT)
]
NUM_WORDS = 512

TOPIC_SHARE = 0.07
NUM_TOPICS = 3
DECOY_SHARE = 0.22


@dataclass(frozen=True)
class Question:
    """A question from `<q>` to `<a>`, and one right continuation of it.

    Attributes:
        ids: token ids of the question.
        gold_ids: a right continuation, `<eos>` included.
        kinds: of each place of `gold_ids`. A "key" only restates the question.
        ordered: whether answers must come in this order.
    """

    ids: tuple[int, ...]
    gold_ids: tuple[int, ...]
    kinds: tuple[str, ...]
    ordered: bool

    @property
    def answers(self) -> tuple[int, ...]:
        """The tokens to be found."""
        kinds = zip(self.gold_ids, self.kinds, strict=True)
        return tuple(word for word, kind in kinds if kind not in ("key", "eos"))

    @property
    def generate(self) -> int:
        """Number of tokens to generate: the answer without its `<eos>`."""
        return len(self.gold_ids) - 1


@dataclass(frozen=True)
class Document:
    """A context and the questions with answers appended after it, for distillation."""

    context_ids: tuple[int, ...]
    appendix_ids: tuple[int, ...]


@dataclass
class Content:
    """Statements of a document. All words in it are different."""

    facts: list[tuple[int, int]] = field(default_factory=list)
    multis: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    chains: list[tuple[int, ...]] = field(default_factory=list)
    lists: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    topics: tuple[int, ...] = ()

    @property
    def words(self) -> list[int]:
        """All words of its statements."""
        named = [word for name, items in (*self.multis, *self.lists) for word in (name, *items)]
        return [word for group in (*self.facts, named, *self.chains) for word in group]


@cache
def _encode(text: str) -> tuple[int, ...]:
    return tuple(load_tokenizer()(text, add_special_tokens=False)["input_ids"])


def fill(template: str, *words: int) -> tuple[int, ...]:
    """Encode a statement template; its words, key and value, are single tokens with their space."""
    first, *texts = WORD.split(template)
    pairs = zip(words, texts, strict=True)
    return (*_encode(first), *(token for word, text in pairs for token in (word, *_encode(text))))


class Writer:
    """Writes documents of one split from one seed.

    Args:
        split: `train` or `eval` text of the standard library.
        seed: of the generator, one number or several; the same seed on the same Python version gives the same
            documents.
    """

    def __init__(self, split: Split, seed: int | Sequence[int]) -> None:
        seeds = (seed,) if isinstance(seed, int) else seed
        self.rng = np.random.default_rng([*seeds, 0 if split == "train" else 1])
        self.text = stream(split)
        self.pool = words()
        self.markers = np.asarray(sorted({i for phrase in PHRASES for i in _encode(phrase)}))

    def draw(self, count: int) -> list[int]:
        """Draw `count` different words of the pool."""
        return self.rng.choice(self.pool, size=count, replace=False).tolist()

    def filler(self, count: int, taken: Sequence[int], topics: Sequence[int]) -> np.ndarray:
        """Draw real text with decoys (random words, bits of phrasing); `taken` words occur only in
        statements."""
        start = int(self.rng.integers(0, len(self.text) - count))
        ids = self.text[start : start + count].copy()
        reserved = np.asarray([*taken, *topics], dtype=np.int64)
        free = np.setdiff1d(self.pool, reserved)
        decoy = self.rng.random(count) < DECOY_SHARE
        ids[decoy] = self.rng.choice(free, size=int(decoy.sum()))
        marker = decoy & (self.rng.random(count) < 0.15)
        ids[marker] = self.rng.choice(self.markers, size=int(marker.sum()))
        clash = np.isin(ids, reserved)
        ids[clash] = self.rng.choice(free, size=int(clash.sum()))
        if len(topics):
            each = max(4, round(count * TOPIC_SHARE))
            places = self.rng.permutation(count)[: each * len(topics)]
            for i, topic in enumerate(topics):
                ids[places[i :: len(topics)]] = topic
        return ids

    def pick(self, options: Sequence[str]) -> str:
        return options[int(self.rng.integers(len(options)))]

    def popularity(self, count: int) -> np.ndarray:
        """Share of uses and questions of each of `count` statements: few are used often, most seldom."""
        weights = 1.0 / np.arange(1, count + 1)
        return weights / weights.sum()

    def again(self, key: int, value: int, formats: Sequence[str], *, turn: bool) -> tuple[int, ...]:
        """Write a later use of a statement: a call, the statement repeated, or a question with its answer."""
        kind = int(self.rng.integers(3 if turn else 2))
        if kind == 2:
            question = self.ask("get", [key], [value])
            return question.ids + question.gold_ids
        return fill(self.pick(formats) if kind else USE_FORMAT, key, value)

    def groups(self, content: Content, reuses: int) -> list[list[tuple[int, ...]]]:
        """Statements of a document; the order inside a group is kept when they are woven in.

        `reuses` statements come again later in the text, by popularity: the first facts of `content` most
        often.
        """
        groups = [[fill(self.pick(FACT_FORMATS), key, value)] for key, value in content.facts]
        uses: list[Any] = [
            (group, key, value, FACT_FORMATS, True)
            for (key, value), group in zip(content.facts, groups, strict=True)
        ]
        for key, values in content.multis:
            template = self.pick(FACT_FORMATS)
            groups += [[fill(template, key, value)] for value in values]
        for chain in content.chains:
            template = self.pick(LINK_FORMATS)
            links = [fill(template, a, b) for a, b in pairwise(chain)]
            at = int(self.rng.integers(1, len(links) + 1))
            groups.append(links)
            uses.append((links, chain[at - 1], chain[at], LINK_FORMATS, False))
        groups += [[(*fill(LIST_FORMAT, name), *items, *_encode(";"))] for name, items in content.lists]
        if uses and reuses:
            for which in self.rng.choice(len(uses), size=reuses, p=self.popularity(len(uses))):
                group, key, value, used, turn = uses[int(which)]
                group.append(self.again(key, value, used, turn=turn))
        return groups

    def weave(self, groups: list[list[tuple[int, ...]]], length: int, content: Content) -> np.ndarray:
        """Weave statements into filler, `[length]` ids.

        Raises:
            ValueError: the statements alone are longer than `length`.
        """
        labels = self.rng.permutation([g for g, group in enumerate(groups) for _ in group])
        heads = [iter(group) for group in groups]
        ordered = [next(heads[int(g)]) for g in labels]
        used = sum(len(ids) for ids in ordered)
        room = length - 1 - used
        if room < 0:
            raise ValueError(
                f"statements of {used} tokens do not fit into a context of {length}: "
                "state fewer, or ask for a longer context"
            )
        filler = self.filler(room, content.words, content.topics)
        cuts = np.sort(self.rng.integers(0, room + 1, len(ordered))).tolist()
        parts: list[np.ndarray] = [np.asarray([BOS_ID])]
        for previous, cut, ids in zip([0, *cuts], cuts, ordered, strict=False):
            parts += [filler[previous:cut], np.asarray(ids)]
        parts.append(filler[cuts[-1] if cuts else 0 :])
        return np.concatenate(parts)

    def shuffled(self, items: Sequence) -> list:
        return [items[i] for i in self.rng.permutation(len(items))]

    def ask(
        self, verb: str, words: Sequence[int], gold: Sequence[int], kinds: Sequence[str] = ()
    ) -> Question:
        """A question on `words` with the answer `gold`."""
        ids = (QUESTION_ID, *_encode(VERBS[verb]), *words, ANSWER_ID)
        kinds = (*(kinds or [verb] * len(gold)), "eos")
        return Question(ids, (*gold, EOS_ID), kinds, ordered=verb not in ("all", "common"))

    def ask_each(self, facts: Sequence[tuple[int, int]]) -> Question:
        gold = [word for fact in facts for word in fact]
        return self.ask("each", [key for key, _ in facts], gold, ["key", "get"] * len(facts))

    def ask_all(self, key: int, values: Sequence[int]) -> Question:
        """Ask for values in any order, the key restated between them: `<a> V1 K V2 K V3`."""
        first, *others = self.shuffled(values)
        gold = [first, *(word for value in others for word in (key, value))]
        return self.ask("all", [key], gold, ["all", *["key", "all"] * len(others)])

    def questions(self, content: Content) -> list[Question]:
        """Questions on everything that a document states, shuffled."""
        asked: list[Question] = []
        facts = self.shuffled(content.facts)
        while facts:
            u = self.rng.random()
            if len(facts) >= 2 and u < 0.25:
                n = min(len(facts), int(self.rng.integers(2, 5)))
                asked.append(self.ask_each(facts[:n]))
                facts = facts[n:]
            else:
                key, value = facts.pop()
                asked.append(self.ask("get", [key], [value]))
        asked += [self.ask_all(*multi) for multi in content.multis]
        asked += [self.ask("trace", chain[:1], chain[1:]) for chain in content.chains]
        if content.topics:
            asked.append(self.ask("common", [], self.shuffled(content.topics)))
        return self.shuffled(asked)


def take(pool: list[int], count: int) -> tuple[int, ...]:
    """Take words from the end of a pool."""
    return tuple(pool.pop() for _ in range(count))


def random_content(writer: Writer, room: float, *, topics: bool) -> Content:
    """Draw facts, keys of several values and chains that take about `room` tokens, questions included; behind
    48 facts nothing further is stated."""
    rng = writer.rng
    pool = writer.draw(420)
    content, cost = Content(), 0.0
    if topics:
        content.topics = take(pool, NUM_TOPICS)
        cost += 8
    while len(pool) > 12:
        u, n = rng.random(), int(rng.integers(2, 5))
        cost += 12 if u < 0.5 else 8 * n + 4 if u < 0.68 else 6 * n + 6
        if cost > room or len(content.facts) > 48:
            break
        if u < 0.5:
            content.facts.append((pool.pop(), pool.pop()))
        elif u < 0.68:
            content.multis.append((pool.pop(), take(pool, n)))
        else:
            content.chains.append(take(pool, n + 1))
    return content


def distill_document(writer: Writer, context_tokens: int) -> Document:
    """Write a context of `context_tokens` tokens in seen families and formats, and questions on all of it."""
    asked: list[Question] = []
    while not asked:
        topics = writer.rng.random() < 0.35
        content = random_content(writer, context_tokens * writer.rng.uniform(0.1, 0.7), topics=topics)
        asked = writer.questions(content)
    groups = writer.groups(content, reuses=round(context_tokens / 100))
    ids = writer.weave(groups, context_tokens, content)
    appendix_ids = [token for question in asked for token in question.ids + question.gold_ids]
    return Document(tuple(ids.tolist()), tuple(appendix_ids))


@cache
def words() -> np.ndarray:
    """Ids of the words of needles: whole lower-case words of one token, ` name` with its space.

    They come from the tokenizer alone, so that every Python version draws the same pool, without the most
    frequent words (keywords) and those that statements and questions are phrased in.
    """
    tokenizer = load_tokenizer()
    reserved = set(_encode("".join((*VERBS.values(), *PHRASES))))
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    whole = [i for token, i in vocabulary if re.fullmatch("Ġ[a-z]{3,}", token) and i not in reserved]
    return np.asarray(whole[-NUM_WORDS:], dtype=np.int64)
