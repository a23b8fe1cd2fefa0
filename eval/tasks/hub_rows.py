"""Reads rows of a data set, from local files or from the hub.

A row maps columns to values; rows come in the order of the data set. Files are JSON lines, a JSON list or
Parquet, alone, in a folder, or in a zip. A missing column, a missing file and an unreachable hub each stop
the run before its first item, with an error that says what was wanted and what exists; a task is never
shortened silently.
"""

import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from retain.process.extras import require
from retain.registry import suggest

ENDINGS = (".jsonl", ".json", ".parquet")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class RowSource:
    """Location of a data set.

    Attributes:
        names: Its files, without their endings, as they may be called in a folder or a zip
            (`("trec", "data/trec")`).
        hub: Its name on the hub.
        file: File of that repository to fetch, a zip perhaps; None: ask the package `datasets`.
        config: Which of the repository's data sets, for `datasets`.
        split: Which part, for `datasets`.
        revision: Of the repository: a commit, to have the same rows tomorrow; None: the newest.
        path: File, zip or folder on this machine, which is read instead of the hub.
    """

    names: tuple[str, ...]
    hub: str
    file: str | None = None
    config: str | None = None
    split: str = "test"
    revision: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        return "/".join(part for part in (self.hub, self.config, self.file or self.split) if part)


def load_rows(source: RowSource, columns: Sequence[str]) -> Sequence[Row]:
    """Load every row of a data set that has at least the given columns.

    Args:
        source: Where it is.
        columns: What is read of every row.

    Returns:
        Rows, in the data set's order. Kept between calls; do not change them.

    Raises:
        ValueError: no such file, a file that cannot be read, a hub that cannot be reached, no rows, or a
            missing column.
    """
    return _rows(source, tuple(columns), _stamp(source))


def row_at(rows: Sequence[Row], index: int, source: RowSource) -> Row:
    """Row `index`, checked.

    Raises:
        ValueError: there are not so many.
    """
    if not 0 <= index < len(rows):
        raise ValueError(
            f"item {index} of {source} was asked for, but it has {len(rows)} items (0 to {len(rows) - 1}): "
            "ask for fewer."
        )
    return rows[index]


def local_file(path: str | Path, names: Sequence[str], endings: Sequence[str] = ENDINGS) -> Path:
    """Find the file: the path itself, or the file of a folder with one of the names.

    Raises:
        ValueError: there is none.
    """
    given = Path(path).expanduser()
    if given.is_file():
        return given
    wanted = [f"{name}{ending}" for name in names for ending in endings]
    if not given.is_dir():
        raise ValueError(
            f"there is no file or folder {str(path)!r}; wanted one that holds {wanted[0]}, or it."
        )
    for name in wanted:
        if (given / name).is_file():
            return given / name
    there = sorted(entry.name for entry in given.iterdir())
    raise ValueError(
        f"the folder {str(path)!r} has none of {', '.join(wanted)}; it has {_few(there)}. Name the file."
    )


def hub_file(hub: str, file: str, *, revision: str | None = None) -> Path:
    """Fetch one file of a data set's hub repository, or find it in the cache.

    Raises:
        ValueError: the hub cannot be reached, or has no such repository, revision or file.
    """
    from huggingface_hub import hf_hub_download

    def fetch() -> str:
        return str(hf_hub_download(hub, file, repo_type="dataset", revision=revision))

    return Path(_from_hub(fetch, f"{hub}/{file}", revision))


def read_table(path: Path, names: Sequence[str] = ()) -> list[Row]:
    """Read the rows of one file: JSON lines, a JSON list, Parquet, or one of these in a zip.

    Args:
        path: The file; its ending says what it is.
        names: What the file may be called in a zip, without its ending.

    Raises:
        ValueError: an unknown ending, or something that does not read as what it says it is.
    """
    if path.suffix == ".zip":
        return _zipped(path, names)
    if path.suffix == ".parquet":
        return _parquet(path)
    # Files of LongMemEval have been published without an ending.
    if path.suffix not in (".jsonl", ".json", ""):
        raise ValueError(f"{path} ends in {path.suffix!r}; rows are read from {', '.join(ENDINGS)} or .zip.")
    return _parsed(path.read_text(encoding="utf-8"), str(path), lines=path.suffix == ".jsonl")


@lru_cache(maxsize=4)
def _rows(source: RowSource, columns: tuple[str, ...], stamp: float) -> Sequence[Row]:
    if source.path is not None:
        given = Path(source.path).expanduser()
        found = given if given.suffix == ".zip" else local_file(given, source.names)
        rows: Sequence[Row] = read_table(found, source.names)
    elif source.file is not None:
        rows = read_table(hub_file(source.hub, source.file, revision=source.revision), source.names)
    else:
        rows = _hub_table(source)
    if not len(rows):
        raise ValueError(f"{source} has no rows.")
    # `datasets` has one set of columns, files may be ragged.
    for number, columns_there in enumerate(_columns(rows)):
        missing = [column for column in columns if column not in columns_there]
        if missing:
            raise ValueError(
                f"{source} has no column {missing[0]!r}{suggest(missing[0], columns_there)} in row {number}; "
                f"needed {', '.join(columns)}, found {', '.join(sorted(columns_there))}."
            )
    return rows


def _columns(rows: Sequence[Row]) -> Iterable[Iterable[str]]:
    names = getattr(rows, "column_names", None)
    return [names] if names is not None else rows


def _stamp(source: RowSource) -> float:
    """Modification time of a local file, so that a changed one is read again."""
    if source.path is None:
        return 0.0
    given = Path(source.path).expanduser()
    return local_file(given, source.names).stat().st_mtime


def _hub_table(source: RowSource) -> Sequence[Row]:
    require(
        "eval", "datasets", what=str(source), otherwise=f"give a file: path=/your/{source.names[0]}.jsonl"
    )
    from datasets import load_dataset

    def fetch() -> Any:
        return load_dataset(source.hub, source.config, split=source.split, revision=source.revision)

    return cast(Sequence[Row], _from_hub(fetch, str(source), source.revision))


def _from_hub(fetch: Callable[[], Any], what: str, revision: str | None) -> Any:
    try:
        return fetch()
    # No network, a proxy's refusal, a wrong name: all are OSError or ValueError, of many classes.
    except (OSError, ValueError, RuntimeError) as error:
        cause = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{what} (revision {revision or 'newest'}) could not be had from the hub: "
            f"{type(error).__name__}: {cause[:300]}. Without the hub, fetch its files elsewhere and give "
            "them: path=FILE or path=FOLDER."
        ) from error


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


def _parquet(path: Path) -> list[Row]:
    require("eval", "pyarrow", what=str(path))
    import pyarrow.parquet

    try:
        return cast(list[Row], pyarrow.parquet.read_table(path).to_pylist())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} does not read as Parquet: {error}.") from error


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
            raise ValueError(f"{where}, line {place}, is not JSON: {error.msg}.") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of lists
            raise ValueError(f"{where}, line {number}, cannot be read: {error}.") from error
    rows = read if lines or not read else read[0]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{where} is to be a list of objects, one per item; it is {type(rows).__name__}.")
    return rows


def _few(names: Sequence[str], most: int = 8) -> str:
    listed = ", ".join(names[:most]) or "nothing"
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed
