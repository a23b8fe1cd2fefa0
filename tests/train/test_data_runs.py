"""Runs on every kind of data: streams killed and resumed, and bad data that leaves the checkpoint whole."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retain.train.distill import distill, main
from retain.train.run.checkpoint import latest, read_log
from tests.train.runs import killed_at, same_gates, written

Make = Callable[..., Any]
STREAM = {"data.streaming": True, "data.shuffle_rows": 6, "data.pack_tokens": 130}


def comparable(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in read_log(folder)]


def to_parquet(path: Path, lines: list[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*map(json.loads, lines)]), path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_bad_data_leaves_the_last_checkpoint_whole(
    make_config: Make, documents_path: Path, tmp_path: Path, kind: str
) -> None:
    """A run is killed; its data is damaged; it is refused; the data is mended, and the run goes on to the
    same numbers as one that was not killed: of jsonl in memory, and of a stream of parquet."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = documents_path.read_text().splitlines(keepends=True)
    for name, part in (("a", lines[:12]), ("z", lines[12:])):
        if kind == "parquet":
            to_parquet(folder / f"{name}.parquet", part)
        else:
            (folder / f"{name}.jsonl").write_text("".join(part))
    stream = STREAM if kind == "parquet" else {}
    source = "hub" if kind == "parquet" else "jsonl"
    config = make_config(**{"data.source": source, "data.path": str(folder), **stream})
    whole = distill(replace(config, output=str(tmp_path / "whole")))
    with killed_at(6):
        distill(config)
    run, last = Path(config.output), folder / f"z.{kind}"
    kept = latest(run)
    assert kept is not None and kept[0] == 4
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    good = last.read_bytes()
    for damage, message in (
        (b"", "empty data set: '.*z.* holds nothing" if kind == "jsonl" else "a file in it is damaged"),
        (
            b'{"context_ids": [1',
            "z.jsonl line 1 is not JSON" if kind == "jsonl" else "a file in it is damaged",
        ),
    ):
        last.write_bytes(damage)
        with pytest.raises(SystemExit, match=f"error: .*{message}"):
            main(["--config", written(config, tmp_path / "c.yaml")])
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    last.write_bytes(good)
    assert same_gates(whole, distill(config))
    assert comparable(run) == comparable(whole), "losses, documents, learning rates: all digits"
