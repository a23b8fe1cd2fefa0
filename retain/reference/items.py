"""Writes the items of tasks: one question on one context, with its answer.

Answers are judged as generated freely; tokens that only restate a key are generated but not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retain.reference.documents import (
    FACT_FORMATS,
    HELD_OUT_FACT_FORMATS,
    NUM_TOPICS,
    Content,
    Question,
    Writer,
    take,
    taken_words,
)
from retain.registry import lookup

SEEN_TASKS = ("single", "multikey", "multivalue", "multiquery", "tracing", "common")
HELD_OUT_TASKS = ("format", "lists", "quote")
TASKS = SEEN_TASKS + HELD_OUT_TASKS
# Of a crowd of keys, one for every 32 tokens: the pool must have words left for the decoys of long contexts.
MOST_KEYS = 160


@dataclass(frozen=True)
class Item:
    """One question on one context.

    Attributes:
        task: Name in `TASKS`.
        context_ids: Token ids of the context, `<bos>` first.
        question_ids: From `<q>` to `<a>`; comes after the context.
        answers: The tokens to be found.
        scored: Which of the generated tokens are compared with `answers` (the others restate a key).
        ordered: Whether `answers` must come in this order.
        gold_ids: A right continuation, `<eos>` included.
    """

    task: str
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answers: tuple[int, ...]
    scored: tuple[int, ...]
    ordered: bool
    gold_ids: tuple[int, ...]

    @property
    def generate(self) -> int:
        """Number of tokens to generate: the answer without its `<eos>`."""
        return len(self.gold_ids) - 1

    def score(self, generated: Sequence[int]) -> tuple[float, float]:
        """Exact match and the share of right answers, of generated token ids."""
        given = [generated[i] if i < len(generated) else -1 for i in self.scored]
        if self.ordered:
            hits = [a == b for a, b in zip(given, self.answers, strict=True)]
            return float(all(hits)), sum(hits) / len(hits)
        found = set(given) & set(self.answers)
        return float(found == set(self.answers)), len(found) / len(set(self.answers))


def write_item(writer: Writer, task: str, context_tokens: int) -> Item:
    """Write one question of a task on a context of exactly `context_tokens` tokens.

    Raises:
        ValueError: Unknown task, or a context too short for the task's statements.
    """
    lookup(task, dict.fromkeys(TASKS), what="task")
    crowd = min(MOST_KEYS, max(4, context_tokens // 32))
    pool = writer.draw(2 * crowd + 24)

    def facts(count: int) -> list[tuple[int, int]]:
        return [(pool.pop(), pool.pop()) for _ in range(count)]

    content, reuses, ordered = Content(), 0, True
    question: Question | None = None  # on the filler, which is drawn last
    if task == "single":
        content.facts = facts(1)
        question = writer.ask_get(*content.facts[0])
        reuses = int(writer.rng.integers(0, 3))
    elif task in ("multikey", "format"):
        content.facts = facts(crowd)
        asked = int(writer.rng.choice(crowd, p=writer.popularity(crowd)))
        question, reuses = writer.ask_get(*content.facts[asked]), crowd // 3
    elif task == "multivalue":
        content.facts, content.multis = facts(8), [(pool.pop(), take(pool, 4))]
        question, reuses, ordered = writer.ask_all(*content.multis[0]), 3, False
    elif task == "multiquery":
        content.facts = facts(8)
        question = writer.ask_each([content.facts[i] for i in writer.rng.permutation(8)[:4]])
        reuses = 3
    elif task == "tracing":
        content.chains = [take(pool, 5) for _ in range(2)]
        question, reuses = writer.ask_trace(content.chains[int(writer.rng.integers(2))]), 2
    elif task == "lists":
        content.lists, content.facts = [(pool.pop(), take(pool, 4)) for _ in range(4)], facts(4)
        question, reuses = writer.ask_list(*content.lists[int(writer.rng.integers(4))]), 2
    elif task == "quote":
        content.facts, reuses = facts(8), 3
    else:
        content.topics = take(pool, NUM_TOPICS)
        question, ordered = writer.ask_common(content.topics), False
    formats = HELD_OUT_FACT_FORMATS if task == "format" else FACT_FORMATS
    groups = writer.groups(content, reuses, formats)
    ids, _, _ = writer.weave(groups, context_tokens, taken_words(content), content.topics)
    if question is None:
        question = writer.ask_quote(ids, taken_words(content))
    scored = tuple(i for i, kind in enumerate(question.kinds) if kind not in ("key", "eos"))
    return Item(
        task=task,
        context_ids=tuple(ids.tolist()),
        question_ids=question.ids,
        answers=tuple(question.gold_ids[i] for i in scored),
        scored=scored,
        ordered=ordered,
        gold_ids=question.gold_ids,
    )
