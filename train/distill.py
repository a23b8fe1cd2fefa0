"""Trains retention gates by distillation from a frozen language model: parses, builds, runs.

    retain train MODEL DATA [--dry-run] [key=value ...]
    accelerate launch --quiet --config_file configs/accelerate/one_process.yaml \\
        train/distill.py --config configs/distill/reference.yaml [--dry-run] [key=value ...]

`DistillConfig` is the schema of the YAML; the output is a folder that `retain.load_gates` reads. A request is
checked whole before the first document is read. `--dry-run` makes one real step and says what it took.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from retain.process.command import parse_first
from retain.train.arguments import distill_parser, recipe_of

if __name__ == "__main__":
    parse_first(distill_parser())

from tqdm import tqdm

from retain.config import leaves, load, to_mapping
from retain.gates.artifact import read_metadata, save_gates
from retain.gates.card import CARD, card_of
from retain.hf.model.identity import fingerprint
from retain.models.named import commit_of
from retain.models.named_gates import new_gates
from retain.process.extras import require
from retain.process.provenance import write_text
from retain.train.assembly import corpus_of, frozen_of, lesson_of, score_unit_of
from retain.train.loop import train
from retain.train.recipe import DistillConfig, check
from retain.train.run import parallel
from retain.train.run.artifact import calibration_of, metadata_of
from retain.train.run.checkpoint import begin_, check_inputs, disk_errors, finish_, inspect_run, locked
from retain.train.run.dry_run import dry_run
from retain.train.run.parallel import Accelerator, make_accelerator, on_main_process
from retain.train.run.signals import EXIT_INTERRUPTED, STOP_FILE, StopRequested


def distill(config: DistillConfig, accelerator: Accelerator | None = None) -> Path:
    """Trains, and writes the artifact into the folder that it returns.

    Raises:
        ValueError, FileNotFoundError: the request cannot be carried out; nothing has been written.
        FloatingPointError: training diverged; the last checkpoint is kept.
        OSError: the disk is full; the last checkpoint and an earlier artifact are whole.
        StopRequested: a signal asked for it; a checkpoint was written.
    """
    require("train", "jinja2", "scipy", what="training")
    accelerator = accelerator or make_accelerator(config.tracker, config.output)
    check(config, accelerator.num_processes)
    try:
        with locked(Path(config.output), accelerator):
            # Now, and never later: a request while the model loads is one to this run.
            if accelerator.is_main_process:
                (Path(config.output) / STOP_FILE).unlink(missing_ok=True)
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
    corpus = corpus_of(config, accelerator)
    frozen = frozen_of(config, accelerator)
    gates = new_gates(frozen.model, config.gate.family, seed=config.seed, **config.gate.settings)
    lesson = lesson_of(config, frozen, gates, corpus, accelerator)
    said = dry_run(lesson, accelerator)
    parallel.leave_together_(accelerator)
    return said


def _distill(config: DistillConfig, accelerator: Accelerator) -> Path:
    """The same, in a folder that is held."""
    folder, mapping = Path(config.output), to_mapping(config)
    state = inspect_run(folder, mapping, overwrite=config.overwrite)
    # Before the weights, which may take long: most of what can be wrong now is wrong with the documents.
    corpus = corpus_of(config, accelerator)
    frozen = frozen_of(config, accelerator)
    gates = new_gates(frozen.model, config.gate.family, seed=config.seed, **config.gate.settings)
    score_unit = score_unit_of(config, gates)
    base = fingerprint(frozen.model)
    inputs = {"base model": str(base["sha256"]), "documents": corpus.describe()}
    parallel.check_alike({**inputs, "state of the run's folder": state})
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
    lesson = lesson_of(config, frozen, gates, corpus, accelerator)
    accelerator.wait_for_everyone()  # every process has looked at the folder before one of them changes it
    if state == "fresh":
        on_main_process(accelerator, partial(begin_, folder, mapping, inputs))
    if config.tracker != "none":
        settings = {
            key: value if isinstance(value, float) else str(value) for key, value in leaves(mapping).items()
        }
        # wandb's default is a folder `wandb` where one stands, which Python would then import.
        accelerator.init_trackers("retain-distill", settings, {"wandb": {"dir": config.output}})
    documents = "a stream of" if corpus.num_documents is None else corpus.num_documents
    accelerator.print(
        f"{config.model}: {len(gates.layers)} layers, {sum(p.numel() for p in gates.parameters())} gate "
        f"parameters, {documents} documents + {len(corpus.held_out)} held out, {accelerator.num_processes} "
        f"process(es) on {accelerator.device.type}"
        + (", going on from a checkpoint" if state == "resume" else "")
    )
    summary = train(lesson, accelerator, folder, resume=state == "resume")
    metadata = metadata_of(config, summary, corpus, gates, commit_of(frozen.model, config.revision))
    metadata["score_unit"] = score_unit
    metadata["calibration"] = calibration_of(config, gates, frozen, corpus, accelerator)
    if accelerator.is_main_process:
        with disk_errors(folder):
            save_gates(gates, folder, fingerprint=base, metadata=metadata)
            write_text(folder / CARD, f"{card_of(read_metadata(folder), place=str(folder))}\n")
        finish_(folder)
        tqdm.write(f"gates: {folder} (retain.load_gates({str(folder)!r}, model))", file=sys.stdout)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `retain train` and `train/distill.py`: with `--config` of a YAML, or with MODEL and DATA alone."""
    parsed = distill_parser().parse_args(arguments)
    try:
        path, overrides = recipe_of(parsed)
        config = load(path, DistillConfig, overrides, check=lambda stated: check(stated, 1))
        if parsed.dry_run:
            accelerator = make_accelerator("none")
            accelerator.print(try_step(config, accelerator))
        else:
            distill(config)
    except (ValueError, OSError, FloatingPointError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:  # before the first step, or behind the last
        print(
            "\ninterrupted: the same command goes on from the last checkpoint, if there is one.",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_INTERRUPTED) from None


if __name__ == "__main__":
    main()
