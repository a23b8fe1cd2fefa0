"""Reads rows of data sets: files of yours, and data sets on the hub in kvpress's form.

A table's row is one `Row`; its columns are `context`, `question` and `answers` (or `answer`: one text, or a
list), and where it has them `answer_prefix`, `max_new_tokens`, `metric`, `task` (the stratum of statistics)
and `all_classes` or `classes`. Rows with equal contexts are read once. kvpress's data sets have these columns:
`simonjegou/ruler`, `simonjegou/loogle`, `Xnhyacinth/LongBench` and others.
"""

import importlib.util
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from retain.eval.tasks.row import Row
from retain.process.extras import require
from retain.registry import suggest

Table = Sequence[Mapping[str, Any]]
HUB = "hub:"


def table_rows(
    tokenizer: Any,
    *,
    context_tokens: int,
    seed: int,
    first_item: int,
    items: int | None,
    source: str,
    metric: str = "match_all",
    max_new_tokens: int = 64,
    config: str | None = None,
    split: str = "test",
    folder: str | None = None,
    revision: str | None = None,
    only: str | None = None,
) -> list[Row]:
    """Rows of a table as they stand there; contexts are not cut.

    Args:
        tokenizer: Not needed; generators are called with it.
        context_tokens, seed: Likewise.
        first_item: Number of the first row.
        items: How many; None: all.
        source: A file (`.jsonl`, `.json`, `.parquet`), or `hub:owner/name`.
        metric: Of rows without a column `metric`.
        max_new_tokens: Of rows without such a column.
        config: Which of a hub repository's data sets.
        split: Which part of it.
        folder: Folder of the repository that is read ("4096" of simonjegou/ruler), as `datasets` calls it:
            `data_dir`.
        revision: Of the repository: a commit, to have the same rows tomorrow; None: the newest.
        only: Rows of this `task` alone.

    Raises:
        ValueError: A table that cannot be had, or rows without a column that they need.
    """
    del tokenizer, context_tokens, seed
    if source.startswith(HUB):
        table = read_hub(
            source.removeprefix(HUB), name=config, split=split, data_dir=folder, revision=revision
        )
    else:
        table = read_table(Path(source))
    numbered = [pair for pair in enumerate(table) if only is None or pair[1].get("task") == only]
    stop = None if items is None else first_item + items
    return [
        _row(number, columns, source, metric, max_new_tokens)
        for number, columns in numbered[first_item:stop]
    ]


def _row(number: int, columns: Mapping[str, Any], source: str, metric: str, max_new_tokens: int) -> Row:
    answers = columns.get("answers", columns.get("answer"))
    need(columns, ("context", "question"), f"row {number} of {source}")
    if not answers:
        raise ValueError(f"row {number} of {source} has no right answer in a column `answers` or `answer`.")
    extra = {} if columns.get("task") is None else {"stratum": str(columns["task"])}
    classes = columns.get("classes") or columns.get("all_classes")
    return Row(
        task=source,
        context=columns["context"],
        question=columns["question"],
        answer_prefix=columns.get("answer_prefix") or "",
        answers=(answers,) if isinstance(answers, str) else tuple(map(str, answers)),
        max_new_tokens=int(columns.get("max_new_tokens") or max_new_tokens),
        metric=columns.get("metric") or metric,
        item=number,
        extra=extra | ({"classes": tuple(classes)} if classes else {}),
    )


def module_rows(path: Path) -> Callable[..., list[Row]]:
    """The function `rows` of a Python file, `(tokenizer, *, context_tokens, seed, first_item, items,
    **settings) -> list[Row]`. The file is run.

    Raises:
        ValueError: There is no such file, or no such function in it.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"there is no file {str(path)!r} that a task could be read from.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows: Callable[..., list[Row]] | None = getattr(module, "rows", None)
    if rows is None:
        raise ValueError(f"{path} has no function `rows`, which a task in a Python file needs.")
    return rows


def need(columns: Mapping[str, Any], names: Sequence[str], what: str) -> None:
    """Check that a table's row has its columns.

    Raises:
        ValueError: One is missing.
    """
    for name in names:
        if name not in columns:
            raise ValueError(
                f"{what} has no column {name!r}{suggest(name, columns)}; it has {', '.join(sorted(columns))}."
            )


def read_table(path: Path, member: str = "") -> Table:
    """Rows of one file: JSON lines, a JSON list, Parquet, or the JSON lines `member` of a zip.

    Raises:
        ValueError: There is no such file, or it does not read as its name says.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r} to read rows from.")
    if path.suffix == ".parquet":
        require("eval", "pyarrow", what=str(path))
        from pyarrow import parquet

        try:
            return list(parquet.read_table(path).to_pylist())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} does not read as Parquet: {error}.") from error
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                text = archive.read(member).decode("utf-8")
        else:
            text = path.read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    # Not splitlines: a JSON string may hold a line separator of Unicode as it is.
    parts = [text] if path.suffix == ".json" else text.split("\n")
    rows = []
    for number, part in enumerate(parts, 1):
        try:
            if part.strip():
                rows.append(json.loads(part))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}.") from error
    rows = rows[0] if path.suffix == ".json" and rows else rows
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is to be a list of objects, one a row, and at least one.")
    return rows


def read_hub(repository: str, **how: Any) -> Table:
    """Rows of a data set on the hub, as `datasets.load_dataset` takes its arguments.

    Raises:
        ValueError: It cannot be had.
    """
    require("eval", "datasets", what=f"{HUB}{repository}")
    from datasets import load_dataset

    try:
        table: Table = load_dataset(repository, **how)
    # No network, a proxy's refusal, a wrong name: all are OSError or ValueError, of many classes.
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{HUB}{repository} could not be had from the hub: {type(error).__name__}: {error} If it is "
            "private or gated, log in with `hf auth login`. Or fetch its file elsewhere, and name that."
        ) from error
    return table
