"""Tasks of the reference model, over `retain.reference.documents`.

Families that gates are trained on, and families that they are not: facts in surface formats that gate
training never uses, the items of a list, the token after a word of the plain text. The reference model itself
was trained on all of them. Items are on text that no training saw, and each (seed, item) pair is a cluster.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from retain.eval.tasks.suite import Asked, Family, Item, Suite, Task
from retain.reference import load_model
from retain.reference.documents import (
    FACT_FORMATS,
    HELD_OUT_FACT_FORMATS,
    LINK_FORMATS,
    LIST_FORMAT,
    Document,
    Question,
    Writer,
    distill_document,
    fill,
)
from retain.reference.items import HELD_OUT_TASKS, SEEN_TASKS, write_item

ABOUT = {
    "single": "the value of the only key in the context",
    "multikey": "the value of one key among a crowd of them",
    "multivalue": "all values of one key, in any order",
    "multiquery": "the values of four keys",
    "tracing": "every variable on a chain of assignments",
    "common": "the words that occur most often",
    "format": "multikey, in formats of a fact that gate training never uses",
    "lists": "the items of one list among several",
    "quote": "what stands after a word of the plain text",
}
# Who answers.
MODEL = "reference:0"
# One fact of one key answers these.

# Streams of the generator, kept apart so that no item repeats a document of another use.
_ITEM_STREAM, _CONTROL_STREAM, _PROBE_STREAM = 7, 11, 17
# Tasks of which probes are written, in turn: a fact, one among many, and a chain of them.
_PROBED = ("single", "multikey", "tracing")


def reference_item(task: str, seed: int, index: int, context_tokens: int) -> Item:
    """Write item `index` of a task and seed; the same arguments give the same item."""
    context_ids, question = write_item(item_writer(task, seed, index), task, context_tokens)
    return Item(context_ids, (asked_of(question),), needles=_needles(task, context_ids, question))


def item_writer(task: str, seed: int, index: int) -> Writer:
    """The writer of one item, of its own task, seed and index."""
    name = int.from_bytes(hashlib.sha256(task.encode()).digest()[:4], "big")
    own = int(np.random.SeedSequence([_ITEM_STREAM, seed, name, index]).generate_state(1)[0])
    return Writer("eval", own)


def stated(context_ids: Sequence[int], pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans of the first statement of each pair of key and value, as a fact or a link, in any format."""
    formats = (*FACT_FORMATS, *HELD_OUT_FACT_FORMATS, *LINK_FORMATS)
    found = []
    for key, value in pairs:
        spans = [span(context_ids, fill(template, key, value)) for template in formats]
        found.append(min(one for one in spans if one is not None))
    return tuple(found)


def span(context_ids: Sequence[int], wanted: Sequence[int]) -> tuple[int, int] | None:
    """First place of a run of tokens, `[start, stop)`, if any."""
    ids, run = np.asarray(context_ids), np.asarray(wanted)
    for start in np.flatnonzero(ids[: len(ids) - len(run) + 1] == run[0]).tolist():
        if (ids[start : start + len(run)] == run).all():
            return start, start + len(run)
    return None


def asked_of(question: Question, *, earlier: Sequence[int] = ()) -> Asked:
    """A question behind earlier turns."""
    return Asked((*earlier, *question.ids), question.gold_ids, question.generate, question.score)


def _needles(task: str, context_ids: Sequence[int], question: Question) -> tuple[tuple[int, int], ...]:
    """First statements that answer the question; none for frequent words, which stand everywhere."""
    answers, gold_ids = question.answers, question.gold_ids
    asked = question.ids[-2]  # the only word of most questions, before `<a>`
    if task == "common":
        return ()
    if task == "quote":
        place = context_ids.index(asked)
        return ((place, place + 2),)
    if task == "lists":
        # The words stand behind the list's name, on a run of their own.
        found = span(context_ids, (*fill(LIST_FORMAT, asked), *answers))
        assert found is not None
        return (found,)
    if task == "multiquery":
        return stated(context_ids, [*zip(gold_ids[0:-1:2], gold_ids[1:-1:2], strict=True)])
    if task == "tracing":
        return stated(context_ids, [*pairwise((asked, *answers))])
    return stated(context_ids, [(asked, value) for value in answers])


def reference_documents(seed: int, count: int, context_tokens: int) -> Iterator[Document]:
    """Documents like those of gate distillation: training text, seen families and formats."""
    writer = Writer("train", int(np.random.SeedSequence([_CONTROL_STREAM, seed]).generate_state(1)[0]))
    for _ in range(count):
        yield distill_document(writer, context_tokens)


def reference_probes(seed: int, count: int, context_tokens: int) -> Iterator[Item]:
    """Items with needles on training text, in formats that gates are trained on."""
    writer = Writer("train", int(np.random.SeedSequence([_PROBE_STREAM, seed]).generate_state(1)[0]))
    for number in range(count):
        task = _PROBED[number % len(_PROBED)]
        context_ids, question = write_item(writer, task, context_tokens)
        yield Item(context_ids, (asked_of(question),), needles=_needles(task, context_ids, question))


def reference_suite(model: str = MODEL) -> Suite:
    """The suite; tasks and families are the generator's, in its order.

    Raises:
        ValueError: Another model than the reference model, whose vocabulary the tasks are written in.
    """
    if model != MODEL:
        raise ValueError(f"suite 'reference' is asked of model={MODEL}, got {model!r}: take suite=text")
    families: dict[str, Family] = dict.fromkeys(SEEN_TASKS, "seen")
    families |= dict.fromkeys(HELD_OUT_TASKS, "held-out")
    return Suite(
        name="reference",
        tasks={name: Task(name, own, ABOUT[name]) for name, own in families.items()},
        item=reference_item,
        documents=reference_documents,
        probes=reference_probes,
        load_model=_load,
        seeds=None,
        train_gates="accelerate launch --quiet --config_file configs/accelerate/one_process.yaml "
        "train/distill.py --config configs/distill/reference.yaml "
        f"model={MODEL} seed={{seed}} output={{gates}}",
    )


def _load(seed: int) -> Any:
    """The reference model, whichever seed the items are of."""
    return load_model()
