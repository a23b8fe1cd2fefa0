"""Rows: read in order from files and the hub, from any position on; damage ends in an error that helps."""

import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from retain.train.data.corpus import Corpus, load_corpus
from retain.train.data.settings import DataSettings
from retain.train.data.sources import Dataset, local_paths, read_jsonl
from tests.refused import refused
from tests.train.made import encode_letters

ROWS = [{"id": i, "text": f"row {i}", "other": [i]} for i in range(150)]


def write(folder: Path, kind: str) -> Path:
    """Two files of rows."""
    import pyarrow
    import pyarrow.parquet

    for name, rows in (("a", ROWS[:70]), ("b", ROWS[70:])):
        if kind == "parquet":
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=30)
        else:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return folder


def test_rows_come_in_order_and_say_where_they_are_from(tmp_path: Path) -> None:
    for kind in ("jsonl", "parquet"):
        folder = str(write(tmp_path, kind))
        rows = list(read_jsonl(folder) if kind == "jsonl" else Dataset(folder).rows())
        assert [dict(row.values) for row in rows] == ROWS
        places = ("a.jsonl line 3", "b.jsonl line 1") if kind == "jsonl" else ("row 2", "row 71")
        assert rows[1].where.endswith(places[0]) and rows[70].where.endswith(places[1])


def test_files_are_found_by_name_folder_and_pattern(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "d.json", ".hidden.jsonl", ".git/e.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")

    def found(path: str) -> list[str]:
        return [str(file.relative_to(tmp_path)) for file in local_paths(str(tmp_path / path))]

    assert found("d.json") == ["d.json"]
    assert found("") == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert found("*.json*") == ["a.jsonl", "b.jsonl", "d.json"]
    assert found("**/c*.jsonl") == ["sub/c.jsonl"]
    with pytest.raises(FileNotFoundError, match=r"no such data file: .*aa.jsonl \(did you mean 'a.jsonl'"):
        found("aa.jsonl")
    with pytest.raises(FileNotFoundError, match="Set data.path to a .jsonl file"):
        found("*.txt")


def read(path: Path, source: Any = "jsonl", **changes: Any) -> Corpus:
    values = {"documents": 0, "held_out": 0, "min_tokens": 1, "max_tokens": 100, **changes}
    return load(DataSettings(source=source, path=str(path), **values))


def load(made: DataSettings) -> Any:
    return load_corpus(made, shortest=0, seed=0, encode=encode_letters)


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b"", r"empty data set: '.*d.jsonl' holds nothing. Remove"),
        ("d.jsonl", b"\n \n", "too few documents: .*d.jsonl' gives 0"),
        ("d.jsonl", GOOD + b'{"text": "cut', "line 2 is not JSON: .*written by a job that was stopped"),
        ("d.jsonl", GOOD + b"[1, 2]\n", r"line 2: wanted an object such as .*, got list"),
        ("d.jsonl", GOOD + b'{"text": "\xe9t\xe9"}\n', "line 2 is not JSON: .*0xe9.*in UTF-8"),
        ("d.jsonl", GOOD + b'{"text": "caf\\ud83d"}\n', "line 2: .*surrogates not allowed"),
    ],
    ids=range(6),
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    refused(message, read, path)


def test_a_folder_with_a_damaged_file(tmp_path: Path) -> None:
    write(tmp_path, "parquet")
    whole = (tmp_path / "b.parquet").read_bytes()
    for damaged in (b"", GOOD, whole[: len(whole) // 2], whole[:4] + bytes(1500) + whole[1504:]):
        (tmp_path / "b.parquet").write_bytes(damaged)
        refused("cannot be read .*: a file in it is damaged, cut short", read, tmp_path, "hub")


# The hub.


class Stream(list):
    """The stream that datasets gives."""

    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            if isinstance(row, Exception):
                raise row
            yield row


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Stands in for the loader of `datasets`; a revision is its own commit, and the newest is `newest`."""
    import datasets

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    info = types.SimpleNamespace
    monkeypatch.setattr(HfApi, "dataset_info", lambda api, path, *, revision: info(sha=revision or "newest"))

    def begin(*rows: Any) -> list[Any]:
        asked: list[Any] = []

        def load_dataset(*arguments: Any, **settings: Any) -> Stream:
            asked.append((arguments, settings))
            if rows and isinstance(rows[0], Exception):
                raise rows[0]
            return Stream(rows)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return begin


HUB = DataSettings(source="hub", path="o/n", revision="abc", documents=4, held_out=0, min_tokens=1)


def test_a_hub_data_set_is_read_at_one_commit(hub: Callable[..., list[Any]]) -> None:
    asked = hub(*({"text": f"document {i}"} for i in range(9)))
    corpus = load(HUB)
    assert len(corpus.train) == 4 and corpus.train[2].origin == "'o/n' row 3"
    assert corpus.commit == "abc"
    assert asked == [(("o/n", None), {"split": "train", "revision": "abc", "streaming": True})]
    source = Dataset("o/n")
    for _ in range(2):  # the commit that was resolved once, not the branch of today
        assert len(list(source.rows())) == 9
        assert asked[-1][1]["revision"] == source.commit == "newest"


def test_a_hub_that_cannot_be_reached_or_breaks_off(hub: Callable[..., list[Any]]) -> None:
    hub(error := ConnectionError("no route"))
    with pytest.raises(ValueError, match="behind row 0 .*no route.*data.split='train'.*HF_TOKEN") as caught:
        load(HUB)
    assert caught.value.__cause__ is error
    hub(*({"text": f"document {i}"} for i in range(3)), ConnectionError("reset by peer"))
    refused(r"o/n .* behind row 3 \(ConnectionError: reset.*from its last checkpoint", load, HUB)
