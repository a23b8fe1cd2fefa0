"""A lock lets one run into a folder, and names its holder."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from retain.process.lock import LOCK_FILE
from retain.train.distill import distill
from retain.train.run.checkpoint import locked
from retain.train.run.signals import STOP_FILE


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
