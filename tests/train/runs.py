"""Whole runs in tests: launched, killed at a step, asked to stop, compared."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import retain
from retain.config import to_mapping
from retain.train import loop
from retain.train.recipe import DistillConfig
from tests.launch import launch_environment

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ("-m", "accelerate.commands.launch")
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def python(*arguments: str, fine: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in the checkout; unless `fine` is False, it must end with status 0."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=launch_environment(**environment),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert not fine or done.returncode == 0, done.stderr[-4000:]
    return done


def written(config: DistillConfig, path: Path) -> str:
    path.write_text(json.dumps(to_mapping(config)))
    return str(path)


@contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Inside, a run is killed before this step."""
    take_step_ = loop.take_step_

    def until_killed(*arguments: Any) -> dict[str, Any]:
        if arguments[3] == step:
            raise KeyboardInterrupt
        return take_step_(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "take_step_", until_killed)
        yield


@contextmanager
def after_step(step: int, act: Callable[[Path], object]) -> Iterator[None]:
    """Inside, something is done to a run's folder as soon as the log has this step."""
    append_log = loop.append_log

    def acting(folder: Path, record: Any) -> None:
        append_log(folder, record)
        if record.get("step") == step and "loss" in record:
            act(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "append_log", acting)
        yield


def terminate(*_: object) -> None:
    """Send SIGTERM to this very process."""
    os.kill(os.getpid(), signal.SIGTERM)


def same_gates(one: Path, two: Path) -> bool:
    """Compares two artifacts: True if they hold the very same numbers."""
    first, second = (retain.load_gates(folder).state_dict() for folder in (one, two))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
