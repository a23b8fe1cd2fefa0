"""Train retention gates by distillation from a frozen language model: parse, build, run.

    accelerate launch train/distill.py --config configs/distill/reference.yaml [key=value ...]

In: a YAML (`DistillConfig` is its schema) and overrides. Out: a folder that `retain.load_gates` reads. The
one decision taken here: everything that can be wrong with the request is found before the first document
is looked at.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from tqdm import tqdm

from retain.config import load, to_mapping
from retain.gates import GATES, GateSet, build_gates
from retain.gates.store import save_gates
from retain.hf.model import describe, fingerprint
from retain.registry import lookup
from retain.train.checkpoint import begin_, check_inputs, describe_inputs, finish_, inspect_run
from retain.train.data import DataSettings, check_data, load_corpus
from retain.train.loop import Lesson, train
from retain.train.losses import LossSettings, check_losses
from retain.train.provenance import provenance
from retain.train.schedule import TrainingSettings, check_training
from retain.train.targets import TargetSettings, check_targets
from retain.train.teacher import check_documents, load_frozen


@dataclass(frozen=True)
class GateSettings:
    """Which gate.

    Args:
        family: a name in `retain.gates.GATES`.
        hidden: F, hidden width of an `mlp`; other families ignore it.
    """

    family: str = "mlp"
    hidden: int = 64


@dataclass(frozen=True)
class DistillConfig:
    """A run.

    Args:
        output: folder of the run and of the artifact.
        model: `reference:<seed>`, a local folder, or a hub name.
        dtype: precision of the frozen model (the gates are float32).
        revision: of the hub model.
        trust_remote_code: run code that comes with the checkpoint; off unless asked.
        seed: of documents, order, pairs and the gates' first weights.
        data: where documents come from.
        gate: which gate.
        target: which future the gates learn.
        loss: the two terms.
        training: how long, how fast, how often.
        tracker: `none` or `wandb`.
        overwrite: replace whatever run the folder holds.
        resume: go on with an unfinished run of the same config, model and documents.
    """

    output: str
    model: str = "reference:0"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    seed: int = 0
    data: DataSettings = field(default_factory=DataSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    target: TargetSettings = field(default_factory=TargetSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    tracker: Literal["none", "wandb"] = "none"
    overwrite: bool = False
    resume: bool = True


def check(config: DistillConfig, num_processes: int) -> None:
    """All that can be seen to be wrong without loading anything.

    Raises:
        ValueError: with every problem.
    """
    problems = []
    for part in (
        lambda: lookup(config.gate.family, GATES, what="gate family"),
        lambda: check_data(config.data),
        lambda: check_targets(config.target),
        lambda: check_losses(config.loss),
        lambda: check_training(config.training, num_processes),
    ):
        try:
            part()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


def make_accelerator(tracker: str) -> Accelerator:
    """The accelerator, unless the launcher started several processes that would each train alone.

    Raises:
        ValueError: WORLD_SIZE says several, accelerate says one; or the tracker's package is missing.
    """
    if tracker != "none" and find_spec(tracker) is None:
        raise ValueError(f'tracker={tracker} needs a package: pip install "retain[{tracker}]".')
    accelerator = Accelerator(log_with=None if tracker == "none" else tracker)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        raise ValueError(
            f"the launcher started {world} processes, and accelerate sees {accelerator.num_processes}: "
            "without a GPU, set "
            "ACCELERATE_USE_CPU=true in the environment (see train/README.md)."
        )
    return accelerator


def distill(config: DistillConfig, accelerator: Accelerator | None = None) -> Path:
    """Train, and write the artifact.

    Args:
        config: the run.
        accelerator: of this process; made if None.

    Returns:
        the artifact's folder.

    Raises:
        ValueError, FileNotFoundError: the request cannot be carried out; nothing has been written.
        FloatingPointError: training diverged; the last checkpoint is kept.
    """
    accelerator = accelerator or make_accelerator(config.tracker)
    check(config, accelerator.num_processes)
    folder, mapping = Path(config.output), to_mapping(config)
    state = inspect_run(folder, mapping, overwrite=config.overwrite, resume=config.resume)
    frozen = load_frozen(
        config.model, dtype=config.dtype, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    frozen.model.to(accelerator.device)
    gates = _fresh_gates(config, frozen.model).to(accelerator.device)
    corpus = load_corpus(
        config.data,
        shortest=config.target.horizon,
        seed=config.seed,
        encode=frozen.encode,
        progress=accelerator.is_main_process,
    )
    base = fingerprint(frozen.model)
    inputs = describe_inputs(str(base["sha256"]), corpus)
    if state != "fresh":
        check_inputs(folder, inputs)
    if state == "finished":
        if accelerator.is_main_process:
            finish_(folder)
        accelerator.print(
            f"{folder} holds the finished run of this config, model and documents: nothing to do "
            "(overwrite=true trains again)."
        )
        return folder
    check_documents(frozen.model.config, (*corpus.train, *corpus.held_out))
    if "own" not in config.target.sources and not all(
        d.appendix_ids for d in (*corpus.train, *corpus.held_out)
    ):
        raise ValueError(
            "target.sources=[appendix] needs a question and answer after every document, and some have "
            "none: add `own`, or "
            "give rows with context, question and answer."
        )
    accelerator.wait_for_everyone()  # every process has looked at the folder before one of them changes it
    if state == "fresh" and accelerator.is_main_process:
        begin_(folder, mapping, inputs)
    accelerator.wait_for_everyone()
    if config.tracker != "none":
        accelerator.init_trackers("retain-distill", config=_flat(mapping))
    lesson = Lesson(
        frozen, corpus, config.target, config.loss, config.training, config.seed, accelerator.device
    )
    accelerator.print(
        f"{config.model}: {len(gates.layers)} layers, {sum(p.numel() for p in gates.parameters())} gate "
        "parameters, "
        f"{len(corpus.train)} documents + {len(corpus.held_out)} held out, {accelerator.num_processes} "
        "process(es) on "
        f"{accelerator.device.type}" + (", going on from a checkpoint" if state == "resume" else "")
    )
    summary = train(gates, lesson, accelerator, folder, resume=state == "resume")
    if accelerator.is_main_process:
        save_gates(
            gates,
            folder,
            fingerprint=base,
            metadata=_metadata(config, summary, len(corpus.train)),
        )
        finish_(folder)
        tqdm.write(f"gates: {folder} (retain.load_gates({str(folder)!r}, model))", file=sys.stdout)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return folder


def _fresh_gates(config: DistillConfig, model: Any) -> GateSet:
    dims = {spec.layer_idx: {"E": spec.hidden_size, "H": spec.num_kv_heads} for spec in describe(model)}
    if config.gate.family == "mlp":
        dims = {layer: {**layer_dims, "F": config.gate.hidden} for layer, layer_dims in dims.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return build_gates(config.gate.family, dims)


def _metadata(config: DistillConfig, summary: dict[str, Any], num_documents: int) -> dict[str, Any]:
    """What the artifact says about its making."""
    mapping = to_mapping(config)
    return {
        "base_model": config.model,
        "base_revision": config.revision,
        "input_point": "attention input, after the input layer norm",
        "target": mapping["target"],
        "protected_window": config.target.horizon,
        "loss": mapping["loss"],
        "data": {**mapping["data"], "documents_used": num_documents},
        "calibration": None,
        "training": {**mapping["training"], **summary, "seed": config.seed},
        "config": mapping,
        "provenance": provenance(),
    }


def _flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a.b": value}` with values that trackers take."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, int | float | str) else str(value)
    return flat


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="train/distill.py", description="Train retention gates by distillation."
    )
    parser.add_argument(
        "--config", required=True, metavar="YAML", help="for instance configs/distill/reference.yaml"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for instance model=reference:1 training.steps=100"
    )
    parsed = parser.parse_args(arguments)
    try:
        distill(load(parsed.config, DistillConfig, parsed.overrides))
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
