"""Manages a run's folder: decides fresh, resume or finished; writes the checkpoint and the log.

    run.json                  hashes of base model and documents; whether the run is finished
    config.yaml               the resolved config, written before the first step
    log.jsonl                 one line a step, one more whenever the held-out documents are looked at
    LOCK                      who trains in it (`retain.process.lock`)
    checkpoint.safetensors    the state after the last saved step: the gates, AdamW's moments, and as metadata
                              what the loop wants to find again; removed when the run is finished
    gates.safetensors, gates.json    the artifact; there only once a run has finished

A run is known by the part of its config that decides what is trained, and by the model and the documents that
the config named when it began. The same run resumes or has nothing left to do; another one
never touches the folder unless `overwrite=true`.

A checkpoint is independent of the number of processes: state is saved whole, and documents and draws are
functions of the step, so that a run may resume with another number of processes, under DDP, FSDP or DeepSpeed
alike. (accelerate's `save_state` depends on all of these, and pickles.) It is one file, written under another
name, synced, and renamed over the one before: a kill leaves the one or the other whole.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from retain.config import leaves, read_mapping
from retain.gates.artifact import METADATA_FILE
from retain.process import disk
from retain.process.disk import save_new
from retain.process.lock import lock_folder
from retain.process.provenance import write_text
from retain.train.run.parallel import Accelerator, Synchroniser, on_main_process

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
CHECKPOINT_FILE = "checkpoint.safetensors"
# Keys and sections that say how to start and where to write, not what is trained (`plan` and `resume`: of
# earlier runs).
START_KEYS = ("overwrite", "resume", "plan", "output", "tracker", "training.checkpoint_every")
# Advice where another run holds the folder.
OTHERWISE = "another `output` (a file STOP in the folder stops the other run)"

State = Literal["fresh", "resume", "finished"]


def inspect_run(folder: Path, config: Mapping[str, Any], *, overwrite: bool) -> State:
    """Decides how a run of this config would start in this folder; changes nothing. Model and documents are
    for `check_inputs`, once they are loaded. ValueError: the folder holds a run of another config."""
    if overwrite or not folder.exists():
        return "fresh"
    if not (folder / CONFIG_FILE).is_file():
        if (folder / METADATA_FILE).is_file():
            raise ValueError(
                f"{folder} holds a gate artifact and no {CONFIG_FILE}: choose another `output`, or pass "
                "overwrite=true."
            )
        return "fresh"
    if differ := _differences(read_mapping(folder / CONFIG_FILE), config):
        raise ValueError(
            f"{folder} holds a run of another config ({'; '.join(differ)}): choose another `output`, or "
            "pass overwrite=true to replace it."
        )
    if (folder / METADATA_FILE).is_file() and read_mapping(folder / RUN_FILE).get("finished", True):
        return "finished"
    return "resume" if latest(folder) else "fresh"


def _differences(earlier: Any, config: Mapping[str, Any]) -> list[str]:
    """`key: earlier -> now` for every leaf that differs, both sides as plain YAML values; not of `START_KEYS`
    and what is below them."""
    before, now = leaves(earlier), leaves(json.loads(json.dumps(config)))
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    bound = [key for key in keys if not any(f"{key}.".startswith(f"{name}.") for name in START_KEYS)]
    return [f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in bound]


@contextmanager
def locked(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Inside, the folder is this run's; every process enters, the first one holds the lock. ValueError: on
    every process, if another run holds it; says which."""
    with ExitStack() as stack:
        on_main_process(accelerator, lambda: stack.enter_context(lock_folder(folder, otherwise=OTHERWISE)))
        yield


def check_inputs(folder: Path, inputs: Mapping[str, str]) -> None:
    """Raises ValueError if the folder's run began with another model, other documents or other gates
    than `inputs` (the sha256 of each, by its name), or did not write down with which."""
    earlier = read_mapping(folder / RUN_FILE)
    differ = [
        f"{name}: sha256 {earlier.get(name, 'not recorded')} -> {now}"
        for name, now in inputs.items()
        if earlier.get(name) != now
    ]
    if differ:
        raise ValueError(
            f"{folder} holds a run of this config with another model or other documents "
            f"({'; '.join(differ)}): choose another `output`, or pass overwrite=true to replace it."
        )


def begin_(folder: Path, config: Mapping[str, Any], inputs: Mapping[str, str]) -> None:
    """Makes the folder ready for a fresh run; an older artifact stays until the new one replaces it;
    DiskError: the folder could not be written."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
        write_text(folder / RUN_FILE, json.dumps({**inputs, "finished": False}, indent=2) + "\n")
        (folder / LOG_FILE).unlink(missing_ok=True)
        text = yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False, allow_unicode=True)
        write_text(folder / CONFIG_FILE, text)


def finish_(folder: Path) -> None:
    """Writes down that the artifact is there, and drops the checkpoint."""
    with disk_errors(folder):
        record = {**read_mapping(folder / RUN_FILE), "finished": True}
        write_text(folder / RUN_FILE, json.dumps(record, indent=2) + "\n")
        (folder / CHECKPOINT_FILE).unlink(missing_ok=True)


def disk_errors(folder: Path) -> AbstractContextManager[None]:
    """Inside, an error of the disk becomes one that says what to do (`retain.process.disk`): the run can go
    on from the folder's checkpoint."""

    def goes_on() -> str:
        if kept := latest(folder):
            return (
                f"The last good checkpoint, of step {kept[0]} in {kept[1]}, is untouched, and {SAME_COMMAND} "
                "goes on from it."
            )
        return "There is no checkpoint yet: the same command starts anew."

    return disk.disk_errors(folder, key="output", goes_on=goes_on)


# With overwrite=true, the command that began a run throws it away.
SAME_COMMAND = "the same command (without overwrite=true)"


def latest(folder: Path) -> tuple[int, Path] | None:
    """The checkpoint of a run: (steps done, its file). ValueError: it is damaged."""
    path = folder / CHECKPOINT_FILE
    return (int(_state_of(path)["step"]), path) if path.is_file() else None


def _state_of(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, "pt") as file:
            state: dict[str, Any] = json.loads(file.metadata()["state"])
            return state
    except (SafetensorError, TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is no whole checkpoint ({error}): remove it, and the run begins anew."
        ) from error


def save_checkpoint(
    accelerator: Accelerator, folder: Path, step: int, synchroniser: Synchroniser, extra: Mapping[str, Any]
) -> None:
    """Replaces the checkpoint; on every process. `extra` is what the loop wants to find again, in plain JSON.
    DiskError: on every process, if the first one could not write; the last checkpoint is untouched."""
    path, state = folder / CHECKPOINT_FILE, {"step": step, "num_processes": accelerator.num_processes}

    def write() -> None:
        metadata = {"state": json.dumps({**state, "extra": extra})}
        with disk_errors(folder):
            os.replace(save_new(path, synchroniser.tensors(), metadata), path)

    on_main_process(accelerator, write)


def load_checkpoint(path: Path, synchroniser: Synchroniser) -> tuple[int, dict[str, Any]]:
    """Puts gates and optimiser where a checkpoint left them, on every process, and returns (steps done,
    `extra` of then). ValueError: it is damaged."""
    state = _state_of(path)
    synchroniser.load_(load_file(path))
    return state["step"], state["extra"]


def append_log(folder: Path, record: Mapping[str, Any]) -> None:
    """Adds a line; DiskError: it could not be written whole, and is dropped when the run resumes."""
    with disk_errors(folder), open(folder / LOG_FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


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
    """Drops the lines after the checkpoint from which the run goes on; DiskError: the log could not be
    written, and is as it was."""
    kept = [record for record in read_log(folder) if record["step"] <= steps_done]
    with disk_errors(folder):
        write_text(folder / LOG_FILE, "".join(json.dumps(record) + "\n" for record in kept))
