"""Reads rows from local files and from data sets of the hub, from any position on.

jsonl is read by hand and needs no package: a damaged line is named. Parquet, text files and the hub go
through `datasets`, which streams them. A source is read in one fixed order (files by name, rows as they lie),
and a small JSON state is enough to go on from.
"""

import glob
import gzip
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retain.process.extras import require
from retain.process.registry import suggest

ENDINGS: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"),
    "parquet": (".parquet",),
    "text": (".txt", ".txt.gz"),
}


@dataclass(frozen=True)
class Row:
    """One row: where it is, for errors, and its values by column."""

    where: str
    values: Mapping[str, Any]


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


class JsonLines(Source):
    """Local files with one JSON object a line, plain or gzipped (`local_paths` finds them).

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: when a line is read that is damaged.
    """

    def __init__(self, path: str) -> None:
        self.paths = local_paths(path, "jsonl")

    def open(self, state: Mapping[str, Any] | None = None) -> Cursor:
        start = {"rows": state["rows"] if state else 0}
        return Cursor(self._rows(start["rows"]), start)

    def describe(self) -> dict[str, Any]:
        # Not their sizes: a damaged file that a run stopped at can be mended, and the run goes on.
        return {"kind": "jsonl", "files": [path.name for path in self.paths]}

    def _rows(self, skip: int) -> Iterator[Row]:
        for path in self.paths:
            found = 0
            try:
                with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
                    for number, line in enumerate(file, start=1):
                        if not line.strip():
                            continue
                        found += 1
                        if found > skip:
                            yield Row(f"{path} line {number}", _object(f"{path} line {number}", line))
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(
                    f"{path} is damaged, cut short or not readable ({error}): copy or write it again."
                ) from error
            if not found:
                raise ValueError(f"empty data set: '{path}' holds nothing. Remove it, or write it again.")
            skip = max(0, skip - found)


def _object(where: str, line: bytes) -> dict[str, Any]:
    """A line of jsonl as an object; a ValueError says what else it is."""
    try:
        values = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} is not JSON: {error}. Wanted one object a line, in UTF-8: `jq -c '.[]'` takes an array "
            "apart; a last line that is cut short was written by a job that was stopped."
        ) from None
    if not isinstance(values, dict):
        raise ValueError(f'{where}: wanted an object such as {{"text": "..."}}, got {type(values).__name__}.')
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it gives the key {twice!r} twice, and one value would be lost")
    return values


class Dataset(Source):
    """Whatever `datasets` streams: local parquet and text files, or a data set of the hub.

    A hub revision is a commit, a branch or a tag. What that means is asked once: every pass, and a run that
    goes on from a cursor's state, reads the same commit, also when the branch has moved. Where HF_HUB_OFFLINE
    is set, the local cache is read.

    Args:
        kind: `parquet`, `text` or `hub`.
        path: of local files, as `local_paths` takes it; or the name of the data set.
        subset, split, revision: of the hub data set.
        separator: of text files: None makes every file one document; "" splits at blank lines.
    """

    def __init__(
        self,
        kind: str,
        path: str,
        *,
        subset: str | None = None,
        split: str = "train",
        revision: str | None = None,
        separator: str | None = None,
    ) -> None:
        self.kind, self.path, self.subset, self.split = kind, path, subset, split
        self.revision, self.separator = revision, separator
        self.files = [] if kind == "hub" else [str(file) for file in local_paths(path, kind)]

    def describe(self) -> dict[str, Any]:
        if self.files:
            names = [Path(file).name for file in self.files]
            return {"kind": self.kind, "files": names, "separator": self.separator}
        return {"hub": self.path, "subset": self.subset, "split": self.split, "revision": self.revision}

    def open(self, state: Mapping[str, Any] | None = None) -> Cursor:
        require("train", "datasets", what=f"data.source={self.kind}")
        start = {**(state or {"rows": 0})}
        try:
            rows = self._loaded(start)
            if "datasets" in start:
                rows.load_state_dict(start["datasets"])
            elif start["rows"]:
                rows = rows.skip(start["rows"])
        # Errors of transports and loaders of many packages, without a common ancestor.
        except Exception as error:
            raise ValueError(self._failure(error, 0)) from error

        def more() -> dict[str, Any]:
            known = {} if self.commit is None else {"commit": self.commit}
            return {**known, "datasets": rows.state_dict()}

        return Cursor(self._rows(rows, start["rows"]), start, more)

    def _loaded(self, start: Mapping[str, Any]) -> Any:
        """The stream, from its first row on."""
        import datasets
        from huggingface_hub import HfApi, constants

        if self.files:
            by = {"sample_by": "document" if self.separator is None else "paragraph"}
            how: dict[str, Any] = by if self.kind == "text" else {}
            return datasets.load_dataset(
                self.kind, data_files=self.files, split="train", streaming=True, **how
            )
        # Streaming asks the hub which files there are; what was downloaded earlier is found only without.
        streaming = not constants.HF_HUB_OFFLINE
        self.commit = start.get("commit") or self.commit
        if self.commit is None and streaming and not os.path.isdir(self.path):
            self.commit = HfApi().dataset_info(self.path, revision=self.revision).sha
        revision = self.commit or self.revision
        rows: Any = datasets.load_dataset(
            self.path, self.subset, split=self.split, revision=revision, streaming=streaming
        )
        return rows if streaming else rows.to_iterable_dataset()

    def _rows(self, rows: Any, read: int) -> Iterator[Row]:
        features = getattr(rows, "features", None) or {}
        try:
            for values in rows:
                if self.kind == "text" and not values["text"].strip():
                    continue
                read += 1
                plain = {name: _unfilled(value, features.get(name)) for name, value in values.items()}
                yield Row(f"{self.path!r} row {read}", plain)
        # As above: a connection that is lost in the middle shows as errors of many packages.
        except Exception as error:
            raise ValueError(self._failure(error, read)) from error

    def _failure(self, error: Exception, rows: int) -> str:
        """The text of an error after so many rows, with the next step."""
        said = next(iter(str(error).strip().splitlines()), "no message")[:300]
        what = f"data.path={self.path} (data.source={self.kind})"
        why = f"({type(error).__name__}: {said})"
        if self.files:
            return f"{what} cannot be read {why}: a file is damaged, cut short, or of another kind."
        if rows:
            return (
                f"{what} broke off after {rows} rows {why}. Start the command again: the run goes on from "
                "its last checkpoint. If it happens again, download the data and use data.source=parquet."
            )
        return (
            f"{what} cannot be loaded {why}. Check its name, data.subset={self.subset!r}, "
            f"data.split={self.split!r}, data.revision={self.revision!r}, the network, and that "
            "HF_HUB_OFFLINE is not set; a private or gated one needs HF_TOKEN or `hf auth login`; of one "
            "with a loading script take data.revision=refs/convert/parquet. Without a network: download it "
            "(hf download --repo-type dataset NAME), and set data.source=parquet or jsonl and data.path to "
            "that folder."
        )


def _unfilled(value: Any, feature: Any) -> Any:
    """A value of Arrow without the fields inside it that are None; the value itself may be.

    Arrow gives every object of a column all the fields that any has, and a field that is absent reads as
    None. An author's null cannot be told from it, and goes too. What is stored as JSON is left as it is.
    """
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


def local_paths(path: str, kind: str) -> list[Path]:
    """Returns the files of a kind that a path stands for, by name: a file, a folder (all files of the kind in
    it and below, but hidden ones) or a pattern (`data/*.jsonl`, `data/**/*.txt`).

    Raises:
        FileNotFoundError: there is none.
        ValueError: one is empty.
    """
    place = Path(path)
    if place.is_file():
        found = [place]
    elif place.is_dir():
        found = [
            file
            for file in place.rglob("*")
            if file.is_file()
            and file.name.lower().endswith(ENDINGS[kind])
            and not any(part.startswith(".") for part in file.relative_to(place).parts)
        ]
    else:
        matches = glob.glob(str(place), recursive=True) if glob.has_magic(path) else []
        found = [Path(match) for match in matches if Path(match).is_file()]
    if not found:
        near = [file.name for file in place.parent.iterdir()] if place.parent.is_dir() else []
        raise FileNotFoundError(
            f"no such data file: {path}{suggest(place.name, near)}. Set data.path to a {ENDINGS[kind][0]} "
            f"file, a folder of them, or a pattern; relative paths start at {str(Path.cwd())!r}."
        )
    if empty := [str(file) for file in found if not file.stat().st_size]:
        raise ValueError(f"empty data set: {empty[0]!r} holds nothing. Remove it, or write it again.")
    return sorted(found, key=str)
