"""Writes the training sequences of the reference model: mostly questions at first, mostly text at last.

Every statement in a document is asked about, and every later use of a statement is supervised, so that tokens
have a reason to look back at statements, as in a large model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retain.reference.documents import (
    Content,
    Question,
    Segment,
    Target,
    Writer,
    random_content,
    take,
    taken_words,
)
from retain.reference.tokenizer import BOS_ID, PAD_ID

# Weight in the loss of each kind of target.
WEIGHTS = {"get": 1.0, "who": 1.0, "all": 2.0, "trace": 1.0, "list": 1.0, "quote": 1.0} | {
    "common": 5.0, "use": 1.0, "key": 0.5, "copy": 0.5, "eos": 0.1, "text": 0.3
}  # fmt: skip
KINDS = tuple(WEIGHTS)
MAX_ACCEPT = 5
# Share of the tokens of a context that are predicted as text.
TEXT_SHARE = 0.2
QUOTE_TOKENS = 6
# Weaving a document again brings other filler. In a long document of many statements no word may be left that
# stands in it once, whatever the filler.
WEAVES = 16


@dataclass(frozen=True)
class Example:
    """One training sequence.

    Attributes:
        ids: Token ids `[T]`.
        positions: RoPE positions `[T]`; they jump where PoSE (arXiv 2309.10400) pretends that text was left
            out.
        targets: Supervised positions (absolute offsets).
    """

    ids: np.ndarray
    positions: np.ndarray
    targets: list[Target]


def stretched_positions(
    rng: np.random.Generator, length: int, bounds: Sequence[int], reach: int
) -> np.ndarray:
    """Positions `0..length-1` with random jumps at `bounds`, up to `reach` in all (PoSE)."""
    positions = np.arange(length)
    if reach <= length or not bounds:
        return positions
    places = np.unique(bounds)
    places = places[places < length]
    extra = int(rng.integers(0, reach - length))
    increments = np.zeros(length, dtype=np.int64)
    increments[places] = np.diff(np.sort(np.concatenate([[0], rng.integers(0, extra + 1, len(places))])))
    return positions + np.cumsum(increments)


def _assemble(
    writer: Writer,
    groups: list[list[Segment]],
    content: Content,
    asked: Sequence[Question],
    length: int,
    reach: int,
    quotes: int = 0,
) -> Example:
    """The context in the room that the questions leave, then the questions."""
    segments = [question.segment() for question in asked]
    context_tokens = length - sum(len(segment.ids) for segment in segments) - quotes * QUOTE_TOKENS
    taken = taken_words(content)
    context, targets, ends = writer.weave(groups, context_tokens, taken, content.topics)
    for _ in range(WEAVES):
        if not quotes or len(writer.quotable(context, taken)):
            break
        context, targets, ends = writer.weave(groups, context_tokens, taken, content.topics)
    else:
        return _assemble(writer, groups, content, asked, length, reach)
    segments += [writer.ask_quote(context, taken).segment() for _ in range(quotes)]
    segments = [segments[i] for i in writer.rng.permutation(len(segments))]
    parts, at = [context], context_tokens
    for segment in segments:
        parts.append(np.asarray(segment.ids))
        targets += [Target(at + t.offset, t.accept, t.kind) for t in segment.targets]
        at += len(segment.ids)
    ids = np.concatenate(parts)
    count = max(2, int(context_tokens * TEXT_SHARE))
    for place in writer.rng.integers(0, context_tokens - 1, count).tolist():
        targets.append(Target(place, (int(ids[place + 1]),), "text"))
    positions = stretched_positions(writer.rng, length, [*ends, context_tokens], reach)
    return Example(ids, positions, targets)


def _cost(groups: list[list[Segment]], asked: Sequence[Question]) -> int:
    """Tokens of statements and questions."""
    segments = [segment for group in groups for segment in group]
    return sum(len(segment.ids) for segment in (*segments, *(question.segment() for question in asked)))


def text_document(
    writer: Writer,
    length: int,
    reach: int = 0,
    *,
    multi_share: float = 0.18,
    statement_tokens: int = 1024,
    most_facts: int = 48,
) -> Example:
    """Statements of all families in text, all of them asked about at the end.

    Args:
        writer: Of the documents.
        length: Tokens of the whole.
        reach: Largest RoPE position; 0: positions are not stretched.
        multi_share: Share of statements that give a key several values.
        statement_tokens: Most tokens that statements and questions take, about.
        most_facts: As `random_content` takes it.
    """
    rng = writer.rng
    while True:
        topics = bool(rng.random() < 0.35) and length >= 96
        room = min(length - 1, statement_tokens) * 0.85 * rng.uniform(0.25, 1.0)
        room -= max(24, 0.2 * length) if topics else 0
        content = random_content(
            writer, room, held_out=True, topics=topics, multi_share=multi_share, most_facts=most_facts
        )
        asked = writer.questions(content, held_out=True)
        groups = writer.groups(content, reuses=int(rng.integers(0, max(2, length // 60))))
        spare = max(24, int(0.15 * length)) if topics else 1
        while asked and _cost(groups, asked) + spare >= length:
            asked.pop()
        free = length - _cost(groups, asked) - spare
        if asked and free > 0:
            # A question on the filler costs six tokens and needs filler to ask about.
            quotes = min(3, free // 40)
            return _assemble(writer, groups, content, asked, length, reach, quotes)


def dense_document(writer: Writer, length: int, reach: int = 0) -> Example:
    """Few statements, each asked about again and again: a third of the tokens are supervised."""
    rng = writer.rng
    scale = length / 64
    while True:
        pool = writer.draw(min(420, int(60 * scale)))
        content, u = Content(), rng.random()
        if u < 0.55:
            content.facts = [(pool.pop(), pool.pop()) for _ in range(int(rng.integers(3, 5) * scale))]
        else:
            count = range(max(1, int(rng.integers(2 if 0.72 <= u < 0.9 else 1, 3) * scale / 1.5)))
            if u < 0.72:
                content.multis = [(pool.pop(), take(pool, int(rng.integers(2, 4)))) for _ in count]
            elif u < 0.9:
                content.chains = [take(pool, int(rng.integers(3, 5))) for _ in count]
            else:
                content.lists = [(pool.pop(), take(pool, int(rng.integers(3, 5)))) for _ in count]
        groups = writer.groups(content, reuses=0)
        asked: list[Question] = []
        budget = length - 2 - _cost(groups, []) - int(rng.integers(0, max(2, int(length * 0.12))))
        misses = 0
        while budget > 0 and misses < 3:
            for question in writer.questions(content, held_out=True):
                size = _cost([], [question])
                if size <= budget:
                    asked.append(question)
                    budget -= size
                else:
                    misses += 1
        if asked:
            return _assemble(writer, groups, content, asked, length, reach)


def copy_document(writer: Writer, length: int, reach: int = 0) -> Example:
    """Different words, then the same words again in shuffled chunks: pure induction."""
    rng = writer.rng
    count = min(len(writer.pool) - 4, int(rng.integers(length // 4, length // 2)))
    words = np.asarray(writer.draw(count))
    ids = np.full(length, PAD_ID, dtype=np.int64)
    ids[0] = BOS_ID
    ids[1 : count + 1] = words
    at = count + 1
    targets: list[Target] = []
    while at < length:
        sizes = rng.integers(2, 6, count)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        starts = starts[starts < count]
        for k in rng.permutation(len(starts)):
            chunk = words[starts[k] : starts[k] + sizes[k]][: length - at]
            ids[at : at + len(chunk)] = chunk
            targets += [Target(at + j, (int(chunk[j + 1]),), "copy") for j in range(len(chunk) - 1)]
            at += len(chunk)
            if at >= length:
                break
    return Example(ids, stretched_positions(rng, length, [count + 1], reach), targets)


def example(writer: Writer, length: int, reach: int, **limits: Any) -> Example:
    """One sequence of the mixture that fits its length: short ones are dense, long ones are text.

    `limits` are those of `text_document`.
    """
    rng = writer.rng
    if rng.random() < (0.1 if length <= 128 else 0.03):
        return copy_document(writer, length, reach)
    if length <= 128 and rng.random() < 0.35:
        return dense_document(writer, length, reach)
    return text_document(writer, length, reach, **limits)


@dataclass(frozen=True)
class Batch:
    """Examples of one length, their targets as flat rows.

    Attributes:
        ids_BT: Token ids.
        positions_BT: RoPE positions.
        places: `[N]` supervised positions, as indices into the flattened batch.
        accept: `[N, MAX_ACCEPT]` accepted token ids, filled with -1.
        kinds: `[N]` indices into `KINDS`.
    """

    ids_BT: np.ndarray
    positions_BT: np.ndarray
    places: np.ndarray
    accept: np.ndarray
    kinds: np.ndarray


def collate(examples: Sequence[Example]) -> Batch:
    """Stack examples of equal length."""
    length = len(examples[0].ids)
    places, accept, kinds = [], [], []
    for row, one in enumerate(examples):
        for target in one.targets:
            places.append(row * length + target.offset)
            accept.append((*target.accept, *(-1,) * (MAX_ACCEPT - len(target.accept))))
            kinds.append(KINDS.index(target.kind))
    return Batch(
        np.stack([one.ids for one in examples]),
        np.stack([one.positions for one in examples]),
        np.asarray(places),
        np.asarray(accept),
        np.asarray(kinds),
    )
