"""Rows: read in order from files and the hub, from any position on; damage ends in an error that helps."""

import gzip
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.train.data.corpora import load_corpus
from retain.train.data.corpus import Corpus
from retain.train.data.settings import DataSettings
from retain.train.data.sources import Cursor, Hub, LocalFiles, Source, local_paths
from tests.refused import refused
from tests.train.made import encode_letters

ROWS = [{"id": i, "text": f"row {i}", "other": [i]} for i in range(150)]


def write_jsonl(folder: Path) -> Source:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS[:70]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS[70:]))
    return LocalFiles(str(folder), "jsonl")


def write_parquet(folder: Path) -> Source:
    import pyarrow
    import pyarrow.parquet

    for name, rows in (("a", ROWS[:70]), ("b", ROWS[70:])):
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=30)
    return LocalFiles(str(folder), "parquet")


def write_text(folder: Path) -> Source:
    for name, rows in (("a", ROWS[:70]), ("b", ROWS[70:])):
        (folder / f"{name}.txt").write_text("\n\n\n".join(row["text"] for row in rows))
    return LocalFiles(str(folder / "*.txt"), "text", separator="")


def write_hub(folder: Path) -> Source:
    """The hub's own reader, on a folder: everything is made ready first, as without a network."""
    write_jsonl(folder)
    return Hub(str(folder), None, "train", None)


class Streamed(Hub):
    """The same as with a network: read as it comes."""

    def open(self, state: Mapping[str, Any] | None = None) -> Cursor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
            return super().open(state)


def write_streamed(folder: Path) -> Source:
    write_jsonl(folder)
    return Streamed(str(folder), None, "train", None)


WRITERS: dict[str, Callable[[Path], Source]] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "text": write_text,
    "hub": write_hub,
    "streamed": write_streamed,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Source]]:
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield {kind: write(tmp_path_factory.mktemp(kind)) for kind, write in WRITERS.items()}


@pytest.mark.parametrize("kind", WRITERS)
def test_rows_are_read_in_order(sources: dict[str, Source], kind: str) -> None:
    rows = list(sources[kind].open())
    assert [row.values["text"] for row in rows] == [row["text"] for row in ROWS]
    if kind != "text":
        assert [dict(row.values) for row in rows] == ROWS
        assert set(rows[0].columns) == {"id", "text", "other"}
    json.dumps(sources[kind].describe())


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=12, deadline=None)
@given(stops=st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_reading_goes_on_from_any_position(sources: dict[str, Source], kind: str, stops: list[int]) -> None:
    read: list[str] = []
    state = None
    for stop in stops:
        cursor = sources[kind].open(state)
        read += [row.values["text"] for row in islice(cursor, stop)]
        state = json.loads(json.dumps(cursor.state()))
        assert state["rows"] == len(read)
    read += [row.values["text"] for row in sources[kind].open(state)]
    assert read == [row["text"] for row in ROWS]


def test_where_rows_are_from(sources: dict[str, Source], tmp_path: Path) -> None:
    jsonl, parquet = (list(sources[kind].open()) for kind in ("jsonl", "parquet"))
    assert re.search(r"a\.jsonl line 3$", jsonl[1].where) and re.search(
        r"b\.jsonl\.gz line 1$", jsonl[70].where
    )
    assert re.search(r"b\.parquet row 2$", parquet[71].where)
    assert re.search(r"a\.txt document 2$", list(sources["text"].open())[1].where)


def test_parquet_reads_only_the_columns_that_are_wanted(sources: dict[str, Source]) -> None:
    assert isinstance(sources["parquet"], LocalFiles)
    folder = str(sources["parquet"].paths[0].parent)
    row = next(LocalFiles(folder, "parquet", wanted=["text"]).open())
    assert (dict(row.values), row.columns) == ({"text": "row 0"}, ("id", "text", "other"))
    assert dict(next(LocalFiles(folder, "parquet", wanted=["txet"]).open()).values) == ROWS[0]


@pytest.mark.parametrize(
    ("separator", "wanted"),
    [
        (None, ["one\n \ntwo\n---\nthree<s>four\n"]),
        ("", ["one", "two\n---\nthree<s>four"]),
        ("---", ["one\n \ntwo", "three<s>four"]),
        ("<s>", ["one\n \ntwo\n---\nthree", "four"]),
    ],
    ids=["whole", "blank", "line", "inline"],
)
def test_documents_of_a_text_file(tmp_path: Path, separator: str | None, wanted: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n \r\ntwo\r\n---\r\nthree<s>four\r\n")
    rows = list(LocalFiles(str(path), "text", separator=separator).open())
    assert [row.values["text"] for row in rows] == wanted
    path.write_text("x<s>y<s><s>z")
    assert len(list(LocalFiles(str(path), "text", separator="<s>").open())) == 3


def test_files_are_found_by_name_folder_and_pattern(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.ndjson", "d.json", ".hidden.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    for hidden in (".git/e.jsonl", "sub/.ipynb_checkpoints/c-checkpoint.jsonl"):
        (tmp_path / hidden).parent.mkdir()
        (tmp_path / hidden).write_text("{}\n")

    def found(path: str) -> list[str]:
        return [str(file.relative_to(tmp_path)) for file in local_paths(str(tmp_path / path), "jsonl")]

    assert found("d.json") == ["d.json"]
    assert found("") == ["a.jsonl", "b.jsonl", "sub/c.ndjson"]
    assert found("*.json*") == ["a.jsonl", "b.jsonl", "d.json"]
    assert found("**/*.ndjson") == ["sub/c.ndjson"]
    with pytest.raises(
        FileNotFoundError, match=r"no such data file: .*aa.jsonl \(did you mean 'a.jsonl'\?\)"
    ):
        found("aa.jsonl")
    with pytest.raises(FileNotFoundError, match=r"holds none that ends in .parquet \(it holds .*\.json"):
        local_paths(str(tmp_path), "parquet")
    with pytest.raises(FileNotFoundError, match="no such data file"):
        found("*.csv")


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
        ("d.jsonl", b"{not json\n", "d.jsonl line 1 is not JSON: .*Wanted one object a line"),
        ("d.jsonl", GOOD + b'{"text": "cut', "line 2 is not JSON: .*written by a job that was stopped"),
        ("d.jsonl", GOOD + b"[1, 2]\n", r"line 2: wanted an object, got list.*jq -c '\.\[\]' d.jsonl"),
        ("d.jsonl", GOOD + b'{"text": "\xe9t\xe9"}\n', "line 2 is not text: byte 10 .*, 0xe9, is no UTF-8"),
        ("d.jsonl", GOOD + b"\0\1\2\n", "line 2 is not text: byte 0 of the line is zero.*binary"),
        ("d.jsonl", b"PAR1\x15\x04\0\0", "it is a parquet file: set data.source=parquet"),
        ("d.jsonl", gzip.compress(GOOD), "it is compressed: give it a name that ends in .gz"),
        ("d.jsonl", '{"text": "a"}'.encode("utf-16"), "it is UTF-16: run iconv"),
        ("d.jsonl.gz", gzip.compress(GOOD * 50)[:-12], "d.jsonl.gz is damaged or was cut short"),
        ("d.jsonl.gz", GOOD, "d.jsonl.gz is damaged or was cut short"),
        ("d.txt", b" \n ", "empty data set: '.*d.txt' holds nothing"),
        ("d.txt", b"good\nGIF89a\x00\xff", "d.txt line 2 is not text"),
        (
            "d.jsonl",
            GOOD + b'{"context_ids": [' + b"7" * 5000 + b"]}\n",
            "line 2 holds a number that cannot be",
        ),
        (
            "d.jsonl",
            GOOD + b'{"text": "caf\\ud83d"}\n',
            r"line 2: text holds half of a character, \\ud83d at place 3",
        ),
        ("d.parquet", b"", "empty data set: '.*d.parquet' holds nothing"),
        ("d.parquet", GOOD, "d.parquet is no readable parquet file"),
    ],
    ids=range(17),
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    source = {"txt": "text", "parquet": "parquet"}.get(name.rpartition(".")[2], "jsonl")
    refused(message, read, path, source)


def test_a_parquet_file_that_was_cut_short(tmp_path: Path) -> None:
    write_parquet(tmp_path)
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    refused("b.parquet is no readable parquet file .*cut short", read, tmp_path, "parquet")
    # The end is whole, and rows in the middle are not: found when they are read.
    (tmp_path / "b.parquet").write_bytes(whole[:4] + bytes(1500) + whole[1504:])
    refused("b.parquet is no readable parquet file", read, tmp_path, "parquet")


def test_packages_are_named_where_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "a.txt").write_bytes(b"good")
    assert read(tmp_path).train == read(tmp_path, "text").train, "these need none"
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    refused(r"needs the package pyarrow, .*pip install 'retain-kv\[train\]'", read, tmp_path, "parquet")
    refused("needs the package datasets", load, HUB)


# The hub.


class Stream(list):
    """What datasets gives, without a state of its own."""

    def skip(self, count: int) -> "Stream":
        return Stream(self[count:])


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def fake_hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Callable[..., Any]) -> None:
    """Stands in for `datasets`; a revision is its own commit, and the newest is `newest`."""
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))

    def dataset_info(api: Any, path: str, *, revision: str | None) -> Any:
        return types.SimpleNamespace(sha=revision or "newest")

    monkeypatch.setattr(HfApi, "dataset_info", dataset_info)


HUB = DataSettings(source="hub", path="o/n", revision="abc", documents=4, held_out=0, min_tokens=1)


def test_hub_data_sets_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, online: None) -> None:
    asked: dict[str, Any] = {}

    def load_dataset(path: str, subset: str | None, **settings: object) -> Stream:
        asked.update(settings, path=path, subset=subset)
        return Stream({"text": f"document {i}"} for i in range(9))

    fake_hub(monkeypatch, load_dataset)
    corpus = load(HUB)
    assert len(corpus.train) == 4 and corpus.train[2].origin == "'o/n' row 3"
    assert corpus.commit == "abc"
    assert asked == {"path": "o/n", "subset": None, "split": "train", "revision": "abc", "streaming": True}
    cursor = Hub("o/n", None, "train", "abc").open()
    rows = [next(cursor) for _ in range(5)]
    assert cursor.state() == {"rows": 5, "commit": "abc"} and len(rows) == 5
    assert next(Hub("o/n", None, "train", "abc").open(cursor.state())).values == {"text": "document 5"}


def test_the_state_that_datasets_keeps_is_used(monkeypatch: pytest.MonkeyPatch, online: None) -> None:
    """It knows which file to open; to skip rows would be to download them again."""

    class Stateful:
        def __init__(self) -> None:
            self.place = 0

        def __iter__(self) -> Iterator[dict[str, str]]:
            while True:
                self.place += 1
                yield {"text": f"document {self.place - 1}"}

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.place = state["place"]

    fake_hub(monkeypatch, lambda *arguments, **settings: Stateful())
    source = Hub("o/n", None, "train", None)
    cursor = source.open()
    assert len(list(islice(cursor, 5))) == 5
    assert cursor.state() == {"rows": 5, "commit": "newest", "datasets": {"place": 5}}
    assert next(source.open(cursor.state())).values == {"text": "document 5"}
    # Nothing was read since: the state is the one that was given.
    assert source.open(cursor.state()).state() == cursor.state()


class DatasetNotFoundError(FileNotFoundError):
    """As datasets calls it."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("no route"), r"cannot be reached \(ConnectionError: no route\). Check the network"),
        (DatasetNotFoundError("gone"), r"cannot be loaded \(DatasetNotFoundError: gone\).*HF_TOKEN"),
        (ValueError('Unknown split "tarin"'), r"cannot be loaded .*tarin.*data.split='train'"),
        (RuntimeError("Dataset scripts are no longer supported"), "refs/convert/parquet"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_the_hub_refuses(
    monkeypatch: pytest.MonkeyPatch, online: None, error: Exception, message: str
) -> None:
    def load_dataset(*arguments: Any, **settings: Any) -> Stream:
        raise error

    fake_hub(monkeypatch, load_dataset)
    with pytest.raises(ValueError, match=message) as caught:
        load(HUB)
    assert caught.value.__cause__ is error


def test_a_hub_that_breaks_off(monkeypatch: pytest.MonkeyPatch, online: None) -> None:
    def rows() -> Any:
        yield from ({"text": f"document {i}"} for i in range(3))
        raise ConnectionError("reset by peer")

    fake_hub(monkeypatch, lambda *arguments, **settings: rows())
    refused(r"'o/n' broke off after 3 rows \(ConnectionError: reset.*from its last checkpoint", load, HUB)


def test_what_a_row_would_lose_is_refused(tmp_path: Path) -> None:
    """Of a key or a column that is there twice, one value would be taken without a word."""
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "d.jsonl"
    for row in ('{"text": "a", "text": "b"}', '{"messages": [{"role": "user", "role": "tool"}]}'):
        path.write_text('{"text": "fine"}\n' + row + "\n")
        with pytest.raises(ValueError, match=r"d.jsonl line 2 gives the key '(text|role)' twice"):
            list(LocalFiles(str(path), "jsonl").open())
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    pyarrow.parquet.write_table(pyarrow.table(columns, names=["text", "text"]), tmp_path / "d.parquet")
    with pytest.raises(ValueError, match="d.parquet has the column 'text' twice"):
        list(LocalFiles(str(tmp_path / "d.parquet"), "parquet").open())


def test_what_is_no_file_is_called_what_it_is(tmp_path: Path) -> None:
    """Every kind of it: tests/test_config.py."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    said = "data file .* is a named pipe, and a file is wanted. Set data.path"
    with pytest.raises(FileNotFoundError, match=said):
        local_paths(str(tmp_path / "pipe.jsonl"), "jsonl")
