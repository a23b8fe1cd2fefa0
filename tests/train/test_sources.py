"""Rows: read in order from files and the hub, from any position on; damage ends in an error that helps."""

import json
import sys
import types
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from hypothesis import given, settings
from hypothesis import strategies as st

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
        elif kind == "text":
            for row in rows[:40]:
                (folder / f"{row['id']:03d}.txt").write_text(row["text"])
        else:
            lines = "".join(json.dumps(row) + "\n\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """`hub`: the hub's loader, on a folder, as it works without a network."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield {kind: write(tmp_path_factory.mktemp(kind), kind) for kind in ("parquet", "text", "hub")}


@pytest.mark.parametrize("kind", ["parquet", "text", "hub"])
@settings(max_examples=8, deadline=None)
@given(stops=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_reading_goes_on_from_any_position(folders: dict[str, Path], kind: str, stops: list[int]) -> None:
    read: list[dict[str, Any]] = []
    state = None
    for stop in stops:
        source = Dataset(kind, str(folders[kind]))
        found = [dict(row.values) for row in islice(source.rows(state), stop)]
        read += found
        if found:
            state = json.loads(json.dumps(source.state()))
        assert state["rows"] == len(read)
    read += [dict(row.values) for row in Dataset(kind, str(folders[kind])).rows(state)]
    texts = [{"text": row["text"]} for row in ROWS[:40] + ROWS[70:110]]
    assert read == (texts if kind == "text" else ROWS)


def test_where_rows_are_from(tmp_path: Path, folders: dict[str, Path]) -> None:
    rows = list(read_jsonl(str(write(tmp_path, "jsonl"))))
    assert [row.values for row in rows] == ROWS
    assert rows[1].where.endswith("a.jsonl line 3") and rows[70].where.endswith("b.jsonl line 1")
    assert list(Dataset("parquet", str(folders["parquet"])).rows())[71].where.endswith("row 72")


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo\r\n---\r\nthree\r\n")
    (row,) = Dataset("text", str(tmp_path / "a.txt")).rows()
    assert row.values["text"] == "one\n\ntwo\n---\nthree\n"


def test_files_are_found_by_name_folder_and_pattern(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "d.json", ".hidden.jsonl", ".git/e.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")

    def found(path: str) -> list[str]:
        return [str(file.relative_to(tmp_path)) for file in local_paths(str(tmp_path / path), "jsonl")]

    assert found("d.json") == ["d.json"]
    assert found("") == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert found("*.json*") == ["a.jsonl", "b.jsonl", "d.json"]
    assert found("**/c*.jsonl") == ["sub/c.jsonl"]
    with pytest.raises(FileNotFoundError, match=r"no such data file: .*aa.jsonl \(did you mean 'a.jsonl'"):
        found("aa.jsonl")
    with pytest.raises(FileNotFoundError, match="Set data.path to a .parquet file"):
        local_paths(str(tmp_path), "parquet")


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
        ("d.txt", b"good\nGIF89a\x00\xff", "d.txt .*cannot be read .*a file is damaged"),
        ("d.parquet", b"", "empty data set: '.*d.parquet' holds nothing"),
        ("d.parquet", GOOD, "d.parquet .*cannot be read .*a file is damaged, cut short, or of another kind"),
    ],
    ids=range(9),
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    source = {"txt": "text", "parquet": "parquet"}.get(name.rpartition(".")[2], "jsonl")
    refused(message, read, path, source)


def test_a_parquet_file_that_was_cut_short_or_damaged_inside(tmp_path: Path) -> None:
    write(tmp_path, "parquet")
    whole = (tmp_path / "b.parquet").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:4] + bytes(1500) + whole[1504:]):
        (tmp_path / "b.parquet").write_bytes(damaged)
        refused("cannot be read .*: a file is damaged, cut short", read, tmp_path, "parquet")


def test_packages_are_named_where_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "a.txt").write_bytes(b"good")
    assert len(read(tmp_path).train) == 1, "jsonl needs none"
    for source in ("text", "hub"):
        refused(r"needs the package datasets, .*pip install 'retain-kv\[train\]'", read, tmp_path, source)


# The hub.


class Stream(list):
    """The stream that datasets gives, whose state is its place."""

    place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(self):
            self.place += 1
            if isinstance(row := self[self.place - 1], Exception):
                raise row
            yield row

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Stands in for `datasets`; a revision is its own commit, and the newest is `newest`."""
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

        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
        return asked

    return begin


HUB = DataSettings(source="hub", path="o/n", revision="abc", documents=4, held_out=0, min_tokens=1)


def test_a_hub_data_set_is_read_at_one_commit_from_its_state_on(hub: Callable[..., list[Any]]) -> None:
    asked = hub(*({"text": f"document {i}"} for i in range(9)))
    corpus = load(HUB)
    assert len(corpus.train) == 4 and corpus.train[2].origin == "'o/n' row 3"
    assert corpus.commit == "abc"
    assert asked == [(("o/n", None), {"split": "train", "revision": "abc", "streaming": True})]
    source = Dataset("hub", "o/n")
    assert len(list(islice(source.rows(), 5))) == 5
    state = source.state()
    assert state == {"rows": 5, "commit": "newest", "datasets": {"place": 5}}
    later = Dataset("hub", "o/n")
    assert next(later.rows(state)).values == {"text": "document 5"}
    assert asked[-1][1]["revision"] == "newest", "the commit that was read, not the branch of today"
    assert later.state() == {"rows": 6, "commit": "newest", "datasets": {"place": 6}}


@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError('Unknown split "tarin"')])
def test_a_hub_data_set_that_cannot_be_loaded(hub: Callable[..., list[Any]], error: Exception) -> None:
    hub(error)
    with pytest.raises(ValueError, match=rf"behind row 0 .*{error}.*data.split='train'.*HF_TOKEN") as caught:
        load(HUB)
    assert caught.value.__cause__ is error


def test_a_hub_that_breaks_off(hub: Callable[..., list[Any]]) -> None:
    hub(*({"text": f"document {i}"} for i in range(3)), ConnectionError("reset by peer"))
    refused(r"o/n .* behind row 3 \(ConnectionError: reset.*from its last checkpoint", load, HUB)
