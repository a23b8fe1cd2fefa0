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


DAMAGED = {
    b"": "empty data set: '.*z.jsonl' holds nothing",
    b"\0\1\2\3": "z.jsonl line 1 is not text: byte 0 of the line is zero",
    b'{"text": "no ids"}\n': r"z.jsonl line 1 has no column 'context_ids' .*it has \['text'\]",
    b'{"context_ids": [1, 2': "z.jsonl line 1 is not JSON",
}


@pytest.mark.parametrize("streaming", [False, True], ids=["memory", "stream"])
def test_bad_data_leaves_the_last_checkpoint_whole(
    make_config: Make, documents_path: Path, tmp_path: Path, streaming: bool
) -> None:
    """A run is killed; its data is damaged; it is refused; the data is mended, and the run goes on to the
    same numbers as one that was not killed."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = documents_path.read_text().splitlines(keepends=True)
    (folder / "a.jsonl").write_text("".join(lines[:12]))
    (folder / "z.jsonl").write_text("".join(lines[12:]))
    columns = {"context_ids": "context_ids", "appendix_ids": "appendix_ids"}
    stream = STREAM if streaming else {}
    config = make_config(**{"data.path": str(folder), "data.columns": columns, **stream})
    whole = distill(replace(config, output=str(tmp_path / "whole")))
    with killed_at(6):
        distill(config)
    run = Path(config.output)
    kept = latest(run)
    assert kept is not None and kept[0] == 4
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    good = (folder / "z.jsonl").read_bytes()
    for damage, message in DAMAGED.items():
        (folder / "z.jsonl").write_bytes(damage)
        with pytest.raises(SystemExit, match=f"error: .*{message}"):
            main(["--config", written(config, tmp_path / "c.yaml")])
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    (folder / "z.jsonl").write_bytes(good)
    assert same_gates(whole, distill(config))
    assert comparable(run) == comparable(whole), "losses, documents, learning rates: all digits"
    made = json.loads((run / "gates.json").read_text())["training"]
    assert made["documents_of_process"] == [32]
