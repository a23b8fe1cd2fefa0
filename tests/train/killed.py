"""Kills a training run again and again, at random moments, and starts it again each time.

    python tests/train/killed.py FOLDER KILLS CONFIG

Writes `kills.json` into the folder: the state of the run after each kill. The imports are done once: each run
is a fork of this process, killed from outside with SIGKILL at a random moment: while it starts, or a while
after its first sign of life in the log, so short that all kills come before the end.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from retain.config import load
from retain.train.distill import distill
from retain.train.recipe import DistillConfig
from retain.train.run.checkpoint import latest, read_log

# Of the kills, those that come while the run loads and looks around.
EARLY = 0.25


def forked(config: DistillConfig, folder: Path) -> int:
    """A child that runs, silently, and exits."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with open(folder.with_suffix(".out"), "a") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            distill(replace(config, output=str(folder)), Accelerator(cpu=True))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def to_the_end(config: DistillConfig, folder: Path) -> float:
    """Seconds of a run that nobody kills."""
    began = time.monotonic()
    _, status = os.waitpid(forked(config, folder), 0)
    assert status == 0, folder.with_suffix(".out").read_text()[-4000:]
    return time.monotonic() - began


def sign_of_life(folder: Path) -> tuple[int, int, int]:
    """Another one, as soon as the run has written to its log."""
    try:
        found = (folder / "log.jsonl").stat()
    except FileNotFoundError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def killed_once(config: DistillConfig, folder: Path, wait: float, *, writes: int) -> bool:
    """Kills a run, and returns whether it was still going: `wait` seconds after so many signs of life, which
    are steps but for the first, so that kills keep to the run's own pace, however busy the machine is."""
    child = forked(config, folder)
    for _ in range(writes):
        before = sign_of_life(folder)
        while sign_of_life(folder) == before and not has_ended(child):
            time.sleep(0.001)
    time.sleep(wait)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def what_is_left(folder: Path) -> dict[str, Any]:
    found = latest(folder)  # refuses one that is torn
    lines = (folder / "log.jsonl").read_text().splitlines() if (folder / "log.jsonl").is_file() else []
    return {
        "step": found[0] if found else 0,
        # All lines but the last, which a kill may cut short, are whole.
        "torn_lines": max(0, len(lines) - 1 - len(read_log(folder))),
        "artifact": (folder / "gates.json").exists(),
    }


def main() -> None:
    folder, kills, config = Path(sys.argv[1]), int(sys.argv[2]), load(sys.argv[3], DistillConfig)
    # A fresh run to its end, and one that finds nothing left to do: what steps take, and what starting takes.
    taken, start = (to_the_end(config, folder / "whole") for _ in range(2))
    draw, records = random.Random(0), []
    for number in range(kills):
        early = number < EARLY * kills
        wait = draw.uniform(0, start if early else (taken - start) / config.training.steps)
        killed = killed_once(config, folder / "killed", wait, writes=0 if early else draw.randint(1, 3))
        records.append({"killed": killed, "early": early, **what_is_left(folder / "killed")})
    to_the_end(config, folder / "killed")
    (folder / "kills.json").write_text(json.dumps(records))


if __name__ == "__main__":
    main()
