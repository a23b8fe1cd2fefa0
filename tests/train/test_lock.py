"""One run in a folder at a time: holders that run are named, and those that are gone are replaced."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from retain.process.lock import LOCK_FILE, _started, me
from retain.train.distill import distill
from retain.train.run.checkpoint import locked
from retain.train.run.signals import STOP_FILE


def held(folder: Path, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOCK_FILE).write_text(json.dumps({**me(), **changes}))


def test_a_folder_is_held_until_the_end_and_made_only_for_a_while(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    folder = tmp_path / "a" / "b"
    with locked(folder, accelerator):
        assert json.loads((folder / LOCK_FILE).read_text())["pid"] == me()["pid"]
        with (
            pytest.raises(ValueError, match=f"held by another run: process {me()['pid']} on"),
            locked(folder, accelerator),
        ):
            pass
        assert (folder / LOCK_FILE).exists(), "whoever was refused leaves it alone"
    assert not (tmp_path / "a").exists()
    with pytest.raises(KeyError), locked(folder, accelerator):
        (folder / "log.jsonl").touch()
        raise KeyError
    assert [path.name for path in folder.iterdir()] == ["log.jsonl"]


def test_the_holder_is_named_and_what_to_do(tmp_path: Path, accelerator: Accelerator) -> None:
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        held(tmp_path, pid=running.pid, started=_started(running.pid), job="17")
        said = rf"process {running.pid} of job 17 on .*STOP in the folder.*If that process.*remove .*LOCK"
        with pytest.raises(ValueError, match=said), locked(tmp_path, accelerator):
            pass
    finally:
        running.kill()
        running.wait()
    with locked(tmp_path, accelerator):
        pass


@pytest.mark.parametrize(
    "changes",
    [{"host": "elsewhere"}, {"processes": "pid:[1]"}, {"host": "elsewhere", "job": "7", "restart": "0"}],
    ids=["another host", "another container", "another job"],
)
def test_what_cannot_be_seen_from_here_is_not_taken_over(
    tmp_path: Path, accelerator: Accelerator, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    held(tmp_path, **changes)
    with (
        pytest.raises(ValueError, match=r"held by another run.*is no run of yours any more, remove .*LOCK"),
        locked(tmp_path, accelerator),
    ):
        pass
    (tmp_path / LOCK_FILE).unlink()
    with locked(tmp_path, accelerator):
        pass


@pytest.mark.parametrize(
    "changes",
    [
        *({"pid": 2**22 + 1}, {"pid": "no number"}, {"started": "1"}, {"boot": "before"}),
        *({"host": "elsewhere", "job": "8", "restart": "0"}, None),
    ],
    ids=[
        *("dead", "of no number", "another process of that number", "before the machine started", "requeued"),
        "half-written",
    ],
)
def test_a_holder_that_is_gone_is_replaced(
    tmp_path: Path, accelerator: Accelerator, changes: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    if changes is None:
        (tmp_path / LOCK_FILE).write_text('{"host": "')
    else:
        held(tmp_path, **changes)
    with locked(tmp_path, accelerator):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["restart"] == "1"
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_second_run_touches_nothing_of_the_first(
    make_config: Callable[..., Any], tmp_path: Path, accelerator: Accelerator
) -> None:
    config = make_config(overwrite=True)
    folder = Path(config.output)
    with locked(folder, accelerator):
        (folder / STOP_FILE).touch()
        (folder / "log.jsonl").write_text("first")
        with pytest.raises(ValueError, match="is held by another run"):
            distill(config, accelerator)
        assert (folder / STOP_FILE).exists(), "which is for the run that holds the folder"
        assert sorted(path.name for path in folder.iterdir()) == [LOCK_FILE, STOP_FILE, "log.jsonl"]
