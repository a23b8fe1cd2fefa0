"""Rows: read in order from files and the hub, from any position on; damage ends in an error that helps."""

import gzip
import json
import re
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
from retain.train.data.sources import Dataset, JsonLines, Source, local_paths
from tests.refused import refused
from tests.train.made import encode_letters

ROWS = [{"id": i, "text": f"row {i}", "other": [i]} for i in range(150)]


def write_jsonl(folder: Path) -> Source:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS[:70]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS[70:]))
    return JsonLines(str(folder))


def write_parquet(folder: Path) -> Source:
    import pyarrow
    import pyarrow.parquet

    for name, rows in (("a", ROWS[:70]), ("b", ROWS[70:])):
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=30)
    return Dataset("parquet", str(folder))


def write_text(folder: Path) -> Source:
    (folder / "a.txt").write_text("\n\n\n".join(row["text"] for row in ROWS[:70]))
    with gzip.open(folder / "b.txt.gz", "wt") as file:
        file.write("\n\n".join(row["text"] for row in ROWS[70:]))
    return Dataset("text", str(folder / "*.txt*"), separator="")


def write_hub(folder: Path) -> Source:
    """The hub's loader, on a folder, as it works without a network."""
    write_jsonl(folder)
    return Dataset("hub", str(folder))


WRITERS: dict[str, Callable[[Path], Source]] = {
    **{"jsonl": write_jsonl, "parquet": write_parquet, "text": write_text, "hub": write_hub}
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Source]]:
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield {kind: write(tmp_path_factory.mktemp(kind)) for kind, write in WRITERS.items()}


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=8, deadline=None)
@given(stops=st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_reading_goes_on_from_any_position(sources: dict[str, Source], kind: str, stops: list[int]) -> None:
    read: list[dict[str, Any]] = []
    state = None
    for stop in stops:
        cursor = sources[kind].open(state)
        read += [dict(row.values) for row in islice(cursor, stop)]
        state = json.loads(json.dumps(cursor.state()))
        assert state["rows"] == len(read)
    read += [dict(row.values) for row in sources[kind].open(state)]
    assert read == ([{"text": row["text"]} for row in ROWS] if kind == "text" else ROWS)
    json.dumps(sources[kind].describe())


def test_where_rows_are_from(sources: dict[str, Source]) -> None:
    jsonl, parquet = (list(sources[kind].open()) for kind in ("jsonl", "parquet"))
    assert re.search(r"a\.jsonl line 3$", jsonl[1].where)
    assert re.search(r"b\.jsonl\.gz line 1$", jsonl[70].where)
    assert parquet[71].where.endswith("row 72")


@pytest.mark.parametrize(
    ("separator", "wanted"), [(None, ["one\n\ntwo\n---\nthree\n"]), ("", ["one", "two\n---\nthree"])]
)
def test_documents_of_a_text_file(tmp_path: Path, separator: str | None, wanted: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n\r\ntwo\r\n---\r\nthree\r\n")
    rows = list(Dataset("text", str(path), separator=separator).open())
    assert [row.values["text"].rstrip("\n") for row in rows] == [text.rstrip("\n") for text in wanted]


def test_files_are_found_by_name_folder_and_pattern(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.ndjson", "d.json", ".hidden.jsonl", ".git/e.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")

    def found(path: str) -> list[str]:
        return [str(file.relative_to(tmp_path)) for file in local_paths(str(tmp_path / path), "jsonl")]

    assert found("d.json") == ["d.json"]
    assert found("") == ["a.jsonl", "b.jsonl", "sub/c.ndjson"]
    assert found("*.json*") == ["a.jsonl", "b.jsonl", "d.json"]
    assert found("**/*.ndjson") == ["sub/c.ndjson"]
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
        ("d.jsonl", b"\n \n", r"empty data set: '.*d.jsonl' holds nothing. Remove"),
        ("d.jsonl", GOOD + b'{"text": "cut', "line 2 is not JSON: .*written by a job that was stopped"),
        ("d.jsonl", GOOD + b"[1, 2]\n", r"line 2: wanted an object such as .*, got list"),
        ("d.jsonl", GOOD + b'{"text": "\xe9t\xe9"}\n', "line 2 is not JSON: .*0xe9.*in UTF-8"),
        ("d.jsonl", GOOD + b'{"text": "a", "text": "b"}\n', "line 2 is not JSON: it gives the key 'text' tw"),
        ("d.jsonl.gz", gzip.compress(GOOD * 50)[:-12], "d.jsonl.gz is damaged, cut short or not readable"),
        ("d.jsonl.gz", GOOD, "d.jsonl.gz is damaged, cut short or not readable"),
        ("d.jsonl", GOOD + b'{"text": "caf\\ud83d"}\n', r"line 2: text holds half of a character, \\ud83d"),
        ("d.txt", b"good\nGIF89a\x00\xff", "d.txt .*cannot be read .*a file is damaged"),
        ("d.txt", b"\n\n\n", "empty data set: .* gives 0 documents"),
        ("d.parquet", b"", "empty data set: '.*d.parquet' holds nothing"),
        ("d.parquet", GOOD, "d.parquet .*cannot be read .*a file is damaged, cut short, or of another kind"),
    ],
    ids=range(13),
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    source = {"txt": "text", "parquet": "parquet"}.get(name.rpartition(".")[2], "jsonl")
    refused(message, read, path, source)


def test_a_parquet_file_that_was_cut_short_or_damaged_inside(tmp_path: Path) -> None:
    write_parquet(tmp_path)
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
    cursor = source.open()
    assert len(list(islice(cursor, 5))) == 5
    assert cursor.state() == {"rows": 5, "commit": "newest", "datasets": {"place": 5}}
    later = Dataset("hub", "o/n").open(cursor.state())
    assert asked[-1][1]["revision"] == "newest", "the commit that was read, not the branch of today"
    assert later.state() == cursor.state(), "nothing was read since"
    assert next(later).values == {"text": "document 5"}


@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError('Unknown split "tarin"')])
def test_a_hub_data_set_that_cannot_be_loaded(hub: Callable[..., list[Any]], error: Exception) -> None:
    hub(error)
    with pytest.raises(
        ValueError, match=rf"cannot be loaded .*{error}.*data.split='train'.*HF_TOKEN"
    ) as caught:
        load(HUB)
    assert caught.value.__cause__ is error


def test_a_hub_that_breaks_off(hub: Callable[..., list[Any]]) -> None:
    hub(*({"text": f"document {i}"} for i in range(3)), ConnectionError("reset by peer"))
    refused(r"o/n .* broke off after 3 rows \(ConnectionError: reset.*from its last checkpoint", load, HUB)
