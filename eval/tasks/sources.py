"""Finds the rows of a task by its name.

A task is one of `SOURCES`, a file of yours (`mine.jsonl`, `mine.parquet`, or `mine.py` with a function
`rows`), or a data set on the hub (`hub:owner/name`). A further generator is a function in a file of this
folder and a line in its `SOURCES`.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from retain.eval.metrics import METRICS
from retain.eval.tasks.made import facts
from retain.eval.tasks.row import Row, Source
from retain.registry import lookup

SOURCES: dict[str, Source] = {**facts.SOURCES}


def task_names(names: Iterable[str]) -> list[str]:
    """Resolve names of tasks and of groups of them ("facts": every task whose name begins with "facts/"), in
    order and each once.

    Raises:
        ValueError: A name that is neither, nor a file or a data set on the hub.
    """
    known: dict[str, list[str]] = {task: [task] for task in SOURCES}
    for task in SOURCES:
        known.setdefault(task.partition("/")[0], []).append(task)
    found: dict[str, None] = {}
    for name in names:
        found |= dict.fromkeys(lookup(name, known, what="task or group"))
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
    """Load rows of a task; the same arguments give the same rows.

    Args:
        task: Name of one task.
        tokenizer: Of the model that will read them.
        context_tokens: Most tokens of a context; rows with a context of natural length are cut to it only
            where their benchmark says so.
        seed: Of generated rows. Rows of a data set are the same for every seed, and have seed 0.
        first_item: Number of the first row.
        items: How many rows; fewer where a data set has no more. None: all of a data set.
        settings: Of the task, over its own.

    Raises:
        ValueError: No such task, settings that it does not take, or rows that cannot be had.
    """
    source = lookup(task, SOURCES, what="task")
    made = source.rows(
        tokenizer,
        context_tokens=context_tokens,
        seed=seed,
        first_item=first_item,
        items=items,
        **{**source.settings, **settings},
    )
    rows = []
    for row in made:
        lookup(row.metric, METRICS, what="metric")
        digest = hashlib.sha256(row.context.encode()).hexdigest()[:16]
        rows.append(replace(row, task=task, context_id=row.context_id or digest))
    return rows
