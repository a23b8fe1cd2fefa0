"""Tasks of the reference model, in its vocabulary, for tests and machines without a network.

Six families that gates are trained on, and one that they are not (lists); the reference model itself was
trained on all of them. Rows are on text that no training saw. They are token ids
(`Row.extra["token_ids"]`), since a text would not be cut into the same tokens again; their answers are names
of tokens, and are scored at their places.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from retain.eval.tasks.row import Request, Row, Source, one_by_one
from retain.reference.documents import (
    FACT_FORMATS,
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
# Stream of the generator: no row repeats a document of another use.
_ROW_STREAM = 7


@one_by_one
def reference(request: Request, *, task: str) -> Row:
    """Write a context of exactly `context_tokens` tokens and one question of a task on it."""
    # The stream depends on task, seed and number alone.
    name = int.from_bytes(hashlib.sha256(task.encode()).digest()[:4], "big")
    seeds = np.random.SeedSequence([_ROW_STREAM, request.seed, name, request.item])
    writer = Writer("eval", int(seeds.generate_state(1)[0]))
    context_ids, question = write_item(writer, task, request.context_tokens)
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
        extra={
            "token_ids": {
                "context": context_ids,
                "question": question.ids,
                "answer": question.gold_ids,
                "evidence": _stated(context_ids, question),
            },
            "places": places,
            "ordered": question.ordered,
        },
    )


def _stated(context_ids: Sequence[int], question: Question) -> tuple[tuple[int, int], ...]:
    """The span of the first statement of the fact that is asked for; none if it is no fact, or not the only
    one."""
    ids, spans = np.asarray(context_ids), list[tuple[int, int]]()
    for template in FACT_FORMATS if len(question.answers) == 1 else ():
        run = np.asarray(fill(template, question.ids[-2], question.answers[0]))
        equal = (np.lib.stride_tricks.sliding_window_view(ids, len(run)) == run).all(1)
        spans += [(start, start + len(run)) for start in np.flatnonzero(equal).tolist()]
    return tuple(sorted(spans)[:1])


SOURCES: dict[str, Source] = {
    f"reference/{task}": Source(about, reference, {"task": task}) for task, about in ABOUT.items()
}
