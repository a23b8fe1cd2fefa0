"""Train retention gates by distillation from a frozen language model: parse, build, run.

    accelerate launch train/distill.py --config configs/distill/reference.yaml [--plan] [key=value ...]

In: a YAML (`DistillConfig` is its schema) and overrides. Out: a folder that `retain.load_gates` reads. The
one decision taken here: everything that can be wrong with the request is found before the first document
is looked at, and what it will cost is said before it is spent.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from retain.config import load, to_mapping
from retain.evidence import Evidence
from retain.gates import GATES, GateSet, build_gates, dims_for
from retain.gates.store import save_gates
from retain.hf.gates import load_gates
from retain.hf.lookahead import lookahead_gates, observe_ahead
from retain.hf.model import describe, fingerprint
from retain.registry import lookup
from retain.train.branches import readings_of, row_tokens
from retain.train.calibration import CalibrationSettings, LayerLook, calibrate_, look_at
from retain.train.card import write_card
from retain.train.checkpoint import (
    begin_,
    check_inputs,
    describe_inputs,
    disk_errors,
    finish_,
    inspect_run,
)
from retain.train.data import DataSettings, Document, check_data, load_corpus
from retain.train.features import CachedExamples, FeatureSettings, fill_, recipe_of
from retain.train.local import LayerLocal, TeacherExamples, check_unit
from retain.train.lookahead import Lookahead
from retain.train.loop import Lesson, Objective, train
from retain.train.losses import LossSettings, check_losses
from retain.train.noop import noop_report
from retain.train.parallel import is_sharded, shard_frozen_, sharding_of
from retain.train.plan import (
    Plan,
    PlanSettings,
    check_plan,
    device_here,
    model_shape,
    plan_of,
    shape_by_name,
    work_of,
)
from retain.train.progress import check_tracker, tracker_options
from retain.train.provenance import provenance
from retain.train.schedule import TrainingSettings, check_training
from retain.train.soft import EndToEnd, SoftSettings, check_soft
from retain.train.targets import TargetSettings, check_targets, layer_target, target_unit
from retain.train.teacher import Frozen, View, check_documents, load_frozen, walk

# Documents on which a finished soft stage is asked whether its gates do anything.
NOOP_DOCUMENTS = 8


@dataclass(frozen=True)
class GateSettings:
    """Which gate.

    Args:
        family: a name in `retain.gates.GATES`.
        settings: of the family, by the names of its constructor (an `mlp` has F, its hidden width); what is
            left out has the family's default.
    """

    family: str = "mlp"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DistillConfig:
    """A run.

    Args:
        output: folder of the run and of the artifact.
        stage: `local` (each layer's gate learns its own target), `end_to_end` (soft gates in the model's own
            attention, a loss on what the model says) or `lookahead` (tokens that look for the answer).
        model: `reference:<seed>`, a local folder, or a hub name.
        dtype: precision of the frozen model (the gates are float32).
        revision: of the hub model.
        trust_remote_code: run code that comes with the checkpoint; off unless asked.
        device_map: of transformers (`auto` spreads the frozen model over this process's devices).
        quantization: settings of transformers' quantisation, as its config has them (`quant_method`, ...).
        chunk: tokens of the frozen model's token-wise parts at a time; bounds the memory, changes no number.
        initial: an artifact whose gates the run begins with (of the same family); null: fresh ones.
        seed: of documents, order, pairs and the gates' first weights.
        data: where documents come from.
        gate: which gate.
        target: which future the gates learn.
        loss: terms of the layer-local stage.
        soft: the end-to-end stage.
        training: how long, how fast, how often.
        calibration: what is fitted after training, on held-out documents.
        features: whether the teacher's answers are kept on disk, for many epochs.
        plan: what device to plan for.
        tracker: `none`, `wandb` or `tensorboard`.
        overwrite: replace whatever run the folder holds.
        resume: go on with an unfinished run of the same config, model and documents.
    """

    output: str
    stage: Literal["local", "end_to_end", "lookahead"] = "local"
    model: str = "reference:0"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    device_map: str | None = None
    quantization: dict[str, Any] | None = None
    chunk: int | None = 8192
    initial: str | None = None
    seed: int = 0
    data: DataSettings = field(default_factory=DataSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    target: TargetSettings = field(default_factory=TargetSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    soft: SoftSettings = field(default_factory=SoftSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    features: FeatureSettings = field(default_factory=FeatureSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
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
        lambda: _check_stage(config),
        lambda: check_data(config.data),
        lambda: check_targets(config.target),
        lambda: check_losses(config.loss),
        lambda: check_soft(config.soft),
        lambda: check_plan(config.plan),
        lambda: check_training(config.training, num_processes),
    ):
        try:
            part()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


def _check_stage(config: DistillConfig) -> None:
    gate = lookup(config.gate.family, GATES, what="gate family")
    if (config.stage == "lookahead") != (gate.extension is not None):
        raise ValueError(
            f"stage={config.stage} does not train gates of family {config.gate.family!r}: the stage "
            "`lookahead` and the family `lookahead` go together, and with nothing else."
        )
    if config.features.folder is not None and (
        config.stage != "local" or "layer_output" in config.loss.terms
    ):
        raise ValueError(
            "features.folder keeps inputs and targets of the layer-local stage; leave it out with "
            f"stage={config.stage}"
            + (
                " and the loss term layer_output, which looks at the layer itself."
                if config.stage == "local"
                else "."
            )
        )
    if config.device_map is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"device_map={config.device_map} spreads one model over the devices of one process, and several "
            "processes were started: start one, or leave device_map out."
        )


def make_accelerator(tracker: str, output: str | None = None) -> Accelerator:
    """The accelerator, unless the launcher started several processes that would each train alone.

    Raises:
        ValueError: WORLD_SIZE says several, accelerate says one; or the tracker's package is missing.
    """
    check_tracker(tracker)
    accelerator = Accelerator(**tracker_options(tracker, Path(output or ".")))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        raise ValueError(
            f"the launcher started {world} processes, and accelerate sees {accelerator.num_processes}: "
            "without a GPU, set "
            "ACCELERATE_USE_CPU=true in the environment (see train/README.md)."
        )
    return accelerator


def plan_run(config: DistillConfig, accelerator: Accelerator) -> Plan:
    """What the run would take, without reading weights or documents: each document is taken to be as long as
    `data.max_tokens` allows.

    Args:
        config: the run.
        accelerator: of this process; says how many share it, and how.

    Raises:
        ValueError: the model's config cannot be read.
    """
    shape = shape_by_name(
        config.model,
        dtype=config.dtype,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    sizes = {layer: {"E": shape.E, "H": shape.H, "Q": shape.Q, "D": shape.D} for layer in range(shape.gated)}
    with torch.device("meta"):
        gates = build_gates(config.gate.family, dims_for(config.gate.family, sizes, config.gate.settings))
    longest = config.data.max_tokens
    document = Document(tuple(range(longest)), tuple(range(config.data.max_appendix_tokens or 64)))
    row = row_tokens(document, config.target)
    work = work_of(
        config,
        gates,
        [(longest, row - longest)] * max(1, config.data.documents),
        accelerator.num_processes,
        inputs=gates.inputs,
        chunk=config.chunk,
        sharding=_sharding(config, accelerator),
    )
    dtype = {2: torch.bfloat16, 4: torch.float32}[shape.dtype_bytes]
    return plan_of(shape, work, device_here(accelerator.device, dtype, config.plan))


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
        OSError: the disk is full; the last checkpoint and an earlier artifact are whole.
        StopRequested: a signal asked for it; a checkpoint was written.
    """
    accelerator = accelerator or make_accelerator(config.tracker, config.output)
    check(config, accelerator.num_processes)
    folder, mapping = Path(config.output), to_mapping(config)
    state = inspect_run(folder, mapping, overwrite=config.overwrite, resume=config.resume)
    frozen = load_frozen(
        config.model,
        dtype=config.dtype,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        device_map=config.device_map,
        quantization=config.quantization,
        chunk=config.chunk,
    )
    gates = _fresh_gates(config, frozen.model)
    score_unit = check_unit(gates, config.target) if config.stage == "local" else None
    corpus = load_corpus(
        config.data,
        shortest=config.target.horizon,
        seed=config.seed,
        batch_documents=config.training.batch_documents,
        encode=frozen.encode,
        chat=frozen.chat,
        check=_checker(config, frozen),
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
    shape, layers = model_shape(frozen.model, config.model), describe(frozen.model)
    shard_frozen_(frozen.model, accelerator)
    for spec in layers:
        gates[spec.layer_idx].to(next(spec.module.parameters()).device)
    objective = _objective(config, gates, frozen)
    if accelerator.is_main_process:
        known = corpus.documents_of(0) if corpus.num_documents is None else corpus.train
        rows = [
            (len(one.context_ids), row_tokens(one, config.target) - len(one.context_ids)) for one in known
        ]
        work = work_of(
            config,
            gates,
            rows,
            accelerator.num_processes,
            inputs=gates.inputs,
            chunk=frozen.chunk,
            sharding=_sharding(config, accelerator),
        )
        device = device_here(accelerator.device, frozen.model.dtype, config.plan)
        print(plan_of(shape, work, device).text())
    accelerator.wait_for_everyone()  # every process has looked at the folder before one of them changes it
    if state == "fresh" and accelerator.is_main_process:
        with disk_errors(folder):
            begin_(folder, mapping, inputs)
    accelerator.wait_for_everyone()
    if config.tracker != "none":
        accelerator.init_trackers("retain-distill", config=_flat(mapping))
    documents = "a stream of" if corpus.num_documents is None else corpus.num_documents
    accelerator.print(
        f"{config.model}: {len(gates.layers)} layers, {sum(p.numel() for p in gates.parameters())} gate "
        f"parameters, {documents} documents + {len(corpus.held_out)} held out, {accelerator.num_processes} "
        f"process(es) on {accelerator.device.type}"
        + (", going on from a checkpoint" if state == "resume" else "")
    )
    lesson = Lesson(
        _with_features(config, objective, frozen, corpus, base, accelerator),
        corpus,
        config.training,
        config.data.pack_tokens,
        lambda document: row_tokens(document, config.target),
        lockstep=is_sharded(frozen.model),
        prepare=config.initial is None,
    )
    summary = train(lesson, accelerator, folder, resume=state == "resume")
    metadata = {**_metadata(config, summary, corpus), "score_unit": score_unit}
    metadata |= _after(config, gates, frozen, corpus)
    if accelerator.is_main_process:
        with disk_errors(folder):
            save_gates(gates, folder, fingerprint=base, metadata=metadata)
            write_card(folder, command=_command(), say=tqdm.write)
        finish_(folder)
        tqdm.write(f"gates: {folder} (retain.load_gates({str(folder)!r}, model))", file=sys.stdout)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return folder


def _sharding(config: DistillConfig, accelerator: Accelerator) -> Any:
    """How the frozen weights lie, in the plan's words."""
    if config.device_map is not None:
        return "device_map"
    ways: Mapping[str, Any] = {"none": "replicated", "fsdp": "fsdp2", "zero3": "zero3"}
    return ways[sharding_of(accelerator)]


def _fresh_gates(config: DistillConfig, model: nn.Module) -> GateSet:
    """Gates to begin with: fresh ones, or those of an artifact."""
    family = config.gate.family
    if GATES[family].extension is not None:
        gates: GateSet = lookahead_gates(model, **config.gate.settings, seed=config.seed)
    else:
        sizes = {
            spec.layer_idx: {
                "E": spec.hidden_size,
                "H": spec.num_kv_heads,
                "Q": spec.num_heads,
                "D": spec.head_dim,
            }
            for spec in describe(model)
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            gates = build_gates(family, dims_for(family, sizes, config.gate.settings))
    if config.initial is None:
        return gates
    earlier = load_gates(config.initial, model)
    if earlier.family != family or any(earlier[i].dims() != gates[i].dims() for i in gates.layers):
        raise ValueError(
            f"initial={config.initial} holds gates of family {earlier.family!r} with "
            f"{earlier[earlier.layers[0]].dims()}, and gate asks for {family!r} with "
            f"{gates[gates.layers[0]].dims()}: state the same family and settings."
        )
    if len(earlier.calibrators):
        earlier.calibrators = nn.ModuleDict()  # of scores that will not be these any more
    earlier.metadata = {}
    return earlier.requires_grad_(True)


def _checker(config: DistillConfig, frozen: Frozen) -> Any:
    """What every document has to be, asked as it is read."""
    alone = set(config.target.sources) == {"appendix"}

    def check_one(document: Document) -> None:
        check_documents(frozen.model.config, [document])
        if alone and not document.appendix_ids and config.stage != "end_to_end":
            raise ValueError(
                f"target.sources={config.target.sources} needs a question and answer after every document, "
                f"and {document.origin or 'one'} has none: add `own`, or give rows with context, question "
                "and answer."
            )

    return check_one


def _objective(config: DistillConfig, gates: GateSet, frozen: Frozen) -> Objective:
    if config.stage == "end_to_end":
        return EndToEnd(
            gates, frozen, config.soft, config.target, steps=config.training.steps, seed=config.seed
        )
    if config.stage == "lookahead":
        return Lookahead(gates, frozen, config.target, seed=config.seed)
    return LayerLocal(gates, frozen, config.target, config.loss, seed=config.seed)


def _with_features(
    config: DistillConfig,
    objective: Objective,
    frozen: Frozen,
    corpus: Any,
    base: Mapping[str, Any],
    accelerator: Accelerator,
) -> Objective:
    """The same objective, reading the teacher's answers from disk where the config says so."""
    if config.features.folder is None:
        return objective
    if corpus.num_documents is None:
        raise ValueError(
            "features.folder keeps every document's features, and data.streaming=true may have no end: set "
            "data.streaming=false."
        )
    folder, gates = Path(config.features.folder), objective.gates
    recipe = recipe_of(
        to_mapping(config), model_sha256=str(base["sha256"]), gate_inputs=gates.inputs, layers=gates.layers
    )
    with disk_errors(folder):
        fill_(
            folder,
            [*corpus.train, *corpus.held_out],
            TeacherExamples(gates, frozen, config.target),
            recipe,
            config.features,
            process=accelerator.process_index,
            num_processes=accelerator.num_processes,
            say=accelerator.print,
        )
    accelerator.wait_for_everyone()
    cached = CachedExamples(folder, recipe)
    return LayerLocal(gates, frozen, config.target, config.loss, seed=config.seed, examples=cached)


def _after(config: DistillConfig, gates: GateSet, frozen: Frozen, corpus: Any) -> dict[str, Any]:
    """What is fitted and asked once training is over: every process does the same, so that a sharded model
    walks in step."""
    reports: dict[str, Any] = {"calibration": None}
    if config.stage == "end_to_end" and corpus.held_out:
        reports["noop"] = noop_report(gates, frozen, corpus.held_out[:NOOP_DOCUMENTS], config.soft)
    if config.calibration.wanted and corpus.held_out:
        reports["calibration"] = _calibrate_(config, gates, frozen, corpus.held_out)
    return reports


def _calibrate_(
    config: DistillConfig, gates: GateSet, frozen: Frozen, documents: Sequence[Document]
) -> dict[str, Any]:
    """Fit on held-out documents what makes scores comparable.

    The unit is risk, whatever the gates learned: their own target where it is one, else the default's. A
    decay is no number that a curve could turn into risk, so that ageing gates keep theirs.
    """
    settings, target = config.calibration, config.target
    if target_unit(target) != "risk" or target.granularity != "head" or config.stage != "local":
        target = TargetSettings(horizon=target.horizon, chunk=target.chunk)
    if gates.ages:
        settings = replace(settings, kind="none")
    looks = []
    for document in documents:
        own: dict[int, LayerLook] = {}
        shown: dict[int, Evidence] = {}
        if gates.extension is not None:
            ids_BT = torch.tensor([document.context_ids], device=frozen.model.device)
            shown = {layer.layer_idx: layer for layer in observe_ahead(frozen.model, gates, ids_BT)}

        def see(views: list[View], own: dict[int, LayerLook] = own, shown: Any = shown) -> None:
            for view in views:
                target_HT, reached_HT = layer_target(view, target)
                evidence = shown.get(view.layer_idx, view.document)
                own[view.layer_idx] = look_at(gates, evidence, target_HT, reached_HT.any(0), settings)

        walk(frozen, readings_of([document], target, frozen), see, wanted=gates.inputs)
        looks.append(own)
    return calibrate_(gates, looks, settings)


def _metadata(config: DistillConfig, summary: dict[str, Any], corpus: Any) -> dict[str, Any]:
    """What the artifact says about its making."""
    mapping = to_mapping(config)
    used = corpus.num_documents
    return {
        "base_model": config.model,
        "base_revision": config.revision,
        "stage": config.stage,
        "gate": mapping["gate"],
        "target": mapping["target"],
        "protected_window": config.soft.protected if config.stage == "end_to_end" else config.target.horizon,
        "loss": mapping["loss"] if config.stage == "local" else None,
        "soft": mapping["soft"] if config.stage == "end_to_end" else None,
        "data": {
            **mapping["data"],
            "documents_used": used if used is not None else sum(summary["documents_of_process"]),
            "held_out_used": len(corpus.held_out),
            "sha256": corpus.describe(),
        },
        "training": {**mapping["training"], **summary, "seed": config.seed},
        "config": mapping,
        "command": _command(),
        "provenance": provenance(),
    }


def _command() -> str:
    """How this process was started, as one types it."""
    return "accelerate launch " + shlex.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])


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
        "--plan", action="store_true", help="print what the run would take in memory and time, and stop"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for instance model=reference:1 training.steps=100"
    )
    parsed = parser.parse_args(arguments)
    try:
        config = load(parsed.config, DistillConfig, parsed.overrides)
        if parsed.plan:
            accelerator = make_accelerator("none")
            check(config, accelerator.num_processes)
            accelerator.print(plan_run(config, accelerator).text())
        else:
            distill(config)
    except (ValueError, OSError, FloatingPointError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
