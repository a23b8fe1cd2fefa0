"""Reads rows from local files and from data sets of the hub, in one fixed order: files by name, rows as they
lie.

jsonl is read by hand and needs no package: a damaged line is named. Local folders of other files and the hub
go through `datasets`, which streams them.
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
    for file in local_paths(path):
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
    """Rows that `datasets` streams: a data set of the hub, or the files of a local folder.

    A hub revision is a commit, a branch or a tag, resolved once, so that every pass reads the same commit.
    Where HF_HUB_OFFLINE is set, the local cache is read.

    Attributes:
        commit: of a hub data set, the one that is read, once it was opened; None: not known, or a folder.
    """

    def __init__(
        self, path: str, *, subset: str | None = None, split: str = "train", revision: str | None = None
    ) -> None:
        self.path, self.subset, self.split, self.revision = path, subset, split, revision
        self.commit: str | None = None

    def rows(self) -> Iterator[Row]:
        """Yields all rows; ValueError: it cannot be loaded, or a row cannot be read."""
        require("train", "datasets", what="data.source=hub")
        read = 0
        try:
            for read, values in enumerate(self._loaded(), start=1):
                yield Row(f"{self.path!r} row {read}", values)
        # Errors of transports and loaders of many packages, without a common ancestor.
        except Exception as error:
            raise ValueError(self._failure(error, read)) from error

    def _loaded(self) -> Any:
        import datasets
        from huggingface_hub import HfApi, constants

        local = os.path.isdir(self.path)
        # Streaming asks the hub which files there are; what was downloaded earlier is found only without.
        streaming = local or not constants.HF_HUB_OFFLINE
        if self.commit is None and streaming and not local:
            self.commit = HfApi().dataset_info(self.path, revision=self.revision).sha
        how = {"split": self.split, "revision": self.commit or self.revision, "streaming": streaming}
        return datasets.load_dataset(self.path, self.subset, **how)

    def _failure(self, error: Exception, read: int) -> str:
        """The text of an error behind some rows that were read, with the next step."""
        said = next(iter(str(error).strip().splitlines()), "no message")[:300]
        problem = f"data.path={self.path} cannot be read behind row {read} ({type(error).__name__}: {said})"
        if os.path.isdir(self.path):
            return f"{problem}: a file in it is damaged, cut short, or not of the other files' kind."
        return (
            f"{problem}. Start the command again, and the run goes on from its last checkpoint; or check the "
            f"name, data.subset={self.subset!r}, data.split={self.split!r}, data.revision={self.revision!r} "
            "and the network: a private or gated one needs HF_TOKEN or `hf auth login`, one with a loading "
            "script data.revision=refs/convert/parquet; one that was downloaded is read by data.path=FOLDER."
        )


def local_paths(path: str) -> list[Path]:
    """Returns the files of jsonl that a path stands for, by name: a file, a folder (all in it and below, but
    hidden ones) or a pattern (`data/*.jsonl`, `data/**/*.jsonl`).

    Raises:
        FileNotFoundError: there is none.
        ValueError: one is empty.
    """
    place = Path(path)
    pattern = f"{glob.escape(str(place))}/**/*.jsonl" if place.is_dir() else path
    found = [place] if place.is_file() else [*map(Path, sorted(glob.glob(pattern, recursive=True)))]
    if not found:
        near = [file.name for file in place.parent.iterdir()] if place.parent.is_dir() else []
        raise FileNotFoundError(
            f"no such data file: {path}{suggest(place.name, near)}. Set data.path to a .jsonl file, a folder "
            f"of them, or a pattern; relative paths start at {str(Path.cwd())!r}."
        )
    if empty := [str(file) for file in found if not file.stat().st_size]:
        raise ValueError(f"empty data set: {empty[0]!r} holds nothing. Remove it, or write it again.")
    return found
