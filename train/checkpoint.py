"""A run's folder: what is in it, whether it may be written to, and how a killed run finds its place again.

In: a folder, the resolved config, and what model and documents it led to. Out: whether the run is fresh, to
be resumed, or finished; checkpoints; the log.

    run.json                hashes of the base model and of the documents, written before the config
    config.yaml             the resolved config, written before the first step
    log.jsonl               one line a step, one more whenever the held-out documents are looked at
    checkpoints/step-N/     gates, optimiser and random states after step N; removed when the run is finished
    gates.safetensors, gates.json    the artifact; there only once a run has finished

The one decision taken here: a run is known by its config, and by the model and the documents that the config
named when it began. The same run goes on where it stopped, or has nothing left to do; another one never
touches the folder unless `overwrite=true` is said.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from accelerate import Accelerator

from retain.gates.store import METADATA_FILE, write_beside
from retain.train.data import Corpus

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
CHECKPOINTS = "checkpoints"
# What is being deleted is renamed to this first: a kill in the middle leaves no half of a checkpoint that
# looks whole.
DELETED = "checkpoints.deleted"
# Keys that say how to start, not what is trained.
START_KEYS = ("overwrite", "resume")

State = Literal["fresh", "resume", "finished"]


def inspect_run(folder: Path, config: Mapping[str, Any], *, overwrite: bool, resume: bool) -> State:
    """What starting this config in this folder would mean; changes nothing. Model and documents are for
    `check_inputs`, once they are loaded.

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
    earlier = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    differ = _differences(earlier, config)
    if differ:
        raise ValueError(
            f"{folder} holds a run of another config ({'; '.join(differ)}): choose another `output`, or "
            "pass overwrite=true "
            "to replace it."
        )
    if (folder / METADATA_FILE).is_file() and not (folder / CHECKPOINTS).exists():
        return "finished"
    if latest(folder) is None:
        return "fresh"
    if not resume:
        raise ValueError(
            f"{folder} holds an unfinished run of this config: drop resume=false to go on, or pass "
            "overwrite=true to start anew."
        )
    return "resume"


def _differences(earlier: Any, config: Mapping[str, Any]) -> list[str]:
    """`key: earlier -> now` for every leaf that differs, both sides as plain YAML values."""
    before, now = _leaves(earlier), _leaves(json.loads(json.dumps(config)))
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in keys if key not in START_KEYS]


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        parts = [_leaves(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in value.items()]
        return {key: leaf for part in parts for key, leaf in part.items()}
    return {prefix: value}


def describe_inputs(model_sha256: str, corpus: Corpus) -> dict[str, str]:
    """What a run is trained on, as hashes.

    Args:
        model_sha256: of the base model's fingerprint.
        corpus: hashed token by token, in its order, which decides what each step reads.

    Returns:
        `{"base model": sha256, "documents": sha256}`.
    """
    digest = hashlib.sha256()
    for side in (corpus.train, corpus.held_out):
        digest.update(np.int64(len(side)).tobytes())
        for document in side:
            for ids in (document.context_ids, document.appendix_ids):
                digest.update(np.array([len(ids), *ids], dtype="<i8").tobytes())
    return {"base model": model_sha256, "documents": digest.hexdigest()}


def check_inputs(folder: Path, inputs: Mapping[str, str]) -> None:
    """Refuse to take a folder's run for this one if its model or its documents were others.

    Args:
        folder: of a run that is to be resumed, or finished.
        inputs: `describe_inputs` of the model and the documents that the config leads to now.

    Raises:
        ValueError: they differ from what the run began with, or that was not written down.
    """
    path = folder / RUN_FILE
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    differ = [
        f"{name}: sha256 {earlier.get(name, 'not recorded')} -> {now}"
        for name, now in inputs.items()
        if earlier.get(name) != now
    ]
    if differ:
        raise ValueError(
            f"{folder} holds a run of this config on another model or other documents ({'; '.join(differ)}): "
            "choose another `output`, or pass overwrite=true to replace it."
        )


def begin_(folder: Path, config: Mapping[str, Any], inputs: Mapping[str, str]) -> None:
    """Make the folder ready for a fresh run; an older artifact stays until the new one replaces it."""
    finish_(folder)
    (folder / CHECKPOINTS).mkdir(parents=True)
    (folder / LOG_FILE).unlink(missing_ok=True)
    text = json.dumps(dict(inputs), indent=2) + "\n"
    os.replace(write_beside(folder / RUN_FILE, text.encode()), folder / RUN_FILE)
    text = yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False, allow_unicode=True)
    os.replace(write_beside(folder / CONFIG_FILE, text.encode()), folder / CONFIG_FILE)


def finish_(folder: Path) -> None:
    """Drop the checkpoints, and what is left of those that a killed run was dropping."""
    deleted = folder / DELETED
    if deleted.exists():
        shutil.rmtree(deleted)
    if (folder / CHECKPOINTS).exists():
        os.replace(folder / CHECKPOINTS, deleted)
        shutil.rmtree(deleted)


def latest(folder: Path) -> tuple[int, Path] | None:
    """The newest complete checkpoint: (steps done, its folder)."""
    complete = [
        (int(path.name.removeprefix("step-")), path)
        for path in (folder / CHECKPOINTS).glob("step-*")
        if path.name.removeprefix("step-").isdigit()
    ]
    return max(complete, default=None)


def save_checkpoint(accelerator: Accelerator, folder: Path, steps_done: int) -> None:
    """Write the state of all processes beside, rename it, and only then remove the one before it."""
    final = folder / CHECKPOINTS / f"step-{steps_done:06d}"
    beside = final.with_name(f"{final.name}.new")
    if accelerator.is_main_process:
        shutil.rmtree(beside, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(beside))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(beside, final)
        for path in (folder / CHECKPOINTS).iterdir():
            if path != final:
                shutil.rmtree(path)
    accelerator.wait_for_everyone()


def append_log(folder: Path, record: Mapping[str, Any]) -> None:
    """One line more; what is on disk is complete up to the last step."""
    with open(folder / LOG_FILE, "a", encoding="utf-8") as file:
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
    """Drop what was logged after the checkpoint from which the run goes on."""
    kept = [record for record in read_log(folder) if record["step"] <= steps_done]
    text = "".join(json.dumps(record) + "\n" for record in kept)
    os.replace(write_beside(folder / LOG_FILE, text.encode()), folder / LOG_FILE)
