"""Runs the training loop: one optimiser step after another, log, held-out looks, checkpoints.

Everything random is a function of (seed, step, document), and a step's loss is the mean over its documents.
So a resumed run equals the uninterrupted one exactly, and two processes compute what one would, up to
rounding. An objective adds gradients pack by pack; the processes meet once a step, in
`retain.train.run.parallel.Synchroniser`. The frozen model is in no checkpoint.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from retain.config import leaves
from retain.train.data.document import Document
from retain.train.data.packing import Size, packs_of, plain_size
from retain.train.run.checkpoint import (
    append_log,
    latest,
    load_checkpoint,
    read_log,
    rewind_log_,
    save_checkpoint,
)
from retain.train.run.parallel import Accelerator, Synchroniser, gather_object, on_main_process
from retain.train.run.schedule import TrainingSettings, learning_rate
from retain.train.run.signals import Signals
from retain.train.stage import HELD_OUT_STEP, Stage


@dataclass(frozen=True)
class Lesson:
    """All that the loop needs.

    Args:
        pack_tokens: tokens of one packed row, 0 = any.
        size_of: tokens that a document and its branches take in a row, by which processes share documents,
            rows are packed, and tokens are counted.
        lockstep: whether all processes must run the same number of forwards (a sharded model).
    """

    objective: Stage
    corpus: Any
    training: TrainingSettings
    pack_tokens: int = 0
    size_of: Size = plain_size
    lockstep: bool = False

    def packs(
        self, documents: Sequence[Document], accelerator: Accelerator
    ) -> list[tuple[list[Document], bool]]:
        """This process's packs of a step's documents, each with whether it counts (`packs_of`)."""
        return packs_of(
            documents,
            process=accelerator.process_index,
            num_processes=accelerator.num_processes,
            lockstep=self.lockstep,
            micro_batch=self.training.micro_batch,
            tokens_per_pack=self.pack_tokens,
            size_of=self.size_of,
        )


def train(lesson: Lesson, accelerator: Accelerator, folder: Path, *, resume: bool) -> dict[str, Any]:
    """Trains in place, writing log and checkpoints into `folder`, which is ready (`begin_`), or has a
    checkpoint to go on from with `resume`. Returns a summary for the artifact: steps, processes, seconds,
    tokens, held-out numbers.

    Raises:
        FloatingPointError: the loss or the gradient is not finite; names step and documents, keeps the last
            checkpoint.
        StopRequested: a signal asked for it; a checkpoint was written.
    """
    training, corpus = lesson.training, lesson.corpus
    start = 0
    held_out: dict[str, Any] = {}
    so_far: dict[str, Any] = {"seconds": 0.0, "tokens": 0}
    if not resume:
        lesson.objective.prepare_(corpus.documents_of(0))
    synchroniser = synchroniser_of(lesson, accelerator)
    if resume and (checkpoint := latest(folder)) is not None:
        start, extra = load_checkpoint(checkpoint[1], synchroniser)
        so_far = extra["so_far"]
        on_main_process(accelerator, lambda: rewind_log_(folder, start))
        # Nothing may be left to do but to write the artifact, which says how the last look went.
        looks = gather_object([[record for record in read_log(folder) if "held_out" in record]])[0]
        held_out = looks[-1]["held_out"] if looks else {}

    def log(record: dict[str, Any]) -> None:
        if accelerator.is_main_process:
            append_log(folder, record)
        numbers = {name: x for name, x in leaves(record, "/").items() if isinstance(x, int | float)}
        accelerator.log(numbers, step=record["step"])  # to a tracker, if there is one

    def look(step: int) -> dict[str, Any]:
        found = held_out_record(lesson, accelerator)
        log({"step": step, "held_out": found})
        return found

    before = time.perf_counter() - so_far["seconds"]
    show = accelerator.is_main_process
    bar = tqdm(total=training.steps, initial=start, desc="distill", unit="step", disable=not show)
    with Signals(accelerator, folder) as signals, bar:
        if start == 0 and corpus.held_out:
            held_out = look(0)
            before = time.perf_counter() - so_far["seconds"]
        for step in range(start, training.steps):
            record = take_step_(lesson, synchroniser, accelerator, step, folder)
            so_far["tokens"] += record["tokens"]
            log(record)
            done, last = step + 1, step + 1 == training.steps
            if corpus.held_out and (last or _due(done, training.held_out_every)):
                held_out = look(done)
            numbers = {"loss": record["loss"], "held-out": held_out.get("loss", math.nan)}
            bar.set_postfix(**numbers, tokens=record["tokens"], refresh=False)
            bar.update()
            stop = signals.requested
            if last or stop or _due(done, training.checkpoint_every):
                so_far["seconds"] = time.perf_counter() - before
                save_checkpoint(accelerator, folder, done, synchroniser, {"so_far": so_far})
            if stop and not last:
                signals.stop(done)
    return {
        "steps": training.steps,
        "num_processes": accelerator.num_processes,
        **so_far,
        "held_out": held_out,
    }


def synchroniser_of(lesson: Lesson, accelerator: Accelerator) -> Synchroniser:
    """The optimiser of the lesson's gates, over all processes."""
    names = ("betas", "weight_decay", "eps")
    settings: dict[str, Any] = {name: getattr(lesson.training, name) for name in names}
    return Synchroniser(accelerator, lesson.objective.gates, **settings)


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def take_step_(
    lesson: Lesson, synchroniser: Synchroniser, accelerator: Accelerator, step: int, folder: Path
) -> dict[str, Any]:
    """Takes an optimiser step over this process's share; returns the record of all processes."""
    batch = lesson.corpus.documents_of(step)
    mine = lesson.packs(batch, accelerator)
    documents = sum(len(pack) for pack, counts in mine if counts)
    outcomes: list[dict[str, Any]] = []
    read: list[Document] = []
    for pack, counts in mine:
        found = lesson.objective.rows_of(pack, step, 1 / documents if counts else 0.0)
        if counts:
            outcomes += found
            read += pack
    share = {
        "documents": [document.key for document in read],
        "tokens": sum(map(lesson.size_of, read)),
        "outcomes": [[outcome[name] for name in lesson.objective.fields] for outcome in outcomes],
    }
    everyone = gather_object([share])
    # In the order of the documents' keys, whatever the processes: the same documents give the same digits.
    rows = sorted(
        (key, row) for part in everyone for key, row in zip(part["documents"], part["outcomes"], strict=True)
    )
    bad = sorted({key for key, row in rows if not math.isfinite(row[0])})
    lr = learning_rate(step, lesson.training)
    norm = math.nan if bad else synchroniser.step_(lr, lesson.training.clip)
    if not math.isfinite(norm):
        _stop(step, "loss" if bad else "gradient", bad, batch, folder)
    means = {
        name: math.fsum(row[place] for _, row in rows) / len(rows)
        for place, name in enumerate(lesson.objective.fields)
    }
    return {
        "step": step + 1,
        **means,
        "lr": lr,
        "grad_norm": norm,
        "tokens": sum(part["tokens"] for part in everyone),
        "documents": [part["documents"] for part in everyone],
    }


def _stop(step: int, what: str, bad: Sequence[int], batch: Sequence[Document], folder: Path) -> None:
    kept = latest(folder)
    named = {document.key: document.origin or str(document.key) for document in batch}
    raise FloatingPointError(
        f"step {step + 1}: the {what} is not finite (batch of documents {sorted(named.values())}"
        + (f", not finite on {[named[key] for key in bad]}" if bad else "")
        + "). Stopped before the gates were touched; "
        + (
            f"the last good checkpoint is that of step {kept[0]} in {kept[1]}. "
            if kept
            else "there is no checkpoint yet. "
        )
        + "Lower training.lr, load the model in float32 (dtype=float32), or leave these documents out."
    )


@torch.no_grad()
def held_out_record(lesson: Lesson, accelerator: Accelerator) -> dict[str, float]:
    """Means over the held-out documents, each process its share."""
    rows: list[dict[str, Any]] = []
    for pack, counts in lesson.packs(lesson.corpus.held_out, accelerator):
        found = lesson.objective.rows_of(pack, HELD_OUT_STEP, None)
        rows += found if counts else []
    everyone = [row for part in gather_object([rows]) for row in part]
    return {name: math.fsum(row[name] for row in everyone) / len(everyone) for name in everyone[0]}
