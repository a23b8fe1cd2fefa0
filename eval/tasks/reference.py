"""Tasks of the reference model, in its vocabulary, for tests and machines without a network.

Six families that gates are trained on, and one that they are not (lists); the reference model itself was
trained on all of them. Rows are on text that no training saw, except `probes`, on which
heads of the model are measured. They are token ids (`Row.extra["token_ids"]`), since a text would not be
cut into the same tokens again; their answers are names of tokens, and are scored at their places.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from retain.eval.tasks.row import Request, Row, Source, one_by_one
from retain.reference.documents import (
    FACT_FORMATS,
    LINK_FORMATS,
    Question,
    Writer,
    fill,
)
from retain.reference.items import write_item
from retain.reference.tokenizer import load_tokenizer

ABOUT = {
    "single": "the value of the only key in the context",
    "multikey": "the value of one key among a crowd of them",
    "multivalue": "all values of one key, in any order",
    "multiquery": "the values of four keys",
    "tracing": "every variable on a chain of assignments",
    "common": "the words that occur most often",
    "lists": "the items of one list among several",
}
# Tasks of which probes are written, in turn: a fact, one among many, and a chain of them.
PROBED = ("single", "multikey", "tracing")
# Streams of the generator, kept apart so that no row repeats a document of another use.
_ROW_STREAM, _PROBE_STREAM = 7, 17


@one_by_one
def reference(request: Request, *, task: str) -> Row:
    """Write a context of exactly `context_tokens` tokens and one question of a task on it."""
    # The stream depends on task, seed and number alone.
    name = int.from_bytes(hashlib.sha256(task.encode()).digest()[:4], "big")
    seeds = np.random.SeedSequence([_ROW_STREAM, request.seed, name, request.item])
    written = write_item(Writer("eval", int(seeds.generate_state(1)[0])), task, request.context_tokens)
    return _row(request, *written)


def probes(tokenizer: Any, *, context_tokens: int, seed: int, first_item: int, items: int) -> list[Row]:
    """Write rows with evidence on training text, in formats that gates are trained on."""
    del tokenizer  # always the reference model's
    writer = Writer("train", int(np.random.SeedSequence([_PROBE_STREAM, seed]).generate_state(1)[0]))
    rows = []
    for number in range(first_item + items):
        written = write_item(writer, PROBED[number % len(PROBED)], context_tokens)
        rows.append(_row(Request(None, context_tokens, seed, number), *written))
    return rows[first_item:]


def _row(request: Request, context_ids: Sequence[int], question: Question) -> Row:
    tokenizer = load_tokenizer()
    places = [place for place, kind in enumerate(question.kinds) if kind not in ("key", "eos")]
    return Row(
        task="reference",
        context=tokenizer.decode(list(context_ids)),
        question=tokenizer.decode(list(question.ids)),
        answers=tuple(tokenizer.convert_ids_to_tokens(list(question.answers))),
        max_new_tokens=question.generate,
        metric="tokens_in_place",
        length=len(context_ids),
        item=request.item,
        seed=request.seed,
        extra={
            "token_ids": {
                "context": tuple(context_ids),
                "question": question.ids,
                "answer": question.gold_ids,
                "evidence": tuple(_stated(context_ids, question)),
            },
            "places": places,
            "ordered": question.ordered,
        },
    )


def _stated(context_ids: Sequence[int], question: Question) -> list[tuple[int, int]]:
    """Spans of the first statement of each pair of words that the answer needs: a key and its value, or two
    neighbours of a chain. Where none is stated as a fact or a link, there are none."""
    asked, gold = question.ids[-2], question.gold_ids[:-1]
    if "key" in question.kinds and question.ordered:
        pairs = [*zip(gold[::2], gold[1::2], strict=True)]
    elif "trace" in question.kinds:
        pairs = [*pairwise((asked, *gold))]
    else:
        pairs = [(asked, value) for value in question.answers]
    spans = [_first_span(context_ids, key, value) for key, value in pairs]
    return [span for span in spans if span is not None]


def _first_span(context_ids: Sequence[int], key: int, value: int) -> tuple[int, int] | None:
    ids, found = np.asarray(context_ids), []
    for template in (*FACT_FORMATS, *LINK_FORMATS):
        run = np.asarray(fill(template, key, value))
        windows = np.lib.stride_tricks.sliding_window_view(ids, len(run))
        found += [(start, start + len(run)) for start in np.flatnonzero((windows == run).all(1)).tolist()]
    return min(found, default=None)


SOURCES: dict[str, Source] = {
    **{f"reference/{task}": Source(about, reference, {"task": task}) for task, about in ABOUT.items()},
    "reference_probes": Source("facts and chains on training text, to measure heads on", probes),
}
