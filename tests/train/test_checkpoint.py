"""A run's folder: fresh, to be resumed, finished, or somebody else's; a log that can be rewound."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from retain.process.disk import DiskError
from retain.train.run import checkpoint
from retain.train.run.checkpoint import (
    CHECKPOINT_FILE,
    append_log,
    begin_,
    check_inputs,
    finish_,
    inspect_run,
    latest,
    load_checkpoint,
    read_log,
    rewind_log_,
    save_checkpoint,
)
from retain.train.run.parallel import Synchroniser
from tests.refused import refused
from tests.train.two_processes import state_of, toy_gates, toy_synchroniser, train_toy

INPUTS = {"base model": "abc", "documents": "def"}
CONFIG = {"seed": 0, "training": {"lr": 1e-5, "betas": (0.9, 0.99)}, "overwrite": False, "resume": True}


def write_checkpoint(folder: Path, step: int, **extra: Any) -> Synchroniser:
    """Toy gates after one step at a rate of their own, saved as `step`."""
    accelerator, gates = Accelerator(cpu=True), toy_gates()
    synchroniser = toy_synchroniser(accelerator, gates)
    train_toy(accelerator, gates, synchroniser, range(step, step + 1))
    save_checkpoint(accelerator, folder, step, synchroniser, extra)
    return synchroniser


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def state(folder: Path, config: dict = CONFIG, *, overwrite: bool = False) -> str:
    return inspect_run(folder, config, overwrite=overwrite)


def test_a_run_from_beginning_to_end(tmp_path: Path) -> None:
    assert state(tmp_path / "new") == "fresh"
    begin_(tmp_path, CONFIG, INPUTS)
    assert state(tmp_path) == "fresh", "nothing to go on from yet"
    write_checkpoint(tmp_path, 10)
    (tmp_path / f"{CHECKPOINT_FILE}.new").write_bytes(b"half-written")
    assert latest(tmp_path) == (10, tmp_path / CHECKPOINT_FILE), "half-written ones do not count"
    assert state(tmp_path) == "resume"
    (tmp_path / "gates.json").write_text("{}")
    assert state(tmp_path) == "resume", "the artifact there is an older one"
    finish_(tmp_path)
    assert state(tmp_path) == "finished" and latest(tmp_path) is None
    assert state(tmp_path, overwrite=True) == "fresh"
    begin_(tmp_path, CONFIG, INPUTS)
    assert state(tmp_path) == "fresh", "the artifact there is an older one, and no checkpoint is"


def test_what_changes_no_result_is_no_other_config(tmp_path: Path) -> None:
    config = {**CONFIG, "output": str(tmp_path), "plan": {"tflops": 1.0}, "tracker": "none"}
    begin_(tmp_path, config, INPUTS)
    write_checkpoint(tmp_path, 10)
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    free = {"output": str(moved), "plan": {"tflops": 2.0}, "tracker": "wandb"}
    assert state(moved, {**config, **free}) == "resume"
    with pytest.raises(ValueError, match=r"another config \(training.lr: 1e-05 -> 2e-05\)"):
        state(moved, {**config, **free, "training": {**CONFIG["training"], "lr": 2e-5}})


def test_damaged_records_of_a_run_are_named(tmp_path: Path) -> None:
    begin_(tmp_path, CONFIG, INPUTS)
    for payload in (b"{", b"[1]", b"\xff", b"[" * 100_000):
        (tmp_path / "run.json").write_bytes(payload)
        refused("run.json (is not valid YAML|must hold)", check_inputs, tmp_path, INPUTS)
        (tmp_path / "config.yaml").write_bytes(payload)
        refused("config.yaml (is not valid YAML|must hold)", state, tmp_path)


def test_an_artifact_is_not_touched_until_a_new_one_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "gates.json").write_text("{}")
    refused("holds a gate artifact and no config.yaml", state, tmp_path)
    append_log(tmp_path, {"step": 1})
    begin_(tmp_path, CONFIG, INPUTS)
    assert (tmp_path / "gates.json").exists() and read_log(tmp_path) == []


def test_log_is_rewound_to_the_checkpoint(tmp_path: Path) -> None:
    for step in range(1, 6):
        append_log(tmp_path, {"step": step, "loss": 0.1 * step})
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    rewind_log_(tmp_path, 3)
    assert read_log(tmp_path) == [{"step": step, "loss": 0.1 * step} for step in (1, 2, 3)]


def test_a_checkpoint_goes_on_to_the_same_digits(tmp_path: Path, accelerator: Accelerator) -> None:
    begin_(tmp_path, CONFIG, INPUTS)
    whole, killed = toy_gates(), toy_gates()
    train_toy(accelerator, whole, toy_synchroniser(accelerator, whole), range(6))
    synchroniser = toy_synchroniser(accelerator, killed)
    train_toy(accelerator, killed, synchroniser, range(4))
    extra = {"seconds": 12.5, "data": {"epoch": 1, "row": 7}, "best": None}
    write_checkpoint(tmp_path, 2)
    save_checkpoint(accelerator, tmp_path, 4, synchroniser, extra)
    path = tmp_path / CHECKPOINT_FILE
    kept = {name.removeprefix("gates/") for name in load_file(path) if name.startswith("gates/")}
    assert kept == killed.state_dict().keys(), "buffers too"
    resumed = toy_gates()
    for parameter in resumed.parameters():
        parameter.data.add_(1.0)
    synchroniser = toy_synchroniser(accelerator, resumed)
    assert load_checkpoint(path, synchroniser) == (4, extra)
    train_toy(accelerator, resumed, synchroniser, range(4, 6))
    assert all(torch.equal(tensor, state_of(resumed)[name]) for name, tensor in state_of(whole).items())


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, size: int) -> None:
    """A disk's doing: a kill leaves a checkpoint whole."""
    begin_(tmp_path, CONFIG, INPUTS)
    synchroniser = write_checkpoint(tmp_path, 5)
    path = tmp_path / CHECKPOINT_FILE
    path.write_bytes(path.read_bytes()[:size])
    for call in (latest, state):
        refused(r"is no whole checkpoint \(.*remove it, and the run begins anew", call, tmp_path)
    refused("is no whole checkpoint", load_checkpoint, path, synchroniser)


@pytest.mark.parametrize("name", [CHECKPOINT_FILE, "log.jsonl"])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_log(
    tmp_path: Path, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    begin_(tmp_path, CONFIG, INPUTS)
    synchroniser = write_checkpoint(tmp_path, 1)
    append_log(tmp_path, {"step": 1})
    before = files_of(tmp_path)

    def full(*arguments: Any, **settings: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / name))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_new", full)
        patch.setattr(checkpoint, "write_text", full)
        patch.setattr(checkpoint, "open", full, raising=False)
        wanted = rf"cannot write .*{name}: No space left on device. Next step: free some space.*of step 1 in "
        acts = (
            lambda: save_checkpoint(accelerator, tmp_path, 2, synchroniser, {}),
            lambda: append_log(tmp_path, {"step": 2}),
            lambda: rewind_log_(tmp_path, 0),
        )
        for act in acts:
            with pytest.raises(DiskError, match=wanted) as raised:
                act()
            assert raised.value.errno == errno.ENOSPC
    assert files_of(tmp_path) == before
    append_log(tmp_path, {"step": 2})
    save_checkpoint(accelerator, tmp_path, 2, synchroniser, {})
    assert read_log(tmp_path) == [{"step": 1}, {"step": 2}] and (latest(tmp_path) or (0,))[0] == 2
    assert json.loads((tmp_path / "run.json").read_text()) == {**INPUTS, "finished": False}
