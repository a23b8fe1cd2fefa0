"""More tasks of the reference model: a grid of depths and lengths, conversations, a long chain.

Items are in the model's own vocabulary, of the statements that it was trained on. They are a suite of their
own, because a config of the suite `reference` that names no tasks means all of them, and published tables
must not grow columns.

The model can do all of them with the full cache (`tests/eval/test_tasks.py` asks a few). Longer answers are
beyond it: it follows 6 links of a chain and restates 4 keys, seldom more.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from retain.eval.tasks.reference_basic import (
    MODEL,
    asked_of,
    item_writer,
    reference_item,
    reference_suite,
    stated,
)
from retain.eval.tasks.suite import Asked, Item, Suite, Task
from retain.reference.documents import FACT_FORMATS, Content, Writer, fill, take, taken_words
from retain.reference.tokenizer import BOS_ID
from retain.registry import lookup

# Of the grid: depths in per cent of the filler, lengths as shares of what is asked for.
DEPTHS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
LENGTHS = (0.4, 0.6, 0.8, 1.0)
# Links of the chain: as many as the model follows.
LINKS = 6
TASKS = {
    "grid": Task("grid", "seen", "the only key, at one of 11 depths of one of 4 lengths"),
    "requests": Task("requests", "seen", "four keys and a chain of one context, asked apart"),
    "turns": Task("turns", "seen", "four keys and a chain of one context, asked one after another"),
    "chain": Task("chain", "seen", f"a chain of {LINKS} assignments", primary="partial"),
}


def reference_more_item(task: str, seed: int, index: int, context_tokens: int) -> Item:
    """Write item `index` of a task, for the model of one seed; the same arguments give the same item.

    Raises:
        ValueError: unknown task, or a context too short for its statements.
    """
    lookup(task, reference_more_suite().tasks, what="task")
    if task not in TASKS:
        return reference_item(task, seed, index, context_tokens)
    if task == "grid":
        return _grid(item_writer("grid", seed, index), index, context_tokens)
    if task == "chain":
        return _chain(item_writer("chain", seed, index), context_tokens)
    # Requests and turns are asked of the same contexts, so that they can be compared.
    return _conversation(item_writer("conversation", seed, index), context_tokens, turns=task == "turns")


def reference_more_suite(model: str = MODEL) -> Suite:
    """The suite; models, documents, gates and tasks of `reference` are included."""
    base = reference_suite(model)
    tasks = {**base.tasks, **TASKS}
    return replace(base, name="reference_more", tasks=tasks, item=reference_more_item)


def _grid(writer: Writer, index: int, context_tokens: int) -> Item:
    # A few items already cover the grid: every length in turn, depths in steps of three.
    row, column = index % len(LENGTHS), 3 * (index // len(LENGTHS)) % len(DEPTHS)
    depth, length = DEPTHS[column], int(LENGTHS[row] * context_tokens)
    key, value = writer.draw(2)
    statement = fill(writer.pick(FACT_FORMATS), key, value)
    room = length - 1 - len(statement)
    if room < 1:
        raise ValueError(
            f"the grid's shortest context is {LENGTHS[0]} of context_tokens={context_tokens}, which is no "
            "more than its statement: ask for a longer context."
        )
    filler = writer.filler(room, (key, value), ())
    start = 1 + round(depth / 100 * room)
    ids = np.concatenate([[BOS_ID], filler[: start - 1], statement, filler[start - 1 :]])
    return Item(
        context_ids=tuple(ids.tolist()),
        asked=(asked_of(writer.ask_get(key, value)),),
        needles=((start, start + len(statement)),),
        about={"depth": float(depth), "length": float(length)},
    )


def _conversation(writer: Writer, context_tokens: int, *, turns: bool) -> Item:
    count = max(8, context_tokens // 48)
    pool = writer.draw(2 * count + 10)
    content = Content([(pool.pop(), pool.pop()) for _ in range(count)])
    content.chains = [take(pool, 5) for _ in range(2)]
    context_ids = _context(writer, content, 4, context_tokens)
    facts = [content.facts[place] for place in writer.rng.permutation(count)[:4]]
    chain = content.chains[0]
    questions = [("get", writer.ask_get(*fact), [fact]) for fact in facts]
    questions.append(("trace", writer.ask_trace(chain), [*pairwise(chain)]))
    asked: list[Asked] = []
    needles: list[tuple[int, int]] = []
    earlier: tuple[int, ...] = ()
    for turn, place in enumerate(writer.rng.permutation(len(questions)).tolist()):
        kind, question, pairs = questions[place]
        spans = stated(context_ids, pairs)
        depth = 100 * sum(start for start, _ in spans) / len(spans) / len(context_ids)
        about: dict[str, str | float] = {"turn": float(turn), "kind": kind, "depth": depth}
        asked.append(replace(asked_of(question, earlier=earlier), about=about))
        needles += spans
        if turns:
            earlier = (*earlier, *question.ids, *question.gold_ids)
    return Item(context_ids, tuple(asked), needles=tuple(sorted(needles)))


def _chain(writer: Writer, context_tokens: int) -> Item:
    pool = writer.draw(2 * (LINKS + 1) + 16)
    content = Content(chains=[take(pool, LINKS + 1) for _ in range(2)])
    content.facts = [(pool.pop(), pool.pop()) for _ in range(8)]
    context_ids = _context(writer, content, 2, context_tokens)
    chain = content.chains[int(writer.rng.integers(2))]
    return Item(
        context_ids=context_ids,
        asked=(asked_of(writer.ask_trace(chain)),),
        needles=stated(context_ids, [*pairwise(chain)]),
        about={"links": float(LINKS)},
    )


def _context(writer: Writer, content: Content, reuses: int, context_tokens: int) -> tuple[int, ...]:
    ids = writer.weave(writer.groups(content, reuses), context_tokens, taken_words(content), ())
    return tuple(ids.tolist())
