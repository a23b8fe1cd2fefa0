"""Rows come whole or not at all: files of every kind, a stubbed hub, and each way in which it may fail."""

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest

from retain.eval.tasks.hub_rows import RowSource, load_rows, row_at
from tests.refused import refused

ROWS = [{"input": f"q{i}", "answers": [f"a {i}"], "line": "one\u2028two"} for i in range(3)]


def load(path: Path | str | None = None, *columns: str, **how: Any) -> list[Any]:
    names, where = ("trec", "data/trec"), None if path is None else str(path)
    return [*load_rows(RowSource(names, "THUDM/LongBench", columns or ("input",), path=where, **how))]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data/trec.jsonl", lines)
    else:
        path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["trec.jsonl", "data/trec.jsonl", "trec.json", "trec.parquet"])
def test_a_file_is_found_in_a_folder_and_by_itself(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name)
    assert load(tmp_path, "input", "answers") == ROWS
    assert load(path) == ROWS


def test_a_zip(tmp_path: Path) -> None:
    assert load(write(tmp_path / "data.zip")) == ROWS


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "trec.jsonl")
    assert len(load(path)) == 3
    write(path, ROWS[:1])
    os.utime(path, (1, 1))
    assert len(load(path)) == 1


def test_a_missing_column_is_named_with_what_there_is(tmp_path: Path) -> None:
    path = write(tmp_path / "trec.jsonl", [*ROWS, {"input": "q", "answer": "a"}])
    with pytest.raises(
        ValueError,
        match=r"no column 'answers' \(did you mean 'answer'\?\) in row 3; needed input, answers, found",
    ):
        load(path, "input", "answers")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    refused(r"no file or folder '.*nowhere'; wanted one that holds trec\.jsonl", load, tmp_path / "nowhere")
    (tmp_path / "other.txt").write_text("")
    refused(r"has none of trec\.jsonl, .*data/trec\.parquet; it has other\.txt", load, tmp_path)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/lsht.jsonl", "")
    refused(r"holds none of trec, data/trec .*; it holds data/lsht\.jsonl", load, tmp_path / "data.zip")
    refused(r"ends in '\.txt'; rows are read from \.jsonl", load, tmp_path / "other.txt")
    refused(r"item 3 of .* it has 3 items \(0 to 2\)", row_at, ROWS, 3, "it")


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("trec.jsonl", '{"input": 1}\n\n{"input": ', r"trec\.jsonl, line 3, is not JSON"),
        ("trec.json", '[{"input": 1},\n}]', r"trec\.json, line 2, is not JSON"),
        ("trec.json", '{"input": 1}', r"is to be a list of objects, one per item; it is dict"),
        ("trec.jsonl", "[1]\n", r"is to be a list of objects"),
        ("trec.jsonl", "\n", r"has no rows"),
        ("trec.parquet", "not parquet", r"does not read as Parquet"),
        ("data.zip", "not a zip", r"is not a zip"),
    ],
)
def test_broken_files_are_refused(name: str, text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    refused(match, load, tmp_path / name)


def test_a_file_of_the_hub_is_fetched_at_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(hub: str, file: str, **how: Any) -> str:
        asked.append((hub, file, how))
        return str(write(tmp_path / "data.zip"))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load(file="data.zip", revision="abc") == ROWS
    assert asked == [("THUDM/LongBench", "data.zip", {"repo_type": "dataset", "revision": "abc"})]


def test_an_unreachable_hub_says_why_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"LongBench/data\.zip \(revision newest\) could not be had from the hub: \w+: .*path=FILE",
    ):
        load(file="data.zip")


class Table(list[dict[str, Any]]):
    """As a table of `datasets`: rows by index, columns known by name."""

    column_names = ("input", "answers")


def test_a_table_of_the_hub(hub: Any) -> None:
    asked = hub(lambda *names: Table(ROWS))
    wanted = {"config": "main", "split": "validation", "revision": "1"}
    assert load(**wanted) == ROWS
    assert asked == [("THUDM/LongBench", "main", {"split": "validation", "revision": "1"})]
    refused("THUDM/LongBench/main/validation has no column 'length' in row 0", load, None, "length", **wanted)


@pytest.mark.parametrize(
    "error", [ConnectionError("no route"), FileNotFoundError("gone"), ValueError("no config")]
)
def test_a_table_that_cannot_be_had(error: Exception, hub: Any) -> None:
    hub(Mock(side_effect=error))
    refused(rf"could not be had from the hub: {type(error).__name__}: {error}\. With", load)


def test_without_the_package_a_file_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(r"package datasets, .*pip install 'retain-kv\[eval\]', or give a file: path=", load)
