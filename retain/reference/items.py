"""Writes the items of tasks: one question on one context."""

from __future__ import annotations

from retain.process.registry import lookup
from retain.reference.documents import (
    NUM_TOPICS,
    Content,
    Question,
    Writer,
    take,
)

TASKS = ("single", "multikey", "multivalue", "multiquery", "tracing", "common", "lists")
# Of a crowd of keys, one for every 32 tokens: the pool must have words left for the decoys of long contexts.
MOST_KEYS = 160


def write_item(writer: Writer, task: str, context_tokens: int) -> tuple[tuple[int, ...], Question]:
    """Write a context of exactly `context_tokens` tokens, `<bos>` first, and one question of a task on it.

    Raises:
        ValueError: Unknown task, or a context too short for the task's statements.
    """
    lookup(task, dict.fromkeys(TASKS), what="task")
    crowd = min(MOST_KEYS, max(4, context_tokens // 32))
    pool = writer.draw(2 * crowd + 24)

    def facts(count: int) -> list[tuple[int, int]]:
        return [(pool.pop(), pool.pop()) for _ in range(count)]

    content, reuses = Content(), 0
    if task == "single":
        content.facts = facts(1)
        (key, value), *_ = content.facts
        question = writer.ask("get", [key], [value])
        reuses = int(writer.rng.integers(0, 3))
    elif task == "multikey":
        content.facts = facts(crowd)
        key, value = content.facts[int(writer.rng.choice(crowd, p=writer.popularity(crowd)))]
        question, reuses = writer.ask("get", [key], [value]), crowd // 3
    elif task == "multivalue":
        content.facts, content.multis = facts(8), [(pool.pop(), take(pool, 4))]
        question, reuses = writer.ask_all(*content.multis[0]), 3
    elif task == "multiquery":
        content.facts = facts(8)
        question = writer.ask_each(writer.shuffled(content.facts)[:4])
        reuses = 3
    elif task == "tracing":
        content.chains = [take(pool, 5) for _ in range(2)]
        first, *rest = content.chains[int(writer.rng.integers(2))]
        question, reuses = writer.ask("trace", [first], rest), 2
    elif task == "lists":
        content.lists, content.facts = [(pool.pop(), take(pool, 4)) for _ in range(4)], facts(4)
        name, items = content.lists[int(writer.rng.integers(4))]
        question, reuses = writer.ask("list", [name], items), 2
    else:
        content.topics = take(pool, NUM_TOPICS)
        question = writer.ask("common", [], writer.shuffled(content.topics))
    ids = writer.weave(writer.groups(content, reuses), context_tokens, content)
    return tuple(ids.tolist()), question
