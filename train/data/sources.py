"""Reads rows from local jsonl, parquet and text files and from data sets of the hub, from any position on.

A source is read in one fixed order (files by name, rows as they lie), so a position is a number of rows, and
a small JSON state is enough to go on from. jsonl and text need no package; parquet needs pyarrow and the hub
needs datasets, imported when they are used.
"""

import glob
import gzip
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Literal

from retain.config import what_is_at
from retain.process.extras import require
from retain.registry import suggest

Kind = Literal["jsonl", "parquet", "text"]
ENDINGS: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"),
    "parquet": (".parquet",),
    "text": (".txt", ".txt.gz"),
}
# First bytes of a file of another kind than was asked for, and a hint.
MAGIC = (
    (b"PAR1", "it is a parquet file: set data.source=parquet"),
    (b"\x1f\x8b", "it is compressed: give it a name that ends in .gz, or run gunzip"),
    (b"\x28\xb5\x2f\xfd", "it is compressed: run unzstd"),
    (b"PK\x03\x04", "it is a zip archive: run unzip"),
    (b"\xff\xfe", "it is UTF-16: run iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "it is UTF-16: run iconv -f UTF-16 -t UTF-8"),
)
PARQUET_ROWS = 64  # read at once; a row may be a whole book


@dataclass(frozen=True)
class Row:
    """One row: where it is (file and line, for errors), its values by column (of a wide file perhaps only the
    columns that are wanted), and all columns that there are, for errors."""

    where: str
    values: Mapping[str, Any]
    columns: tuple[str, ...]


class Cursor:
    """A place in a source; iterating moves it. `start` is the state of the place (`rows` in it counts the
    rows before it), `more` what a later state holds beside `rows`."""

    def __init__(
        self, rows: Iterator[Row], start: Mapping[str, Any], more: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self._rows, self._start, self._more = rows, dict(start), more
        self._read: int = start["rows"]

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        row = next(self._rows)
        self._read += 1
        return row

    def state(self) -> dict[str, Any]:
        """The position of the next row, for JSON."""
        # The state of datasets means something only once a row was read.
        moved = self._read != self._start["rows"]
        return {"rows": self._read, **self._more()} if moved else self._start


class Source(ABC):
    """Rows that can be read again and again in the same order.

    Attributes:
        commit: of a hub data set, the one that is read, once it was opened; None: not known, or files.
    """

    commit: str | None = None

    @abstractmethod
    def open(self, state: Mapping[str, Any] | None = None) -> Cursor:
        """Begins at the first row, or where a cursor's `state` says."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The identity of this source, for JSON."""


class LocalFiles(Source):
    """Files of one kind, read one after another in the order of their names.

    Args:
        path: a file, a folder (all files of the kind in it and below, but hidden ones and hidden folders) or
            a pattern (`data/*.jsonl`, `data/**/*.txt`).
        kind: `jsonl` (one object a line), `parquet`, or `text` (rows with the one column `text`).
        separator: `text`: None makes every file one document; "" splits at blank lines; any other string
            splits wherever it stands.
        wanted: `parquet`: read only these columns, if the file has any of them.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: files that are empty.
    """

    def __init__(
        self, path: str, kind: Kind, *, separator: str | None = None, wanted: Sequence[str] = ()
    ) -> None:
        self.paths, self.kind = local_paths(path, kind), kind
        self.separator, self.wanted = separator, tuple(wanted)
        empty = [str(path) for path in self.paths if not path.stat().st_size]
        if empty:
            raise ValueError(_empty(empty))

    def open(self, state: Mapping[str, Any] | None = None) -> Cursor:
        start = {"rows": state["rows"] if state else 0}
        return Cursor(self._rows(start["rows"]), start)

    def describe(self) -> dict[str, Any]:
        # Not their sizes: a damaged file that a run stopped at can be mended, and the run goes on.
        files = [path.name for path in self.paths]
        return {"kind": self.kind, "files": files, "separator": self.separator}

    def _rows(self, skip: int) -> Iterator[Row]:
        # A file's rows, with None for each of the first `skip`, which are not looked into.
        readers: dict[str, Callable[[Path, int], Iterator[Row | None]]] = {
            "jsonl": _jsonl_rows,
            "parquet": partial(_parquet_rows, wanted=self.wanted),
            "text": partial(_text_rows, separator=self.separator),
        }
        read = readers[self.kind]
        for path in self.paths:
            found = 0
            for row in read(path, skip):
                found += 1
                if row is not None:
                    yield row
            if not found:
                raise ValueError(_empty([str(path)]))
            skip = max(0, skip - found)


def local_paths(path: str, kind: Kind) -> list[Path]:
    """Returns the files that a path, a folder or a pattern stands for, by name; FileNotFoundError: none."""
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        # Not those that are hidden, or in a hidden folder (.git, .ipynb_checkpoints, .cache).
        seen = [
            file
            for file in place.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(place).parts)
        ]
        found = [file for file in seen if file.name.lower().endswith(ENDINGS[kind])]
        if not found:
            there = sorted({file.suffix or file.name for file in seen})
            raise FileNotFoundError(
                f"no such data file: the folder {path} holds none that ends in {', '.join(ENDINGS[kind])}"
                f" (it holds {', '.join(there[:8]) or 'nothing'}). Set data.source to the kind that it "
                "holds, or data.path to a pattern such as 'folder/*.json'."
            )
    else:
        matches = glob.glob(str(place), recursive=True) if glob.has_magic(path) else []
        found = [Path(match) for match in matches if Path(match).is_file()]
        if not found:
            near = [file.name for file in place.parent.iterdir()] if place.parent.is_dir() else []
            other = what_is_at(place)
            problem = f"data file {path} {other}" if other else f"no such data file: {path}"
            raise FileNotFoundError(
                f"{problem}{'' if other else suggest(place.name, near)}. Set data.path to a "
                f"{ENDINGS[kind][0]} file, a folder of them, or a pattern; relative paths start at "
                f"{str(Path.cwd())!r}."
            )
    return sorted(found, key=str)


def _empty(paths: Sequence[str]) -> str:
    named = ", ".join(repr(path) for path in paths[:5]) + (" ..." if len(paths) > 5 else "")
    return (
        f"empty data set: {named} hold{'s' if len(paths) == 1 else ''} nothing. Remove what is empty, or "
        "write it again: a job that writes data leaves such a file when it is stopped."
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file as bytes, from line 1, unpacked if it is called .gz."""
    try:
        with _opened(path) as file:
            yield from enumerate(file, start=1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is damaged or was cut short ({error}): copy or write it again, and check with gunzip -t."
        ) from error
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror or error}): check its permissions and that its disk is "
            "there; a run that had a checkpoint goes on from it when it is started again."
        ) from error


def _opened(path: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")


def _decoded(path: Path, number: int, line: bytes) -> str:
    """A line as text, or an error that says why it is none."""
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
    zero = line.find(b"\0")
    try:
        if zero < 0:
            return line.decode()
        reason = f"byte {zero} of the line is zero"
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} of the line, 0x{line[error.start]:02x}, is no UTF-8"
    packed = path.suffix == ".gz"
    convert = "gunzip -c {} | iconv -f latin1 -t UTF-8 | gzip" if packed else "iconv -f latin1 -t UTF-8"
    advice = (
        "Is the file binary, or in another encoding? Give a UTF-8 file "
        f"({convert.format(path.name)} converts one), or leave it out."
    )
    with _opened(path) as file:
        head = file.read(4)  # of what is inside, where the file is packed
    for magic, hint in MAGIC:
        if head.startswith(magic):
            advice = f"By its first bytes {'inside ' * packed}{hint}."
    raise ValueError(f"{path} line {number} is not text: {reason}. {advice}")


def _jsonl_rows(path: Path, skip: int) -> Iterator[Row | None]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        if skip:
            skip -= 1
            yield None
            continue
        where = f"{path} line {number}"
        text = _decoded(path, number, line)
        try:
            values = json.loads(text, object_pairs_hook=_unique)
        except _Twice as error:
            raise ValueError(
                f"{where} gives the key {error} twice, and one value would be lost: leave out one of them."
            ) from None
        except (json.JSONDecodeError, RecursionError) as error:
            hint = (
                f"Is the file one array? `jq -c '.[]' {path.name}` writes one object a line."
                if text.lstrip().startswith("[")
                else "Wanted one object a line; a last line that is cut short was written by a job that was "
                "stopped."
            )
            raise ValueError(f"{where} is not JSON: {error}. {hint}") from None
        except ValueError as error:  # an integer of thousands of digits
            raise ValueError(
                f"{where} holds a number that cannot be read ({error}): write it as text, in quotation "
                "marks, or leave the row out."
            ) from None
        if not isinstance(values, dict):
            raise ValueError(
                f"{where}: wanted an object, got {type(values).__name__}. Write one object a line, such as "
                '{"text": "..."}'
                + (f"; `jq -c '.[]' {path.name}` takes an array apart." if isinstance(values, list) else ".")
            )
        yield Row(where, values, tuple(values))


class _Twice(Exception):
    """A key that an object has twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(repr(next(key for key in keys if keys.count(key) > 1)))
    return values


def _text_rows(path: Path, skip: int, separator: str | None) -> Iterator[Row | None]:
    """Documents of a text file; those without a letter are none."""
    if separator is None and skip:
        yield None
        return
    for number, text in enumerate(filter(str.strip, _pieces(path, separator)), start=1):
        if number <= skip:
            yield None
        elif separator is None:
            yield Row(str(path), {"text": text}, ("text",))
        else:
            yield Row(f"{path} document {number}", {"text": text.strip("\n")}, ("text",))


def _pieces(path: Path, separator: str | None) -> Iterator[str]:
    lines = (_decoded(path, number, raw).replace("\r\n", "\n") for number, raw in _lines(path))
    if separator is None:
        yield "".join(lines)
    elif separator == "":
        for has_text, group in groupby(lines, key=lambda line: bool(line.strip())):
            if has_text:
                yield "".join(group)
    else:
        parts: list[str] = []
        for line in lines:
            first, *ended = line.split(separator)
            parts.append(first)
            for piece in ended:
                yield "".join(parts)
                parts = [piece]
        yield "".join(parts)


def _parquet_rows(path: Path, skip: int, wanted: Sequence[str]) -> Iterator[Row | None]:
    require("train", "pyarrow", what="data.source=parquet")
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = tuple(file.schema_arrow.names)
            twice = sorted({name for name in columns if columns.count(name) > 1})
            if twice:
                raise ValueError(
                    f"{path} has the column {twice[0]!r} twice, and one of them would be lost: write it "
                    "again with a name of its own for each."
                )
            read = [name for name in columns if name in wanted] or list(columns)
            number = 0
            groups: list[int] = []
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if not groups and number + rows <= skip:
                    number += rows
                    yield from (None for _ in range(rows))
                else:
                    groups.append(group)
            if groups:
                for batch in file.iter_batches(PARQUET_ROWS, row_groups=groups, columns=read):
                    for values in batch.to_pylist():
                        number += 1
                        if number <= skip:
                            yield None
                        else:
                            yield Row(f"{path} row {number}", _without_fills(values), columns)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is no readable parquet file ({_first_line(error)}): it is damaged, was cut short, or is "
            "of another kind. Copy or write it again, or set data.source to what it is."
        ) from error


def _without_fills(values: Mapping[str, Any], features: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A row of Arrow without the fields that are None inside its columns.

    Arrow gives every object of a column all the fields that any has, and a field that is absent reads as
    None. An author's null cannot be told from it, and goes too. A column that is None stays.

    Args:
        features: the columns' types, where `datasets` states them; what is stored as JSON is left as it is.
    """
    features = features or {}
    return {name: _unfilled(value, features.get(name)) for name, value in values.items()}


def _unfilled(value: Any, feature: Any) -> Any:
    # By its name: earlier releases of `datasets` have no such type.
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, Mapping):
        fields = feature if isinstance(feature, Mapping) else {}
        return {name: _unfilled(one, fields.get(name)) for name, one in value.items() if one is not None}
    # Not the many numbers of token ids.
    if isinstance(value, list | tuple) and any(isinstance(one, Mapping | list | tuple) for one in value):
        return [_unfilled(one, getattr(feature, "feature", None)) for one in value]
    return value


class Hub(Source):
    """A data set by its hub name (or a folder that the `datasets` package can load), streamed; from the local
    cache where HF_HUB_OFFLINE is set.

    Its revision is a commit, a branch or a tag. What that means is asked once: every pass, and a run that
    goes on from a cursor's state, reads the same commit, also when the branch has moved.
    """

    def __init__(self, path: str, subset: str | None, split: str, revision: str | None) -> None:
        self.path, self.subset, self.split, self.revision = path, subset, split, revision

    def open(self, state: Mapping[str, Any] | None = None) -> Cursor:
        require("train", "datasets", what="data.source=hub")
        import datasets
        from huggingface_hub import HfApi, constants

        start = {**(state or {"rows": 0})}
        # Streaming asks the hub which files there are; what was downloaded earlier is found only without.
        streaming = not constants.HF_HUB_OFFLINE
        try:
            self.commit = start.get("commit") or self.commit
            if self.commit is None and streaming and not os.path.isdir(self.path):
                self.commit = HfApi().dataset_info(self.path, revision=self.revision).sha
            revision = self.commit or self.revision
            rows: Any = datasets.load_dataset(
                self.path, self.subset, split=self.split, revision=revision, streaming=streaming
            )
            rows = rows if streaming else rows.to_iterable_dataset()
            if "datasets" in start:
                rows.load_state_dict(start["datasets"])
            elif start["rows"]:
                rows = rows.skip(start["rows"])
        # Errors of transports and loaders of many packages, without a common ancestor.
        except Exception as error:
            raise ValueError(self.failure(error, 0)) from error

        def more() -> dict[str, Any]:
            known = {} if self.commit is None else {"commit": self.commit}
            return {**known, "datasets": rows.state_dict()} if hasattr(rows, "state_dict") else known

        return Cursor(self._rows(rows, start["rows"]), start, more)

    def _rows(self, rows: Any, read: int) -> Iterator[Row]:
        features = getattr(rows, "features", None)
        try:
            for values in rows:
                read += 1
                yield Row(f"{self.path!r} row {read}", _without_fills(values, features), tuple(values))
        # As above: a connection that is lost in the middle shows as errors of many packages.
        except Exception as error:
            raise ValueError(self.failure(error, read)) from error

    def describe(self) -> dict[str, Any]:
        return {"hub": self.path, "subset": self.subset, "split": self.split, "revision": self.revision}

    def failure(self, error: Exception, rows: int) -> str:
        """Returns the text of an error after so many rows, with the next step."""
        name = f"the hub data set {self.path!r}"
        what = f"{type(error).__name__}: {_first_line(error)}"
        if rows:
            return (
                f"{name} broke off after {rows} rows ({what}). Start the command again: the run goes on from "
                "its last checkpoint. If it happens again, download the data and use data.source=parquet."
            )
        if os.path.isdir(self.path) or isinstance(error, ValueError) or "NotFound" in type(error).__name__:
            return (
                f"{name} cannot be loaded ({what}). Check data.path, data.subset={self.subset!r}, "
                f"data.split={self.split!r} and data.revision={self.revision!r}; a private or gated one is "
                "not found without HF_TOKEN or `hf auth login`, by someone who may read it."
            )
        if "scripts are no longer supported" in str(error):
            return (
                f"{name} comes with a loading script, which datasets no longer runs ({what}). Try "
                "data.revision=refs/convert/parquet, or download its files and use data.source=parquet "
                "or jsonl."
            )
        return (
            f"{name} cannot be reached ({what}). Check the network and that HF_HUB_OFFLINE is not set "
            f"(it is {os.environ.get('HF_HUB_OFFLINE', 'not set')!r}). A stream leaves nothing behind that "
            "could be read without a network: download the data set where there is one (hf download "
            f"--repo-type dataset {self.path}) and set data.source=parquet or jsonl, and data.path to that "
            "folder; or load it once with datasets.load_dataset, whose cache is read."
        )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")[:300]
