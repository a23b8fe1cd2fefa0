"""Manages a run's folder: decides fresh, resume or finished; writes checkpoints and the log.

    run.json                hashes of base model, documents and initial gates, written before the config
    config.yaml             the resolved config, written before the first step
    log.jsonl               one line a step, one more whenever the held-out documents are looked at
    LOCK                    who trains in it (`retain.process.lock`)
    checkpoints/step-N/     the state after step N, the last two of them; removed when the run is finished
        gates.safetensors       the gates, with what is not trained of them
        optimizer.safetensors   what AdamW remembers of each parameter, whole, whoever held which part of it
        state.json              steps, optimiser steps, and what the loop wants to find again
        manifest.json           bytes and sha256 of the other three, written last
    gates.safetensors, gates.json    the artifact; there only once a run has finished

A run is known by the part of its config that decides what is trained, and by the model, the documents and the
initial gates that the config named when it began. The same run resumes or has nothing left to do; another one
never touches the folder unless `overwrite=true`.

A checkpoint is independent of the number of processes: state is saved whole, and documents and draws are
functions of the step, so that a run may resume with another number of processes, under DDP, FSDP or DeepSpeed
alike. (accelerate's own `save_state` depends on all of these, and pickles.) A checkpoint is written beside,
synced, and renamed; one that does not match its manifest is skipped for the one before it.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import yaml
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from retain.config import leaves, read_mapping
from retain.gates.artifact import METADATA_FILE
from retain.process import disk
from retain.process.disk import write_new
from retain.process.lock import take_lock
from retain.train.data.corpus import AnyCorpus
from retain.train.run.parallel import Accelerator, Synchroniser, gather_object, on_main_process

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
CHECKPOINTS = "checkpoints"
# Checkpoints are renamed to this before they are deleted: a kill leaves no half of one that looks whole.
DELETED = "checkpoints.deleted"
# Names of whole checkpoints; `.new` and `.old` stand behind those that come and go.
OURS = re.compile(r"step-[0-9]+")
GATES_FILE, OPTIMIZER_FILE, STATE_FILE = "gates.safetensors", "optimizer.safetensors", "state.json"
MANIFEST_FILE = "manifest.json"
# The last one, and one to fall back on.
KEPT = 2
# Of a checkpoint's format.
CHECKPOINT_VERSION = 1
# Keys and sections that say how to start and where to write, not what is trained (`plan`: of earlier runs).
START_KEYS = ("overwrite", "resume", "plan", "output", "tracker", "training.checkpoint_every")
# Fitted after the last step: free to change until then.
AFTER_KEYS = ("calibration",)
# Advice where another run holds the folder.
OTHERWISE = "another `output` (a file STOP in the folder stops the other run)"

State = Literal["fresh", "resume", "finished"]


def inspect_run(folder: Path, config: Mapping[str, Any], *, overwrite: bool, resume: bool) -> State:
    """Decides how a run of this config would start in this folder; changes nothing. Model and documents are
    for `check_inputs`, once they are loaded.

    An unfinished run goes on under another `calibration` (one that failed after hours of training can be
    corrected), and any run, once its folder was moved, under another `output`; `adopt_` writes down what it
    goes on with.

    Raises:
        ValueError: the folder holds a run of another config, or an unfinished one that `resume=false` forbids
            to go on.
    """
    if overwrite or not folder.exists():
        return "fresh"
    config_path = folder / CONFIG_FILE
    if not config_path.is_file():
        if (folder / METADATA_FILE).is_file():
            raise ValueError(
                f"{folder} holds a gate artifact and no {CONFIG_FILE}: choose another `output`, or pass "
                "overwrite=true."
            )
        return "fresh"
    try:
        earlier = read_mapping(config_path)
    except ValueError as error:
        raise ValueError(
            f"{error} It says which run {folder} holds: restore it, choose another `output`, or pass "
            "overwrite=true."
        ) from error
    finished = (folder / METADATA_FILE).is_file() and not (folder / CHECKPOINTS).exists()
    differ = _differences(earlier, config, START_KEYS if finished else (*START_KEYS, *AFTER_KEYS))
    if differ:
        raise ValueError(
            f"{folder} holds a run of another config ({'; '.join(differ)}): choose another `output`, or "
            "pass overwrite=true "
            "to replace it."
        )
    if finished:
        return "finished"
    if latest(folder) is None:
        return "fresh"
    if not resume:
        raise ValueError(
            f"{folder} holds an unfinished run of this config: drop resume=false to go on, or pass "
            "overwrite=true to start anew."
        )
    return "resume"


def _differences(earlier: Any, config: Mapping[str, Any], free: Collection[str]) -> list[str]:
    """`key: earlier -> now` for every leaf that differs, both sides as plain YAML values; not of keys and
    sections that are free to."""
    before, now = leaves(earlier), leaves(json.loads(json.dumps(config)))
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    bound = [key for key in keys if not any(f"{key}.".startswith(f"{own}.") for own in free)]
    return [f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in bound]


@contextmanager
def locked(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Inside, the folder is this run's; every process enters, the first one holds the lock.

    Raises:
        ValueError: on every process: another run holds it; says which, and how to remove a lock whose holder
            is gone.
    """

    releases = []

    def take() -> None:
        releases.append(take_lock(folder, otherwise=OTHERWISE))

    on_main_process(accelerator, take)
    try:
        yield
    finally:
        for release in releases:
            release()


def describe_inputs(
    model_sha256: str, corpus: AnyCorpus, initial_sha256: str | None = None
) -> dict[str, str]:
    """Returns `{"base model": sha256, "documents": sha256}` of what a run is trained on, and the sha256 of
    its `initial gates` where it begins with those of an artifact. A corpus in memory counts token by token,
    in its order, which decides what each step reads; a stream by its files, its settings and its first
    documents."""
    inputs = {"base model": model_sha256, "documents": corpus.describe()}
    return inputs if initial_sha256 is None else {**inputs, "initial gates": initial_sha256}


def check_inputs(folder: Path, inputs: Mapping[str, str]) -> None:
    """Raises ValueError if the folder's run began with another model, other documents or other gates
    than `inputs` (`describe_inputs` of now), or did not write down with which."""
    path = folder / RUN_FILE
    try:
        earlier = read_mapping(path) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({' '.join(str(error).split())}), and says with which model, documents and "
            "gates the run began: restore it, choose another `output`, or pass overwrite=true to train anew."
        ) from error
    differ = [
        f"{name}: sha256 {earlier.get(name, 'not recorded')} -> {now}"
        for name, now in inputs.items()
        if earlier.get(name) != now
    ]
    if differ:
        raise ValueError(
            f"{folder} holds a run of this config with another model, other documents or other initial gates "
            f"({'; '.join(differ)}): "
            "choose another `output`, or pass overwrite=true to replace it."
        )


def begin_(folder: Path, config: Mapping[str, Any], inputs: Mapping[str, str]) -> None:
    """Makes the folder ready for a fresh run; an older artifact stays until the new one replaces it;
    DiskError: the folder could not be written."""
    with disk_errors(folder):
        finish_(folder)
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        (folder / LOG_FILE).unlink(missing_ok=True)
        text = json.dumps(dict(inputs), indent=2) + "\n"
        os.replace(write_new(folder / RUN_FILE, text.encode()), folder / RUN_FILE)
        adopt_(folder, config)


def adopt_(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes down the config that the run goes on with, which `inspect_run` has let pass."""
    text = yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False, allow_unicode=True)
    with disk_errors(folder):
        os.replace(write_new(folder / CONFIG_FILE, text.encode()), folder / CONFIG_FILE)


def finish_(folder: Path) -> None:
    """Drops the checkpoints, and what a killed run left of those that it was dropping."""
    for path in (folder / DELETED, folder / CHECKPOINTS):
        if path.exists():
            shutil.rmtree(path.replace(folder / DELETED))


def disk_errors(folder: Path) -> AbstractContextManager[None]:
    """Inside, an error of the disk becomes one that says what to do (`retain.process.disk`): the run can go
    on from the folder's checkpoints."""

    def goes_on() -> str:
        if kept := latest(folder):
            again = same_command(folder)
            return f"The last good checkpoint, {kept[1]}, is untouched, and {again} goes on from it."
        return "There is no checkpoint yet: the same command starts anew."

    return disk.disk_errors(folder, key="output", goes_on=goes_on)


def same_command(folder: Path) -> str:
    """Returns the command that resumes the folder's run, in words: with overwrite=true, the command that
    began it would throw it away."""
    try:
        config = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        config = None
    overwrites = isinstance(config, Mapping) and config.get("overwrite") is True
    return "the same command" + (" without overwrite=true" if overwrites else "")


def latest(folder: Path) -> tuple[int, Path] | None:
    """The newest whole checkpoint, its manifest checked: (steps done, its folder)."""
    return next((found for found in _named(folder) if _is_whole(found[1])), None)


def _named(folder: Path) -> list[tuple[int, Path]]:
    """Folders with the name of a checkpoint, newest first."""
    named = [
        (int(path.name.removeprefix("step-")), path)
        for path in (folder / CHECKPOINTS).glob("step-*")
        if OURS.fullmatch(path.name)
    ]
    return sorted(named, reverse=True)


def _is_whole(path: Path) -> bool:
    """True where a checkpoint's files are those that its manifest was written for."""
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
        return manifest["files"].keys() == {GATES_FILE, OPTIMIZER_FILE, STATE_FILE} and all(
            _described((path / name).read_bytes()) == described
            for name, described in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _described(payload: bytes) -> dict[str, Any]:
    return {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}


def save_checkpoint(
    accelerator: Accelerator, folder: Path, step: int, synchroniser: Synchroniser, extra: Mapping[str, Any]
) -> Path:
    """Writes the state beside, renames it, and only then removes all but the last `KEPT`; on every process.
    `extra` is what the loop wants to find again, in plain JSON. Returns the checkpoint's folder. DiskError:
    on every process, if the first one could not write; the last good checkpoint is untouched."""
    final = folder / CHECKPOINTS / f"step-{step:06d}"

    def write() -> None:
        state = {
            "checkpoint_version": CHECKPOINT_VERSION,
            "step": step,
            "num_updates": synchroniser.num_updates,
            "num_processes": accelerator.num_processes,
            "extra": dict(extra),
        }
        gates = {
            name: own.detach().to("cpu", copy=True).contiguous()
            for name, own in synchroniser.gates.state_dict().items()
        }
        files = {
            GATES_FILE: save_tensors(gates),
            OPTIMIZER_FILE: save_tensors(synchroniser.optimizer_tensors()),
            STATE_FILE: (json.dumps(state, indent=2) + "\n").encode(),
        }
        manifest = {"files": {name: _described(payload) for name, payload in files.items()}}
        files[MANIFEST_FILE] = (json.dumps(manifest, indent=2) + "\n").encode()
        beside = final.with_name(f"{final.name}.new")
        with disk_errors(folder):
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            try:
                for name, payload in files.items():
                    _write_synced(beside / name, payload)
            except OSError:
                shutil.rmtree(beside, ignore_errors=True)
                raise
            if final.exists():
                shutil.rmtree(final)  # torn, or it would have been gone on from
            os.replace(beside, final)
            _sync_folder(final.parent)
        for _, path in _named(folder)[KEPT:]:
            # Under another name: a kill in the middle leaves no half that looks whole.
            path.replace(path.with_name(f"{path.name}.old"))
        for path in (folder / CHECKPOINTS).glob("step-*.*"):
            shutil.rmtree(path)

    on_main_process(accelerator, write)
    return final


def _write_synced(path: Path, payload: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # the system names a file only where it opens it
        raise


def _sync_folder(path: Path) -> None:
    """Sync a folder, so that renames in it are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_checkpoint(path: Path, synchroniser: Synchroniser) -> tuple[int, dict[str, Any]]:
    """Puts gates and optimiser where a checkpoint left them, on every process, and returns (steps done,
    `extra` of then).

    Raises:
        ValueError: it is not whole, of a newer format, of other gates, or not what other processes see.
    """
    whole = _is_whole(path)
    manifest = (path / MANIFEST_FILE).read_bytes() if whole else b""
    seen = gather_object([hashlib.sha256(manifest).hexdigest()])
    if not whole or len(set(seen)) > 1:
        raise ValueError(
            f"{path} is not a whole checkpoint (its files do not match {MANIFEST_FILE}), or not the same one "
            "to every process: remove it, and the run goes on from the one before it; several machines need "
            "an `output` on a disk that all of them share."
        )
    state = json.loads((path / STATE_FILE).read_bytes())
    if state["checkpoint_version"] > CHECKPOINT_VERSION:
        raise ValueError(
            f"{path} has checkpoint version {state['checkpoint_version']}, this retain reads up to "
            f"{CHECKPOINT_VERSION}: upgrade retain to go on with it."
        )
    gates, optimizer = (load_tensors((path / name).read_bytes()) for name in (GATES_FILE, OPTIMIZER_FILE))
    wanted = {name: tuple(tensor.shape) for name, tensor in synchroniser.gates.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in gates.items()}
    trained = {name.partition("/")[2] for name in optimizer} ^ synchroniser.parameters.keys()
    if differ := sorted({name for name, _ in wanted.items() ^ found.items()} | trained):
        there, here = (shapes.get(differ[0], "not there") for shapes in (found, wanted))
        raise ValueError(
            f"{path} is a checkpoint of other gates: {len(differ)} tensors differ, the first is "
            f"{differ[0]!r} ({there} in the checkpoint, {here} here). Set `gate` to what the run began with, "
            "or choose another `output`."
        )
    synchroniser.load_(gates, optimizer, state["num_updates"])
    return state["step"], state["extra"]


def append_log(folder: Path, record: Mapping[str, Any]) -> None:
    """One line more, or none at all: what is on disk is complete up to the last step.

    Raises:
        DiskError: the line could not be written.
    """
    line = (json.dumps(record) + "\n").encode()
    with disk_errors(folder), open(folder / LOG_FILE, "ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[file.write(line) :]
        except OSError as error:
            file.truncate(before)
            error.filename = error.filename or str(folder / LOG_FILE)
            raise


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The log's records; a last line that a kill cut short is left out."""
    path = folder / LOG_FILE
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def rewind_log_(folder: Path, steps_done: int) -> None:
    """Drops what was logged after the checkpoint from which the run goes on; DiskError: the log could not be
    written, and is as it was."""
    kept = [record for record in read_log(folder) if record["step"] <= steps_done]
    text = "".join(json.dumps(record) + "\n" for record in kept)
    with disk_errors(folder):
        os.replace(write_new(folder / LOG_FILE, text.encode()), folder / LOG_FILE)
