"""Reads rows from local files and from data sets of the hub, in one fixed order: files by name, rows as they
lie.

jsonl is read by hand and needs no package: a damaged line is named. Parquet, text files and the hub go
through `datasets`, which streams them: a small JSON state is enough to go on behind any row.
"""

import glob
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retain.process.extras import require
from retain.process.registry import suggest

ENDINGS = {"jsonl": ".jsonl", "parquet": ".parquet", "text": ".txt"}


@dataclass(frozen=True)
class Row:
    """A row: where it is, for errors, and its values by column."""

    where: str
    values: Mapping[str, Any]


def read_jsonl(path: str) -> Iterator[Row]:
    """Yields the objects of local files with one JSON object a line (`local_paths` finds them).

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a line is no JSON object in UTF-8; it is named.
    """
    for file in local_paths(path, "jsonl"):
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{file} line {number}"
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"{where} is not JSON: {error}. Wanted one object a line, in UTF-8: `jq -c '.[]'` "
                        "takes an array apart; a last line that is cut short was written by a job that was "
                        "stopped."
                    ) from None
                if not isinstance(values, dict):
                    wanted = 'an object such as {"text": "..."}'
                    raise ValueError(f"{where}: wanted {wanted}, got {type(values).__name__}.")
                yield Row(where, values)


class Dataset:
    """Rows that `datasets` reads: local parquet and text files (a file is a row), or a data set of the hub.

    A hub revision is a commit, a branch or a tag. It is resolved once: every pass, and a run that goes on
    from a `state`, reads the same commit, also when the branch has moved. Where HF_HUB_OFFLINE is set, the
    local cache is read.

    Args:
        kind: `parquet`, `text` or `hub`.
        path: of local files, as `local_paths` takes it; or the name of the data set.
        subset, split, revision: of the hub data set.

    Attributes:
        files: that are read; empty for the hub.
        commit: of a hub data set, the one that is read, once it was opened; None: not known, or files.
    """

    def __init__(
        self,
        kind: str,
        path: str,
        *,
        subset: str | None = None,
        split: str = "train",
        revision: str | None = None,
    ) -> None:
        self.kind, self.path, self.subset, self.split, self.revision = kind, path, subset, split, revision
        self.files = [] if kind == "hub" else local_paths(path, kind)
        self.commit: str | None = None
        self._stream: Any = None
        self._read = 0

    def rows(self, state: Mapping[str, Any] | None = None) -> Iterator[Row]:
        """Yields all rows, or those behind the one where `state` was taken; one reader at a time.

        Raises:
            ValueError: it cannot be loaded, or a row cannot be read.
        """
        require("train", "datasets", what=f"data.source={self.kind}")
        self._read = state["rows"] if state else 0
        try:
            self._stream = self._loaded(state or {})
            if state:
                self._stream.load_state_dict(state["datasets"])
            for values in self._stream:
                self._read += 1
                yield Row(f"{self.path!r} row {self._read}", values)
        # Errors of transports and loaders of many packages, without a common ancestor.
        except Exception as error:
            raise ValueError(self._failure(error)) from error

    def state(self) -> dict[str, Any]:
        """The position behind the last row that was read, for JSON."""
        return {"rows": self._read, "commit": self.commit, "datasets": self._stream.state_dict()}

    def _loaded(self, state: Mapping[str, Any]) -> Any:
        """The stream, from its first row on."""
        import datasets
        from huggingface_hub import HfApi, constants

        if self.files:
            how: dict[str, Any] = {"sample_by": "document"} if self.kind == "text" else {}
            how |= {"data_files": [*map(str, self.files)], "split": "train", "streaming": True}
            return datasets.load_dataset(self.kind, **how)
        # Streaming asks the hub which files there are; what was downloaded earlier is found only without.
        streaming = not constants.HF_HUB_OFFLINE
        self.commit = state.get("commit") or self.commit
        if self.commit is None and streaming and not os.path.isdir(self.path):
            self.commit = HfApi().dataset_info(self.path, revision=self.revision).sha
        how = {"split": self.split, "revision": self.commit or self.revision, "streaming": streaming}
        stream: Any = datasets.load_dataset(self.path, self.subset, **how)
        return stream if streaming else stream.to_iterable_dataset()

    def _failure(self, error: Exception) -> str:
        """The text of an error, with the next step."""
        said = next(iter(str(error).strip().splitlines()), "no message")[:300]
        problem = f"data.path={self.path} (data.source={self.kind}) cannot be read behind row {self._read} "
        problem += f"({type(error).__name__}: {said})"
        if self.files:
            return f"{problem}: a file is damaged, cut short, or of another kind."
        if self._read:
            return f"{problem}: start the command again, and the run goes on from its last checkpoint."
        return (
            f"{problem}. Check its name, data.subset={self.subset!r}, data.split={self.split!r}, "
            f"data.revision={self.revision!r} and the network; a private or gated one needs HF_TOKEN or `hf "
            "auth login`; of one with a loading script take data.revision=refs/convert/parquet. Without a "
            "network download it, and set data.source=parquet or jsonl and data.path to that folder."
        )


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
    else:
        pattern = f"{glob.escape(str(place))}/**/*{ENDINGS[kind]}" if place.is_dir() else path
        found = [file for file in map(Path, sorted(glob.glob(pattern, recursive=True))) if file.is_file()]
    if not found:
        near = [file.name for file in place.parent.iterdir()] if place.parent.is_dir() else []
        raise FileNotFoundError(
            f"no such data file: {path}{suggest(place.name, near)}. Set data.path to a {ENDINGS[kind]} file, "
            f"a folder of them, or a pattern; relative paths start at {str(Path.cwd())!r}."
        )
    if empty := [str(file) for file in found if not file.stat().st_size]:
        raise ValueError(f"empty data set: {empty[0]!r} holds nothing. Remove it, or write it again.")
    return found
