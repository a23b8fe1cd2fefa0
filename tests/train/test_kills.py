"""A run that is killed with SIGKILL at twenty random moments ends with the weights of one that was not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from retain.config import save
from retain.train.run.checkpoint import read_log
from tests.launch import launch_environment

ROOT = Path(__file__).resolve().parents[2]
KILLS = 20


def test_twenty_kills_change_nothing(make_config: Callable[..., Any], tmp_path: Path) -> None:
    training = {"steps": 90, "batch_documents": 2, "checkpoint_every": 1, "held_out_every": 20}
    config = make_config(**{f"training.{name}": value for name, value in training.items()})
    save(config, tmp_path / "c.yaml")
    done = subprocess.run(
        [sys.executable, "tests/train/killed.py", str(tmp_path), str(KILLS), str(tmp_path / "c.yaml")],
        cwd=ROOT,
        env=launch_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    records = json.loads((tmp_path / "kills.json").read_text())
    assert [record["killed"] for record in records] == [True] * KILLS, "none of them had ended by itself"
    assert [(record["torn"], record["torn_lines"]) for record in records] == [([], 0)] * KILLS
    assert not any(record["artifact"] for record in records)
    steps = [record["step"] for record in records]
    assert steps == sorted(steps), "no kill loses a checkpoint"
    assert len(set(steps)) >= 5, "kills came at different moments of the run"

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert read_log(whole) == read_log(killed)
    assert [record["step"] for record in read_log(killed) if "loss" in record] == list(range(1, 91))
    one, two = (load_file(folder / "gates.safetensors") for folder in (whole, killed))
    assert one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())
