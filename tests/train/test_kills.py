"""A run that is killed with SIGKILL at thirty random times ends with the weights of one that was not."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from retain.config import load
from retain.process.lock import LOCK_FILE
from retain.train.distill import distill
from retain.train.recipe import DistillConfig
from retain.train.run.checkpoint import latest, read_log
from tests.train.runs import same_gates, written

KILLS = 30
# Of the kills, those that come while the run loads and looks around.
EARLY = 8


def silent_run(path: str) -> None:
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    distill(load(path, DistillConfig), Accelerator(cpu=True))


@pytest.mark.slow
def test_thirty_kills_change_nothing(make_config: Callable[..., Any], tmp_path: Path) -> None:
    training = {"steps": 140, "batch_documents": 2, "checkpoint_every": 1, "held_out_every": 20}
    config = make_config(**{f"training.{name}": value for name, value in training.items()})
    path, folder, draw = written(config, tmp_path / "c.yaml"), Path(config.output), random.Random(0)

    forks = multiprocessing.get_context("forkserver")  # of a process that has imported this file
    forks.set_forkserver_preload([__name__])

    def begun(process: int | None) -> bool:
        lock = folder / LOCK_FILE
        return lock.is_file() and str(process) in lock.read_text()

    def done() -> int:
        return max((record["step"] for record in read_log(folder)), default=0)

    steps = []
    for number in range(KILLS):
        wanted = done() + draw.randint(1, 3)
        run = forks.Process(target=silent_run, args=(path,))
        run.start()
        while run.is_alive() and not (begun(run.pid) if number < EARLY else done() >= wanted):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.3 if number < EARLY else 0.05))
        run.kill()
        run.join()
        assert run.exitcode == -signal.SIGKILL, "it had not ended by itself"
        found = latest(folder)  # refuses one that is torn
        steps.append(found[0] if found else 0)
        lines = (folder / "log.jsonl").read_text().splitlines() if (folder / "log.jsonl").is_file() else []
        assert len(lines) - len(read_log(folder)) <= 1, "all lines but the last are whole"
        assert not (folder / "gates.json").exists()
    assert steps == sorted(steps), "no kill loses a checkpoint"
    assert len(set(steps)) >= 5, "kills came at different times of the run"
    whole, killed = distill(replace(config, output=str(tmp_path / "whole"))), distill(config)
    assert read_log(whole) == read_log(killed)
    assert [record["step"] for record in read_log(killed) if "loss" in record] == list(range(1, 141))
    assert same_gates(whole, killed)
