"""The tasks of the reference model, over `retain.reference.documents`.

Families that gates are trained on, and families that they are not: facts in surface formats that gate
training never uses, the items of a list, what stands after a word of the plain text. The reference
model itself was trained on all of them. The one decision taken here: every model seed is asked items of its
own, on text that no training saw, so that a (seed, item) pair is an independent cluster.
"""

import hashlib
from collections.abc import Iterator

import numpy as np

from retain.eval.tasks import Asked, Document, Family, Item, Suite, Task

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
# One fact of one key answers these.
SINGLE_KEY = ("single", "multikey", "format")

# Streams of the generator, kept apart so that no item repeats a document of another use.
_ITEM_STREAM, _CONTROL_STREAM = 7, 11


def reference_item(task: str, seed: int, index: int, context_tokens: int) -> Item:
    """Item `index` of a task, for the model of one seed; the same arguments give the same item."""
    from retain.reference.documents import Writer
    from retain.reference.items import write_item

    name = int.from_bytes(hashlib.sha256(task.encode()).digest()[:4], "big")
    own = int(np.random.SeedSequence([_ITEM_STREAM, seed, name, index]).generate_state(1)[0])
    written = write_item(Writer("eval", own), task, context_tokens)
    return Item(
        context_ids=written.context_ids,
        asked=(Asked(written.question_ids, written.gold_ids, written.generate, written.score),),
    )


def reference_documents(seed: int, count: int, context_tokens: int) -> Iterator[Document]:
    """Documents as gates are distilled on: training text, seen families and formats."""
    from retain.reference.documents import Writer, distill_document

    own = int(np.random.SeedSequence([_CONTROL_STREAM, seed]).generate_state(1)[0])
    writer = Writer("train", own)
    for _ in range(count):
        yield distill_document(writer, context_tokens)


def reference_suite() -> Suite:
    """The suite: tasks and families are the generator's own, in its order."""
    from retain.reference import SEEDS, load_model
    from retain.reference.items import HELD_OUT_TASKS, SEEN_TASKS

    lists: tuple[tuple[Family, tuple[str, ...]], ...] = (("seen", SEEN_TASKS), ("held-out", HELD_OUT_TASKS))
    tasks = [
        Task(name, family, ABOUT.get(name, ""), name in SINGLE_KEY)
        for family, names in lists
        for name in names
    ]
    return Suite(
        name="reference",
        tasks={task.name: task for task in tasks},
        item=reference_item,
        documents=reference_documents,
        load_model=load_model,
        seeds=tuple(SEEDS),
        train_gates="accelerate launch train/distill.py --config configs/distill/reference.yaml "
        "model=reference:{seed} seed={seed} output={gates}",
    )
