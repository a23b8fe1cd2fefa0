"""Trains retention gates by distillation from a frozen language model: parses, builds, runs.

    retain train MODEL DATA [--dry-run] [key=value ...]
    accelerate launch --quiet --config_file configs/accelerate/one_process.yaml \\
        train/distill.py --config configs/distill/reference.yaml [--dry-run] [key=value ...]

`DistillConfig` is the schema of the YAML; the output is a folder that `retain.load_gates` reads. A request is
checked whole before the first document is read. `--dry-run` makes one real step and says what it took.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from retain.process.command import parse_first
from retain.train.arguments import distill_parser, recipe_of

if __name__ == "__main__":
    parse_first(distill_parser())

from torch import nn
from tqdm import tqdm

from retain.config import leaves, load, to_mapping
from retain.gates import GateSet
from retain.gates.artifact import save_gates
from retain.hf.model.decoder import describe
from retain.hf.model.gates import load_gates, new_gates
from retain.hf.model.identity import fingerprint
from retain.models.named import commit_of
from retain.models.unloaded import Precision, named_config, precision_of
from retain.process.half_precision import multiplies
from retain.train.data.branches import row_tokens
from retain.train.data.corpus import AnyCorpus, load_corpus
from retain.train.data.document import Document
from retain.train.local_stage import LayerLocal, check_unit
from retain.train.lookahead_stage import Lookahead
from retain.train.loop import Lesson, train
from retain.train.objectives.soft_threshold import check_shift, regressed
from retain.train.recipe import DistillConfig, check, check_lockstep, document_check, one_by_one
from retain.train.run import parallel
from retain.train.run.artifact import command_line, metadata_of, reports_of
from retain.train.run.card import write_card
from retain.train.run.checkpoint import (
    adopt_,
    begin_,
    check_inputs,
    describe_inputs,
    disk_errors,
    finish_,
    inspect_run,
    locked,
)
from retain.train.run.dry_run import dry_run
from retain.train.run.parallel import Accelerator, is_sharded, on_main_process
from retain.train.run.progress import tracker_options
from retain.train.run.signals import EXIT_INTERRUPTED, StopRequested, follow_launcher_, forget_
from retain.train.soft_stage import EndToEnd
from retain.train.stage import Stage
from retain.train.teacher import Frozen, load_frozen, load_unread


def make_accelerator(tracker: str, output: str | None = None) -> Accelerator:
    """Makes the accelerator; ValueError where the launcher started several processes that would each train
    alone, or the tracker's package is missing."""
    accelerator = Accelerator(**tracker_options(tracker, Path(output or ".")))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        raise ValueError(
            f"the launcher started {world} processes, and accelerate sees {accelerator.num_processes}: "
            "without a GPU, set "
            "ACCELERATE_USE_CPU=true in the environment (see train/README.md)."
        )
    return accelerator


def _dtype(config: DistillConfig, accelerator: Accelerator) -> Precision:
    """Precision of the frozen model: as stated; with `auto` the checkpoint's, where this device has
    instructions for it, and else float32."""
    if config.dtype != "auto" or accelerator.device.type != "cpu" or config.quantization is not None:
        return config.dtype
    stored = precision_of(named_config(config.model, **_origin(config)))
    return "auto" if multiplies(accelerator.device, stored) else "float32"


def _origin(config: DistillConfig) -> dict[str, Any]:
    """The settings of a model's origin, beside its name."""
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def _corpus(config: DistillConfig, accelerator: Accelerator) -> AnyCorpus:
    """The documents, each of them checked against what the model's config says."""
    unread = load_unread(config.model, **_origin(config))
    return load_corpus(
        config.data,
        shortest=config.target.horizon,
        seed=config.seed,
        batch_documents=config.training.batch_documents,
        encode=unread.encode,
        chat=unread.chat,
        check=document_check(config, unread),
        progress=accelerator.is_main_process,
    )


def distill(config: DistillConfig, accelerator: Accelerator | None = None) -> Path:
    """Trains, and writes the artifact into the folder that it returns.

    Raises:
        ValueError, FileNotFoundError: the request cannot be carried out; nothing has been written.
        FloatingPointError: training diverged; the last checkpoint is kept.
        OSError: the disk is full; the last checkpoint and an earlier artifact are whole.
        StopRequested: a signal asked for it; a checkpoint was written.
    """
    accelerator = accelerator or make_accelerator(config.tracker, config.output)
    check(config, accelerator.num_processes)
    try:
        with locked(Path(config.output), accelerator):
            # Now, and never later: a request while the model loads is one to this run.
            if accelerator.is_main_process:
                forget_(Path(config.output))
            accelerator.wait_for_everyone()
            folder = _distill(config, accelerator)
    except StopRequested:  # every process stops after the same step
        parallel.leave_together_(accelerator)
        raise
    parallel.leave_together_(accelerator)
    return folder


def try_step(config: DistillConfig, accelerator: Accelerator | None = None) -> str:
    """Makes one real step on the longest documents, writes nothing, and returns what it took (`dry_run`)."""
    accelerator = accelerator or make_accelerator("none")
    check(config, accelerator.num_processes)
    corpus = _corpus(config, accelerator)
    frozen = _frozen(config, accelerator)
    lesson = _lesson(config, frozen, _fresh_gates(config, frozen.model), corpus, accelerator)
    said = dry_run(lesson, accelerator)
    parallel.leave_together_(accelerator)
    return said


def _distill(config: DistillConfig, accelerator: Accelerator) -> Path:
    """The same, in a folder that is held."""
    folder, mapping = Path(config.output), to_mapping(config)
    state = inspect_run(folder, mapping, overwrite=config.overwrite, resume=config.resume)
    # Before the weights, which may take long: most of what can be wrong now is wrong with the documents.
    corpus = _corpus(config, accelerator)
    frozen = _frozen(config, accelerator)
    gates = _fresh_gates(config, frozen.model)
    score_unit = _score_unit(config, gates)
    base = fingerprint(frozen.model)
    inputs = describe_inputs(str(base["sha256"]), corpus)
    parallel.check_alike(inputs)
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
    lesson = _lesson(config, frozen, gates, corpus, accelerator)
    accelerator.wait_for_everyone()  # every process has looked at the folder before one of them changes it
    if state == "fresh":
        on_main_process(accelerator, partial(begin_, folder, mapping, inputs))
    else:  # with another calibration, perhaps
        on_main_process(accelerator, partial(adopt_, folder, mapping))
    _track(config, accelerator)
    documents = "a stream of" if corpus.num_documents is None else corpus.num_documents
    accelerator.print(
        f"{config.model}: {len(gates.layers)} layers, {sum(p.numel() for p in gates.parameters())} gate "
        f"parameters, {documents} documents + {len(corpus.held_out)} held out, {accelerator.num_processes} "
        f"process(es) on {accelerator.device.type}"
        + (", going on from a checkpoint" if state == "resume" else "")
    )
    summary = train(lesson, accelerator, folder, resume=state == "resume")
    made = metadata_of(config, summary, corpus, gates, commit_of(frozen.model, config.revision))
    metadata = {**made, "score_unit": score_unit}
    metadata |= reports_of(config, gates, frozen, corpus, accelerator)
    if accelerator.is_main_process:
        with disk_errors(folder):
            save_gates(gates, folder, fingerprint=base, metadata=metadata)
            write_card(folder, command=command_line(), say=tqdm.write)
        finish_(folder)
        tqdm.write(f"gates: {folder} (retain.load_gates({str(folder)!r}, model))", file=sys.stdout)
    return folder


def _frozen(config: DistillConfig, accelerator: Accelerator) -> Frozen:
    """The frozen model, whole, on the CPU or where `device_map` puts it."""
    placed: dict[str, Any] = {"device_map": config.device_map, "quantization": config.quantization}
    dtype = _dtype(config, accelerator)
    return load_frozen(config.model, dtype=dtype, chunk=config.chunk, **_origin(config), **placed)


def _lesson(
    config: DistillConfig, frozen: Frozen, gates: GateSet, corpus: AnyCorpus, accelerator: Accelerator
) -> Lesson:
    """All that the loop needs; the model and the gates move to their devices."""
    layers = describe(frozen.model)
    parallel.shard_frozen_(frozen.model, accelerator)
    sharded = is_sharded(frozen.model)
    if sharded:
        check_lockstep(config, frozen)
    for spec in layers:
        gates[spec.layer_idx].to(spec.device)
    objective = _objective(config, gates, frozen)
    return Lesson(
        objective,
        corpus,
        config.training,
        config.data.pack_tokens,
        lambda document: row_tokens(document, config.target),
        lockstep=sharded,
        alone=sharded and one_by_one(config, frozen),
        ready=objective.prepare_ if config.initial is None else _alignment(config, objective, accelerator),
    )


def _fresh_gates(config: DistillConfig, model: nn.Module) -> GateSet:
    """The gates to begin with: fresh ones, or those of an artifact."""
    family = config.gate.family
    gates = new_gates(model, family, seed=config.seed, **config.gate.settings)
    if config.initial is None:
        return gates
    earlier = load_gates(config.initial, model)
    if earlier.family != family or any(earlier[i].dims() != gates[i].dims() for i in gates.layers):
        raise ValueError(
            f"initial={config.initial} holds gates of family {earlier.family!r} with "
            f"{earlier[earlier.layers[0]].dims()}, and gate asks for {family!r} with "
            f"{gates[gates.layers[0]].dims()}: state the same family and settings."
        )
    earlier.calibrators = nn.ModuleDict()  # of scores that will not be these any more
    earlier.metadata = {"initial_stage": earlier.metadata.get("stage")}
    return earlier.requires_grad_(True)


def _score_unit(config: DistillConfig, gates: GateSet) -> str | None:
    """Unit of the score before a calibrator, where it is not the family's own; ValueError: `check_unit`."""
    if config.stage == "local":
        return check_unit(gates[gates.layers[0]], config.target)
    if config.stage == "end_to_end" and gates.unit == "risk":
        return "rank"  # gates that are trained to an openness order entries, whatever their unit was
    return None


def _objective(config: DistillConfig, gates: GateSet, frozen: Frozen) -> Stage:
    target, seed = config.target, config.seed
    if config.stage == "end_to_end":
        return EndToEnd(gates, frozen, config.soft, target, steps=config.training.steps, seed=seed)
    if config.stage == "lookahead":
        return Lookahead(gates, frozen, target, seed=seed)
    return LayerLocal(gates, frozen, target, config.loss, seed=seed)


def _alignment(
    config: DistillConfig, objective: Stage, accelerator: Accelerator
) -> Callable[[Sequence[Document]], None] | None:
    """The preparation of an end-to-end stage that begins with gates that learned a risk: they are shifted to
    where the budget cuts. Other gates that are not fresh need none.

    Raises:
        ValueError: gates whose output cannot be shifted.
    """
    initial = objective.gates.metadata.get("initial_stage")
    if not isinstance(objective, EndToEnd) or not regressed(objective.gates, initial):
        return None
    check_shift(objective.gates, config.soft.anchor)

    def align(documents: Sequence[Document]) -> None:
        accelerator.print(
            f"{config.initial}: gates that learned a risk, shifted to the budget; they begin with "
            f"{objective.align_(documents):.0%} of the entries open"
        )

    return align


def _track(config: DistillConfig, accelerator: Accelerator) -> None:
    """Start the tracker, if one was asked for, with the config as `{"a.b": value}`."""
    if config.tracker == "none":
        return
    values = {
        key: value if isinstance(value, int | float | str) else str(value)
        for key, value in leaves(to_mapping(config)).items()
    }
    # wandb's own default is a folder `wandb` where one stands, which Python would then import.
    own = {"wandb": {"dir": config.output}}
    accelerator.init_trackers("retain-distill", config=values, init_kwargs=own)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `retain train` and `train/distill.py`: with `--config` of a YAML, or with MODEL and DATA alone."""
    parsed = distill_parser().parse_args(arguments)
    follow_launcher_()
    try:
        path, overrides = recipe_of(parsed)
        config = load(path, DistillConfig, overrides)
        if parsed.dry_run:
            accelerator = make_accelerator("none")
            accelerator.print(try_step(config, accelerator))
        else:
            distill(config)
    except (ValueError, OSError, FloatingPointError) as error:
        parallel.leave_alone_()
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:  # before the first step, or behind the last
        parallel.leave_alone_()
        print(
            "\ninterrupted: the same command goes on from the last checkpoint, if there is one.",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_INTERRUPTED) from None


if __name__ == "__main__":
    main()
