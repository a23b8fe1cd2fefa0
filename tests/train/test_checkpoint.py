"""A run's folder: fresh, to be resumed, finished, or somebody else's; a log that can be rewound."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from retain.process.disk import DiskError
from retain.train.run import checkpoint
from retain.train.run.checkpoint import (
    CHECKPOINTS,
    DELETED,
    GATES_FILE,
    MANIFEST_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
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


def state(folder: Path, config: dict = CONFIG, *, overwrite: bool = False, resume: bool = True) -> str:
    return inspect_run(folder, config, overwrite=overwrite, resume=resume)


def test_a_run_from_beginning_to_end(tmp_path: Path) -> None:
    assert state(tmp_path / "new") == "fresh"
    begin_(tmp_path, CONFIG, INPUTS)
    assert state(tmp_path) == "fresh", "nothing to go on from yet"
    write_checkpoint(tmp_path, 10)
    (tmp_path / CHECKPOINTS / "step-000020.new").mkdir()
    (tmp_path / CHECKPOINTS / "step-000030").mkdir()
    assert latest(tmp_path) == (10, tmp_path / CHECKPOINTS / "step-000010"), "half-written ones do not count"
    assert state(tmp_path) == "resume"
    refused("unfinished run of this config: drop resume=false", state, tmp_path, resume=False)
    (tmp_path / "gates.json").write_text("{}")
    assert state(tmp_path) == "resume", "the artifact there is an older one"
    finish_(tmp_path)
    assert state(tmp_path) == "finished"
    assert state(tmp_path, overwrite=True) == "fresh"


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
        refused(r"run.json is damaged .*overwrite=true", check_inputs, tmp_path, INPUTS)
        (tmp_path / "config.yaml").write_bytes(payload)
        refused(r"(?s)config.yaml .*which run .* holds: restore it", state, tmp_path)


def test_an_artifact_is_not_touched_until_a_new_one_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "gates.json").write_text("{}")
    refused("holds a gate artifact and no config.yaml", state, tmp_path)
    append_log(tmp_path, {"step": 1})
    begin_(tmp_path, CONFIG, INPUTS)
    assert (tmp_path / "gates.json").exists() and read_log(tmp_path) == []


@pytest.mark.parametrize("remove", [finish_, lambda folder: begin_(folder, CONFIG, INPUTS)])
def test_a_kill_while_checkpoints_are_deleted_leaves_none_to_believe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove: Any
) -> None:
    begin_(tmp_path, CONFIG, INPUTS)
    write_checkpoint(tmp_path, 10)

    def killed(path: Path) -> None:
        assert path == tmp_path / DELETED
        (path / "step-000010" / STATE_FILE).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(tmp_path)
    assert latest(tmp_path) is None and (tmp_path / DELETED).exists()
    remove(tmp_path)
    assert not (tmp_path / DELETED).exists() and latest(tmp_path) is None


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
    path = save_checkpoint(accelerator, tmp_path, 4, synchroniser, extra)
    assert {each.name for each in path.iterdir()} == {GATES_FILE, OPTIMIZER_FILE, STATE_FILE, MANIFEST_FILE}
    assert load_file(path / GATES_FILE).keys() == killed.state_dict().keys(), "buffers too"
    resumed = toy_gates()
    for parameter in resumed.parameters():
        parameter.data.add_(1.0)
    synchroniser = toy_synchroniser(accelerator, resumed)
    assert load_checkpoint(path, synchroniser) == (4, extra)
    train_toy(accelerator, resumed, synchroniser, range(4, 6))
    assert all(torch.equal(tensor, state_of(resumed)[name]) for name, tensor in state_of(whole).items())


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    begin_(tmp_path, CONFIG, INPUTS)
    for step in (1, 2, 9, 10):
        write_checkpoint(tmp_path, step)
    assert sorted(path.name for path in (tmp_path / CHECKPOINTS).iterdir()) == ["step-000009", "step-000010"]


def tear(path: Path, how: str) -> None:
    payload = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(payload[: len(payload) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        # One bit, in the middle of a tensor or of a number.
        place = len(payload) // 2
        path.write_bytes(payload[:place] + bytes([payload[place] ^ 1]) + payload[place + 1 :])


@pytest.mark.parametrize("how", ["missing", "cut", "empty", "flipped"])
@pytest.mark.parametrize("name", [GATES_FILE, OPTIMIZER_FILE, STATE_FILE, MANIFEST_FILE])
def test_a_torn_checkpoint_is_passed_over(
    tmp_path: Path, accelerator: Accelerator, name: str, how: str
) -> None:
    begin_(tmp_path, CONFIG, INPUTS)
    write_checkpoint(tmp_path, 4)
    synchroniser = write_checkpoint(tmp_path, 5)
    newest = tmp_path / CHECKPOINTS / "step-000005"
    assert latest(tmp_path) == (5, newest)
    tear(newest / name, how)
    assert latest(tmp_path) == (4, tmp_path / CHECKPOINTS / "step-000004")
    refused(r"step-000005 is not a whole checkpoint .*remove it", load_checkpoint, newest, synchroniser)
    # The run takes step 5 again, in the place of the torn one.
    save_checkpoint(accelerator, tmp_path, 5, synchroniser, {})
    assert latest(tmp_path) == (5, newest)


def test_a_checkpoint_of_other_gates_or_of_a_newer_retain_is_refused(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    write_checkpoint(tmp_path, 1)
    path = tmp_path / CHECKPOINTS / "step-000001"
    other = torch.nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"of other gates: \d+ tensors differ, the first is 'bias' \(not there"
    ):
        load_checkpoint(path, toy_synchroniser(accelerator, other))
    fewer = toy_gates()
    next(fewer.parameters()).requires_grad_(False)
    refused("of other gates: 1 tensors differ", load_checkpoint, path, toy_synchroniser(accelerator, fewer))
    state = json.loads((path / STATE_FILE).read_text())
    payload = json.dumps({**state, "checkpoint_version": 99}).encode()
    (path / STATE_FILE).write_bytes(payload)
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    manifest["files"][STATE_FILE] = checkpoint._described(payload)
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="has checkpoint version 99, this retain reads up to 1: upgrade"):
        load_checkpoint(path, toy_synchroniser(accelerator, toy_gates()))


class FullDisk:
    """A file that takes some bytes and then says that the disk is full."""

    def __init__(self, file: Any, room: int):
        self.file, self.room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "FullDisk":
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def write(self, payload: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.file.name)
        written = self.file.write(payload[: self.room])
        self.room -= written
        if written < len(payload) and self.file.name.endswith("safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.file.name)
        return written


@pytest.mark.parametrize("room", [0, 5, 700])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_whole_lines(
    tmp_path: Path, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    begin_(tmp_path, CONFIG, INPUTS)
    synchroniser = write_checkpoint(tmp_path, 1)
    append_log(tmp_path, {"step": 1})
    before = files_of(tmp_path)
    opened = open

    def full(path: Any, mode: str = "r", *rest: Any, **settings: Any) -> Any:
        file = opened(path, mode, *rest, **settings)
        return FullDisk(file, room) if "w" in mode or "a" in mode else file

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "open", full, raising=False)
        wanted = (
            r"cannot write .*: No space left on device. Next step: free some space.*step-000001, is untouched"
        )
        with pytest.raises(DiskError, match=wanted) as raised:
            save_checkpoint(accelerator, tmp_path, 2, synchroniser, {})
        assert raised.value.errno == errno.ENOSPC and "gates.safetensors" in str(raised.value)
        with pytest.raises(DiskError, match=r"cannot write .*log.jsonl: No space left"):
            append_log(tmp_path, {"step": 2, "text": "x" * 1000})
    assert files_of(tmp_path) == before, "nothing half-written is left, no line is torn"
    assert not list((tmp_path / CHECKPOINTS).glob("*.new"))
    append_log(tmp_path, {"step": 2})
    save_checkpoint(accelerator, tmp_path, 2, synchroniser, {})
    assert read_log(tmp_path) == [{"step": 1}, {"step": 2}] and (latest(tmp_path) or (0,))[0] == 2
