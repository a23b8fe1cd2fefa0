"""Reads rows of a data set, from local files or from the hub.

A row maps columns to values; rows come in the order of the data set. Files are JSON lines, a JSON list or
Parquet, alone, in a folder, or in a zip. A missing column, a missing file and an unreachable hub each stop
the run before its first item, with an error that says what was wanted and what exists; a task is never
shortened silently.
"""

import inspect
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from retain.eval.tasks.task_card import Asking, TextItem
from retain.process.extras import require
from retain.registry import suggest

ENDINGS = (".jsonl", ".json", ".parquet")
# Errors of huggingface_hub and datasets, by which a private repository shows too.
NO_SUCH_REPOSITORY = ("DatasetNotFoundError", "GatedRepoError", "RepositoryNotFoundError")
Row = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class RowSource:
    """Location of a data set.

    Attributes:
        names: Its files, without their endings, as they may be called in a folder or a zip
            (`("trec", "data/trec")`).
        hub: Its name on the hub.
        columns: Columns that every row needs.
        file: File of that repository to fetch, a zip perhaps; None: ask the package `datasets`.
        config: Which of the repository's data sets, for `datasets`.
        split: Which part, for `datasets`.
        revision: Of the repository: a commit, to have the same rows tomorrow; None: the newest.
        path: File, zip or folder on this machine, which is read instead of the hub.
    """

    names: tuple[str, ...]
    hub: str
    columns: tuple[str, ...] = ()
    file: str | None = None
    config: str | None = None
    split: str = "test"
    revision: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        return "/".join(part for part in (self.hub, self.config, self.file or self.split) if part)


@dataclass(frozen=True)
class RowTask:
    """Generator of a task whose items are rows of a data set: `(asking, **settings) -> TextItem`.

    Its settings are those of `source` and `write`, and `path` (file, zip or folder on this machine) and
    `revision` (of the hub's repository).

    Attributes:
        source: `(**settings) -> RowSource`, without path and revision.
        write: `(asking, row, **settings) -> TextItem`.
    """

    source: Callable[..., RowSource]
    write: Callable[..., TextItem]

    def size(self, **settings: Any) -> int:
        """Number of items."""
        return len(self._rows(**settings)[1])

    def __call__(self, asking: Asking, **settings: Any) -> TextItem:
        """Write one item.

        Raises:
            ValueError: Unknown data set, rows that cannot be had, or an item that cannot be written.
        """
        source, rows, own = self._rows(**settings)
        return self.write(asking, row_at(rows, asking.index, source), **own)

    def _rows(
        self, *, path: str | None = None, revision: str | None = None, **settings: Any
    ) -> tuple[RowSource, Sequence[Row], dict[str, Any]]:
        inspect.signature(self.write).bind(None, None, **settings)
        source = replace(self.source(**settings), path=path, revision=revision)
        return source, load_rows(source), settings


def load_rows(source: RowSource) -> Sequence[Row]:
    """Load every row of a data set, in its order. Rows are kept between calls; do not change them.

    Raises:
        ValueError: No such file, a file that cannot be read, a hub that cannot be reached, no rows, or a
            missing column.
    """
    # The time of a local file's last change, so that a changed one is read again.
    stamp = 0.0 if source.path is None else local_file(source.path, source.names).stat().st_mtime
    return _rows(source, stamp)


def row_at(rows: Sequence[T], index: int, source: object) -> T:
    """Row `index` of `rows`, or a ValueError that says how many there are."""
    if not 0 <= index < len(rows):
        raise ValueError(
            f"item {index} of {source} was asked for, but it has {len(rows)} items (0 to {len(rows) - 1}): "
            "ask for fewer."
        )
    return rows[index]


def local_file(path: str | Path, names: Sequence[str]) -> Path:
    """The path itself, or the file of a folder with one of the names; a ValueError if there is none."""
    place = Path(path).expanduser()
    if place.is_file():
        return place
    wanted = [f"{name}{ending}" for name in names for ending in ENDINGS]
    if not place.is_dir():
        raise ValueError(
            f"there is no file or folder {str(path)!r}; wanted one that holds {wanted[0]}, or it."
        )
    for name in wanted:
        if (place / name).is_file():
            return place / name
    there = sorted(entry.name for entry in place.iterdir())
    raise ValueError(
        f"the folder {str(path)!r} has none of {', '.join(wanted)}; it has {_few(there)}. Name the file."
    )


def read_table(path: Path, names: Sequence[str] = ()) -> list[Row]:
    """Read the rows of one file: JSON lines, a JSON list, Parquet, or one of these in a zip under one of the
    names.

    Raises:
        ValueError: An unknown ending, or a file that does not read as its ending says.
    """
    if path.suffix == ".zip":
        return _zipped(path, names)
    if path.suffix == ".parquet":
        require("eval", "pyarrow", what=str(path))
        from pyarrow import parquet

        try:
            return cast(list[Row], parquet.read_table(path).to_pylist())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} does not read as Parquet: {error}.") from error
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(f"{path} ends in {path.suffix!r}; rows are read from {', '.join(ENDINGS)} or .zip.")
    return _parsed(path.read_text(encoding="utf-8"), str(path), lines=path.suffix == ".jsonl")


@lru_cache(maxsize=4)
def _rows(source: RowSource, stamp: float) -> Sequence[Row]:
    if source.path is not None:
        rows: Sequence[Row] = read_table(local_file(source.path, source.names), source.names)
    else:
        rows = _from_hub(source)
    if not len(rows):
        raise ValueError(f"{source} has no rows.")
    # `datasets` has one set of columns, files may be ragged.
    for number, there in enumerate([rows.column_names] if hasattr(rows, "column_names") else rows):
        missing = [column for column in source.columns if column not in there]
        if missing:
            raise ValueError(
                f"{source} has no column {missing[0]!r}{suggest(missing[0], there)} in row {number}; "
                f"needed {', '.join(source.columns)}, found {', '.join(sorted(there))}."
            )
    return rows


def _from_hub(source: RowSource) -> Sequence[Row]:
    if source.file is None:
        otherwise = f"give a file: path=/your/{source.names[0]}.jsonl"
        require("eval", "datasets", what=str(source), otherwise=otherwise)
    try:
        if source.file is None:
            from datasets import load_dataset

            table = load_dataset(source.hub, source.config, split=source.split, revision=source.revision)
            return cast(Sequence[Row], table)
        from huggingface_hub import hf_hub_download

        file = hf_hub_download(source.hub, source.file, repo_type="dataset", revision=source.revision)
    # No network, a proxy's refusal, a wrong name: all are OSError or ValueError, of many classes.
    except (OSError, ValueError, RuntimeError) as error:
        cause = " ".join(str(error).split()).rstrip(".")
        step = "Without the hub,"
        if type(error).__name__ in NO_SUCH_REPOSITORY:
            step = (
                "If it is private or gated, log in with `hf auth login` (or set HF_TOKEN) as someone who may "
                "read it. Or"
            )
        raise ValueError(
            f"{source} (revision {source.revision or 'newest'}) could not be had from the hub: "
            f"{type(error).__name__}: {cause[:300]}. {step} fetch its files elsewhere and give them: "
            "path=FILE or path=FOLDER."
        ) from error
    return read_table(Path(file), source.names)


def _zipped(path: Path, names: Sequence[str]) -> list[Row]:
    try:
        with zipfile.ZipFile(path) as archive:
            there = archive.namelist()
            for member in (f"{name}{ending}" for name in names for ending in (".jsonl", ".json")):
                if member in there:
                    text = archive.read(member).decode("utf-8")
                    return _parsed(text, f"{path}: {member}", lines=member.endswith(".jsonl"))
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not a zip: {error}.") from error
    raise ValueError(f"{path} holds none of {', '.join(names)} as .jsonl or .json; it holds {_few(there)}.")


def _parsed(text: str, where: str, *, lines: bool) -> list[Row]:
    # Not splitlines: a JSON string may hold a line separator of Unicode as it is.
    parts = [*enumerate(text.split("\n"), 1)] if lines else [(1, text)]
    read = []
    for number, part in parts:
        try:
            if part.strip():
                read.append(json.loads(part))
        except json.JSONDecodeError as error:
            place = number + error.lineno - 1
            raise ValueError(
                f"{where}, line {place}, is not JSON ({error.msg}): mend or fetch it."
            ) from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of lists
            raise ValueError(f"{where}, line {number}, cannot be read: {error}.") from error
    rows = read if lines or not read else read[0]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{where} is to be a list of objects, one per item; it is {type(rows).__name__}.")
    return rows


def _few(names: Sequence[str], most: int = 8) -> str:
    listed = ", ".join(names[:most]) or "nothing"
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed
