"""Finds the rows of a task by its name.

A task is one of `SOURCES`, a file of yours (`mine.jsonl`, `mine.parquet`, or `mine.py` with a function
`rows`), or a data set on the hub (`hub:owner/name`). A further generator is a function in a file of this
folder and a line in its `SOURCES`.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from retain.eval.metrics import METRICS
from retain.eval.tasks import facts, longbench, reference, ruler
from retain.eval.tasks.files import HUB, module_rows, table_rows
from retain.eval.tasks.row import Row, Source
from retain.process.registry import lookup

_MODULES = (reference, facts, ruler, longbench)
SOURCES: dict[str, Source] = {name: made for module in _MODULES for name, made in module.SOURCES.items()}
FILES = (".jsonl", ".parquet", ".py")


def find_source(task: str) -> Source:
    """The source of one task; a ValueError if there is none of that name."""
    if task.endswith(".py"):
        return Source(f"rows of {task}", module_rows(Path(task)))
    if task.startswith(HUB) or task.endswith(FILES):
        return Source(f"rows of {task}", table_rows, {"source": task})
    return lookup(task, SOURCES, what="task")


def task_names(names: Iterable[str]) -> list[str]:
    """Resolve names of tasks and of groups of them ("facts": every task whose name begins with "facts/"), in
    order and each once.

    Raises:
        ValueError: A name that is neither, nor a file or a data set on the hub.
    """
    known: dict[str, list[str]] = {task: [task] for task in SOURCES}
    for task in SOURCES:
        group, slash, _ = task.partition("/")
        known.setdefault(group, []).extend([task] if slash else [])
    found: dict[str, None] = {}
    for name in names:
        given = name.startswith(HUB) or name.endswith(FILES)
        found |= dict.fromkeys([name] if given else lookup(name, known, what="task or group"))
    return [*found]


def load_rows(
    task: str,
    tokenizer: Any,
    *,
    context_tokens: int = 4096,
    seed: int = 0,
    first_item: int = 0,
    items: int | None = None,
    **settings: Any,
) -> list[Row]:
    """Load rows of a task; the same arguments give the same rows. Rows that share a context follow each
    other.

    Args:
        task: Name of one task.
        tokenizer: Of the model that will read them.
        context_tokens: Most tokens of a context; the contexts of a table are not cut.
        seed: Of generated rows. Rows of a data set are the same for every seed, and have seed 0.
        first_item: Number of the first row.
        items: How many rows; fewer where a data set has no more. None: all of a data set.
        settings: Of the task, in place of its defaults; of any task also `max_new_tokens` and `metric`.

    Raises:
        ValueError: No such task, settings that it does not take, or rows that cannot be had or scored.
    """
    source = find_source(task)
    given = {**source.settings, **settings}
    changed = {name: given.pop(name) for name in ("max_new_tokens", "metric") if name in given}
    takes = signature(source.rows).parameters
    for name in given if not any(one.kind is one.VAR_KEYWORD for one in takes.values()) else ():
        lookup(name, takes, what=f"setting of {task}")
    how: dict[str, Any] = {"context_tokens": context_tokens, "first_item": first_item, "items": items}
    rows: dict[str, list[Row]] = {}
    for row in source.rows(tokenizer, seed=seed, **how, **given):
        shared = row.context_id or hashlib.sha256(row.context.encode()).hexdigest()[:16]
        row = replace(row, task=task, context_id=shared, **changed)
        lookup(row.metric, METRICS, what="metric")
        if not row.answers:
            raise ValueError(f"row {row.item} of {task} has no right answer, and cannot be scored.")
        rows.setdefault(shared, []).append(row)
    if not rows:
        raise ValueError(f"task {task} has no rows from number {first_item} on: ask for earlier ones.")
    return [row for together in rows.values() for row in together]
