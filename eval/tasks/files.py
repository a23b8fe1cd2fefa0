"""Reads rows of data sets: files of yours, and data sets on the hub in kvpress's form.

A table's row is one `Row`: columns `context`, `question` and `answers` (or `answer`: one text, or a list),
and where it has them `answer_prefix`, `max_new_tokens`, `metric`, `task` (the stratum of statistics) and
`classes` (or `all_classes`). kvpress's data sets have these columns: simonjegou/ruler, simonjegou/loogle,
Xnhyacinth/LongBench and others.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from retain.config import Count, build
from retain.eval.tasks.row import Row, RowsFunction
from retain.process.extras import require

Table = Sequence[Mapping[str, Any]]
HUB = "hub:"


@dataclass(frozen=True)
class Columns:
    """Columns of a table's row that are read, with their types; others are left alone."""

    context: str
    question: str
    answers: str | tuple[str | float, ...] | None = None
    answer: str | tuple[str | float, ...] | None = None
    answer_prefix: str | None = None
    max_new_tokens: Count | None = None
    metric: str | None = None
    task: str | int | None = None
    classes: tuple[str, ...] | None = None
    all_classes: tuple[str, ...] | None = None


def table_rows(
    tokenizer: Any,
    *,
    context_tokens: int,
    seed: int,
    first_item: int,
    items: int | None,
    source: str,
    only: str | None = None,
    split: str = "test",
    name: str | None = None,
    data_dir: str | None = None,
    revision: str | None = None,
) -> list[Row]:
    """Rows of a table as they stand there, with contexts of their natural length.

    Args:
        tokenizer, context_tokens, seed: Not needed here.
        first_item: Number of the first row.
        items: How many; None: all.
        source: A file (`.jsonl`, `.parquet`), or `hub:owner/name`.
        only: Rows of this `task` alone.
        split, name, data_dir, revision: Part of a hub repository, as `datasets.load_dataset` takes them.

    Raises:
        ValueError: A table that cannot be had, or rows without a column that they need, or with values of
            another type.
    """
    del tokenizer, context_tokens, seed
    if source.startswith(HUB):
        table = read_hub(source, name=name, data_dir=data_dir, split=split, revision=revision)
    else:
        table = read_file(Path(source))
    chosen = [pair for pair in enumerate(table) if only is None or pair[1].get("task") == only]
    rows = []
    for number, columns in chosen[first_item : None if items is None else first_item + items]:
        known = {one.name: columns[one.name] for one in fields(Columns) if one.name in columns}
        try:
            read = build(known, Columns)
        except ValueError as error:
            raise ValueError(f"row {number} of {source}: {error}") from error
        answers, classes = read.answers or read.answer or (), read.classes or read.all_classes
        answers = (answers,) if isinstance(answers, str) else tuple(map(str, answers))
        stated = {name: getattr(read, name) for name in ("max_new_tokens", "metric", "answer_prefix")}
        more = {name: value for name, value in stated.items() if value}
        extra = {name: value for name, value in (("stratum", read.task), ("classes", classes)) if value}
        rows.append(Row(source, read.context, read.question, answers, item=number, extra=extra, **more))
    return rows


def module_rows(path: Path) -> RowsFunction:
    """The function `rows` of a Python file, which is run.

    Raises:
        ValueError: There is no such file, or no such function in it.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"there is no file {str(path)!r} that a task could be read from.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "rows", None)):
        raise ValueError(f"{path} has no function `rows`, which a task in a Python file needs.")
    rows: RowsFunction = module.rows
    return rows


def read_file(path: Any) -> Table:
    """Rows of a file, JSON lines or Parquet; a ValueError if there is none, or it does not read so."""
    try:
        if path.suffix == ".parquet":
            require("eval", "pyarrow", what=str(path))
            from pyarrow import parquet

            return list(parquet.read_table(path).to_pylist())
        # Not splitlines: a JSON string may hold a line separator of Unicode as it is.
        lines, rows = path.read_text(encoding="utf-8").split("\n"), []
        for number, line in enumerate(lines, 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is not JSON, {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"rows of {path} cannot be read: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is to hold JSON objects, one a line, and at least one.")
    return rows


def read_hub(source: str, **where: Any) -> Table:
    """Rows of `hub:owner/name`, `where` as `datasets.load_dataset` takes it; a ValueError if there are
    none."""
    require("eval", "datasets", what=source)
    from datasets import load_dataset

    try:
        table: Table = load_dataset(source.removeprefix(HUB), **where)
    # No network, a proxy's refusal, a wrong name: all are OSError or ValueError, of many classes.
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{source} could not be had from the hub: {type(error).__name__}: {error} If it is private or "
            "gated, log in with `hf auth login`. Or fetch its file elsewhere, and name that."
        ) from error
    return table
