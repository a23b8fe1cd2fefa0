"""A lock lets one run into a folder: holders that run are named, those that have ended are replaced."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from retain.process.lock import LOCK_FILE
from retain.train.distill import distill
from retain.train.run.checkpoint import locked
from retain.train.run.signals import STOP_FILE

HOLD = "import sys, time; from pathlib import Path; from retain.process.lock import lock_folder;"
HOLD += "lock = lock_folder(Path(sys.argv[1]), otherwise='x'); lock.__enter__();"
HOLD += "print('held', flush=True); time.sleep(60)"


def test_a_folder_is_held_until_the_end_and_made_only_for_a_while(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    folder = tmp_path / "a" / "b"
    with locked(folder, accelerator):
        said = rf"held by another run: process {os.getpid()}\..*STOP in the folder.*remove .*LOCK"
        with pytest.raises(ValueError, match=said), locked(folder, accelerator):
            pass
        assert (folder / LOCK_FILE).exists(), "whoever was refused leaves it alone"
    assert not (tmp_path / "a").exists()
    with pytest.raises(KeyError), locked(folder, accelerator):
        (folder / "log.jsonl").touch()
        raise KeyError
    assert [path.name for path in folder.iterdir()] == ["log.jsonl"]


def test_a_holder_that_was_killed_is_replaced(tmp_path: Path, accelerator: Accelerator) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"process {running.pid}"), locked(tmp_path, accelerator):
            pass
        running.kill()
    assert (tmp_path / LOCK_FILE).exists()
    with locked(tmp_path, accelerator):
        pass
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_second_run_touches_nothing_of_the_first(
    make_config: Callable[..., Any], accelerator: Accelerator
) -> None:
    config = make_config(overwrite=True)
    folder = Path(config.output)
    with locked(folder, accelerator):
        (folder / STOP_FILE).touch()
        (folder / "log.jsonl").write_text("first")
        with pytest.raises(ValueError, match="is held by another run"):
            distill(config, accelerator)
        assert sorted(path.name for path in folder.iterdir()) == [LOCK_FILE, STOP_FILE, "log.jsonl"]
