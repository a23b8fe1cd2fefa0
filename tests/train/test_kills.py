"""A run that is killed with SIGKILL at twenty random moments ends with the weights of one that was not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retain.config import to_mapping
from retain.train.run.checkpoint import read_log
from tests.train.runs import python, same_gates

KILLS = 20


@pytest.mark.slow
def test_twenty_kills_change_nothing(make_config: Callable[..., Any], tmp_path: Path) -> None:
    training = {"steps": 90, "batch_documents": 2, "checkpoint_every": 1, "held_out_every": 20}
    config = make_config(**{f"training.{name}": value for name, value in training.items()})
    (tmp_path / "c.yaml").write_text(json.dumps(to_mapping(config)))
    python("tests/train/killed.py", str(tmp_path), str(KILLS), str(tmp_path / "c.yaml"))
    records = json.loads((tmp_path / "kills.json").read_text())
    assert [record["killed"] for record in records] == [True] * KILLS, "none of them had ended by itself"
    assert [record["torn_lines"] for record in records] == [0] * KILLS
    assert not any(record["artifact"] for record in records)
    steps = [record["step"] for record in records]
    assert steps == sorted(steps), "no kill loses a checkpoint"
    assert len(set(steps)) >= 5, "kills came at different moments of the run"

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert read_log(whole) == read_log(killed)
    assert [record["step"] for record in read_log(killed) if "loss" in record] == list(range(1, 91))
    assert same_gates(whole, killed)
