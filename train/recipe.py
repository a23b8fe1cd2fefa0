"""Defines the config of a run and checks it: model, documents, gate, target, loss, stage, calibration.

Target, loss, gate, stage and calibration are separate sections, so that a published recipe is one file and a
variant of it is one line. All problems are reported in one message.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import field
from typing import Any, Literal

import torch

from retain.config import Whole
from retain.gates import GATES, build_gates, dims_for
from retain.hf.intercept.lookahead_pass import lookahead_gates
from retain.hf.training.block_reader import forward_of
from retain.models.named import Precision
from retain.process.registry import lookup, suggest
from retain.process.removed import hint_of
from retain.train.calibration.fit import CalibrationSettings
from retain.train.data.branches import check_document
from retain.train.data.document import Document
from retain.train.data.settings import DataSettings, check_data
from retain.train.objectives.case import LossSettings
from retain.train.objectives.fit import check_fit, check_losses, check_unit
from retain.train.objectives.targets import TargetSettings, check_targets
from retain.train.run.schedule import TrainingSettings
from retain.train.settings import refuse, section
from retain.train.soft_stage import SoftSettings, check_soft
from retain.train.stage import StageName
from retain.train.teacher import Frozen

# Of the layer that settings are tried on.
SMALL = {"E": 64, "H": 2, "Q": 4, "D": 16}


@section
class GateSettings:
    """Which gate."""

    family: str = "mlp"
    """A name in `retain.gates.GATES`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the family, by the names of its constructor (an `mlp` has F, its hidden width); what is left out has
    the family's default."""


@section
class DistillConfig:
    """A run."""

    output: str
    """Folder of the run and of the artifact."""
    stage: StageName = "local"
    """`local` (each layer's gate learns its own target), `end_to_end` (soft gates in the model's own
    attention, a loss on what the model says) or `lookahead` (tokens that look for the answer)."""
    model: str = "reference:0"
    """`reference:0`, a local folder, or a hub name."""
    dtype: Precision = "auto"
    """Precision of the frozen model (the gates are float32); `auto`: the checkpoint's, and float32 on a CPU
    that has no instructions for that."""
    revision: str | None = None
    """Of the hub model."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint; off unless asked."""
    device_map: str | None = None
    """Of transformers (`auto` spreads the frozen model over this process's devices)."""
    quantization: dict[str, Any] | None = None
    """Settings of transformers' quantisation, as its config has them (`quant_method`, ...)."""
    seed: Whole = 0
    """Of documents, order, pairs and the gates' first weights."""
    data: DataSettings = field(default_factory=DataSettings)
    """Where documents come from."""
    gate: GateSettings = field(default_factory=GateSettings)
    """Which gate."""
    target: TargetSettings = field(default_factory=TargetSettings)
    """Which future the gates learn."""
    loss: LossSettings = field(default_factory=LossSettings)
    """Terms of the layer-local stage."""
    soft: SoftSettings = field(default_factory=SoftSettings)
    """The end-to-end stage."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """How long, how fast, how often."""
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    """What is fitted after training, on held-out documents."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """`none`, `wandb` or `tensorboard`."""
    overwrite: bool = False
    """Replace whatever run the folder holds."""


def check(config: DistillConfig, num_processes: int) -> None:
    """Raises ValueError with every problem that can be seen without loading anything."""
    problems: list[str] = []
    for part in (
        lambda: _check_gate(config),
        lambda: _check_start(config, num_processes),
        lambda: check_data(config.data),
        lambda: check_targets(config.target),
        lambda: check_losses(config.loss),
        lambda: check_soft(config.soft),
    ):
        try:
            part()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


def _check_start(config: DistillConfig, num_processes: int) -> None:
    longest, horizon = max(config.data.lengths or (config.data.max_tokens,)), config.target.horizon
    documents = config.training.batch_documents
    refuse(
        (
            longest <= horizon,
            f"data.max_tokens or lengths={longest} and target.horizon={horizon}: no context would be longer "
            "than the horizon, and nearer entries are never evicted",
        ),
        (
            documents % num_processes,
            f"training.batch_documents={documents} must be a multiple of the {num_processes} processes",
        ),
        (
            config.calibration.kind != "none" and config.data.held_out == 1,
            "data.held_out=1: calibration fits on one half of the held-out documents and reports on the "
            "other. Hold out two at least, none (then nothing is calibrated), or set calibration.kind=none",
        ),
        (
            config.device_map is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1,
            f"device_map={config.device_map} spreads one model over the devices of one process, and several "
            "processes were started: start one, or leave device_map out",
        ),
    )


def _check_gate(config: DistillConfig) -> None:
    """Makes gates of a small model, without numbers, and checks that they can learn this target by these
    terms."""
    family, settings = config.gate.family, dict(config.gate.settings)
    gate = lookup(family, GATES, what="gate family")
    extension = gate.extension
    if (config.stage == "lookahead") != (extension is not None):
        raise ValueError(
            f"stage={config.stage} does not train gates of family {family!r}: the stage `lookahead` and the "
            "family `lookahead` go together, and with nothing else."
        )
    try:
        if extension is not None:
            known = inspect.signature(lookahead_gates).parameters.keys() - {"model", "seed"}
            for name in settings.keys() - known:
                raise ValueError(
                    f"there is no setting {name!r}{hint_of(f'settings.{name}') or suggest(name, known)}"
                )
        with torch.device("meta"):
            if extension is None:
                build_gates(family, dims_for(family, {0: SMALL}, settings))
            else:
                extension(E=SMALL["E"], modules={}, **settings)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"gate.settings={config.gate.settings}: {str(error).splitlines()[0]}") from error
    if config.stage == "local":
        check_fit(config.loss, gate)
        check_unit(gate, config.target)


def check_reading(config: DistillConfig, frozen: Frozen, *, sharded: bool) -> None:
    """Raises ValueError for sources that the model cannot be read with: several branches behind recurrent
    layers; and, where the model is `sharded` and every process must run the same number of forwards, a number
    that depends on the documents."""
    sources = config.target.sources
    one_branch = len({*sources} - {"own"}) <= 1
    if "repeat" in sources:
        one_branch &= config.data.max_tokens <= config.target.repeat_chunk
    instead = "a sharded model must be read in lockstep: launch with configs/accelerate/ddp.yaml"
    refuse(
        (
            sharded and "continuation" in sources,
            "target.sources has `continuation`, which each process generates at its own length, and "
            f"{instead}, or write the continuations into the data as answers (context, question, answer)",
        ),
        (
            sharded and (config.stage == "lookahead" or forward_of(frozen.layout) != "row"),
            "the stage `lookahead`, recurrent layers and rotary embeddings that change with the length read "
            f"each document in forwards of its own, and {instead}",
        ),
        (
            forward_of(frozen.layout) == "branch" and not one_branch,
            f"target.sources=[{', '.join(sources)}]: this model has recurrent layers, which read at most one "
            "branch behind a document. Take own and one other source (repeat: with target.repeat_chunk at "
            "data.max_tokens or more)",
        ),
    )


def document_check(config: DistillConfig, frozen: Frozen) -> Callable[[Document], None]:
    """Returns the check that every document passes as it is read."""
    alone = set(config.target.sources) == {"appendix"}

    def check_one(document: Document) -> None:
        name = document.origin or "a document"
        check_document(document, frozen, config.target, name)
        if alone and not document.appendix_ids and config.stage != "end_to_end":
            raise ValueError(
                f"target.sources={config.target.sources} needs a question and answer after every document, "
                f"and {name} has none: add `own`, or give rows with context, question and answer."
            )

    return check_one
