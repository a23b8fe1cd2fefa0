"""The training loop: documents in, gates out, one optimiser step after another.

In: a frozen model, a corpus, fresh gates, settings. Out: the same gates, trained, and a log. The one decision
taken here: everything random is a function of (seed, step, document), and a step's loss is the mean over
its documents. So a resumed run equals the uninterrupted one exactly, and two processes compute what one
would, up to rounding.

Only the gates and the optimiser are prepared by accelerate: the frozen model is on every process, and in no
checkpoint.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from retain.gates import GateInputs, GateSet
from retain.train.checkpoint import append_log, latest, read_log, rewind_log_, save_checkpoint
from retain.train.data import Batch, Corpus, Document, collate, share_of, step_indices
from retain.train.losses import LossSettings, pair_draws, pairwise_loss, regression_loss, top_overlap
from retain.train.schedule import TrainingSettings, learning_rate
from retain.train.targets import TargetSettings, baseline_overlaps, layer_target, log_risk
from retain.train.teacher import Frozen, look

# What is counted of every document, in this order.
FIELDS = ("loss", "regression", "pairwise", "overlap")
# Stands for the step in what is drawn for held-out documents: always the same pairs.
HELD_OUT_STEP = 2**40


@dataclass(frozen=True)
class Lesson:
    """All that a step needs besides the gates."""

    frozen: Frozen
    corpus: Corpus
    target: TargetSettings
    loss: LossSettings
    training: TrainingSettings
    seed: int
    device: torch.device


@torch.no_grad()
def calibrate_(gates: GateSet, lesson: Lesson) -> None:
    """Set every gate's input statistics, target floor and output bias from the documents of the first step.

    Every process does the same on the same documents, so nothing has to be exchanged.
    """
    training, documents = lesson.training, lesson.corpus.train
    indices = step_indices(
        0, num_documents=len(documents), batch_documents=training.batch_documents, seed=lesson.seed
    )
    totals: dict[int, list[Tensor]] = {}
    risks: dict[int, list[Tensor]] = {}
    for batch in _batches(documents, share_of(indices, documents, process=0, num_processes=1), lesson):
        for evidence in look(lesson.frozen.model, batch):
            assert evidence.hidden_BTE is not None
            risk_BHT, reached_BHT = layer_target(evidence, batch, lesson.target)
            reached_BT = reached_BHT.any(1)
            hidden_NE = evidence.hidden_BTE[:, : reached_BT.shape[1]][reached_BT].double()
            moments = [torch.tensor(float(len(hidden_NE))), hidden_NE.sum(0), hidden_NE.square().sum(0)]
            seen = totals.get(evidence.layer_idx)
            totals[evidence.layer_idx] = (
                moments if seen is None else [a + b for a, b in zip(seen, moments, strict=True)]
            )
            risk_NH = risk_BHT.transpose(1, 2).masked_fill(~reached_BHT.transpose(1, 2), torch.nan)[
                reached_BT
            ]
            risks.setdefault(evidence.layer_idx, []).append(risk_NH)
    for layer, (count, total_E, square_E) in totals.items():
        mean_E = total_E / count.to(total_E.device)
        scale_E = (square_E / count.to(total_E.device) - mean_E.square()).clamp_min(0).sqrt()
        risk_NH = torch.cat(risks[layer]).double()
        floor_H = lesson.target.floor * risk_NH.nanmean(0)
        gates[layer].calibrate_(
            input_mean_E=mean_E,
            input_scale_E=scale_E,
            floor_H=floor_H,
            mean_H=(risk_NH + floor_H).log().nanmean(0),
        )


def _batches(documents: Sequence[Document], indices: Sequence[int], lesson: Lesson) -> list[Batch]:
    size = lesson.training.micro_batch
    return [
        collate(
            [documents[i] for i in indices[start : start + size]],
            indices[start : start + size],
            pad_id=lesson.frozen.pad_id,
            device=lesson.device,
        )
        for start in range(0, len(indices), size)
    ]


def score_documents(
    gates: Callable[..., Any], bare: GateSet, lesson: Lesson, batch: Batch, step: int
) -> Tensor:
    """Teacher and gates on one micro-batch.

    Args:
        gates: what is called (DDP's wrapper, or the gates themselves).
        bare: the gates themselves, for their calibration.
        lesson: model and settings.
        batch: the documents.
        step: seeds the pairs.

    Returns:
        `[B, 4]`: loss (with gradient), regression, pairwise, overlap of every document, mean over layers.
    """
    evidences = look(lesson.frozen.model, batch)
    targets = [layer_target(evidence, batch, lesson.target) for evidence in evidences]
    inputs = {}
    for evidence, (_, reached_BHT) in zip(evidences, targets, strict=True):
        assert evidence.hidden_BTE is not None
        inputs[evidence.layer_idx] = GateInputs(hidden_BTE=evidence.hidden_BTE[:, : reached_BHT.shape[-1]])
    layers = list(inputs)
    del evidences
    predicted = gates(inputs)
    rows = []
    for layer, (risk_BHT, reached_BHT) in zip(layers, targets, strict=True):
        target_BHT = log_risk(risk_BHT, bare[layer].risk_floor_H)
        predicted_BHT = predicted[layer].float()
        regression_B = regression_loss(predicted_BHT, target_BHT, reached_BHT, lesson.loss)
        pairwise_B = torch.zeros_like(regression_B)
        if lesson.loss.pairwise_weight:
            draws = [
                pair_draws(
                    (lesson.seed, step, key, layer), num_heads=target_BHT.shape[1], settings=lesson.loss
                )
                for key in batch.keys
            ]
            pairwise_B = pairwise_loss(
                predicted_BHT, target_BHT, reached_BHT, torch.stack(draws).to(target_BHT.device), lesson.loss
            )
        overlap_B = top_overlap(predicted_BHT.detach(), target_BHT, reached_BHT)
        loss_B = regression_B + lesson.loss.pairwise_weight * pairwise_B
        rows.append(torch.stack([loss_B, regression_B.detach(), pairwise_B.detach(), overlap_B], dim=-1))
    return torch.stack(rows).mean(0)


@torch.no_grad()
def held_out_record(
    gates: GateSet, lesson: Lesson, accelerator: Accelerator, *, baselines: bool
) -> dict[str, float]:
    """Means over the held-out documents, each process its share; with `baselines`, overlaps that need no
    training too."""
    documents = lesson.corpus.held_out
    mine = share_of(
        range(len(documents)),
        documents,
        process=accelerator.process_index,
        num_processes=accelerator.num_processes,
    )
    sums: dict[str, float] = dict.fromkeys(FIELDS, 0.0)
    for batch in _batches(documents, mine, lesson):
        outcome_BX = score_documents(gates, gates, lesson, batch, HELD_OUT_STEP)
        for name, value in zip(FIELDS, outcome_BX.sum(0).tolist(), strict=True):
            sums[name] += value
        if baselines:
            for name, value in baseline_overlaps(
                look(lesson.frozen.model, batch), batch, lesson.target, lesson.seed
            ).items():
                sums[name] = sums.get(name, 0.0) + value
    everyone = gather_object([sums])
    names = {name: None for share in everyone for name in share}
    return {name: sum(share.get(name, 0.0) for share in everyone) / len(documents) for name in names}


def train(
    gates: GateSet, lesson: Lesson, accelerator: Accelerator, folder: Path, *, resume: bool
) -> dict[str, Any]:
    """Train in place, writing log and checkpoints into `folder`.

    Args:
        gates: fresh gates on the right device; trained when this returns.
        lesson: model, documents, settings.
        accelerator: of this process.
        folder: of the run, ready (`begin_`) or with a checkpoint to go on from.
        resume: go on from the latest checkpoint.

    Returns:
        a summary for the artifact: steps, processes, documents that each process read, held-out numbers.

    Raises:
        FloatingPointError: the loss or the gradient is not finite; names step and documents, keeps the last
            checkpoint.
    """
    training, documents = lesson.training, lesson.corpus.train
    start = 0
    held_out: dict[str, float] = {}
    if not resume:
        calibrate_(gates, lesson)
    optimizer = torch.optim.AdamW(
        gates.parameters(), lr=training.lr, betas=training.betas, weight_decay=training.weight_decay
    )
    wrapped, optimizer = accelerator.prepare(gates, optimizer)
    if resume and (checkpoint := latest(folder)) is not None:
        start, path = checkpoint
        accelerator.load_state(str(path))
        if accelerator.is_main_process:
            rewind_log_(folder, start)
        accelerator.wait_for_everyone()
        # Nothing may be left to do but to write the artifact, which says how the last look went.
        looks = [record["held_out"] for record in read_log(folder) if "held_out" in record]
        held_out = looks[-1] if looks else {}
    bare = accelerator.unwrap_model(wrapped)

    def log(record: dict[str, Any]) -> None:
        if accelerator.is_main_process:
            append_log(folder, record)
        if accelerator.log_with:
            flat = {f"held_out/{k}": v for k, v in record.get("held_out", {}).items()}
            flat |= {k: v for k, v in record.items() if isinstance(v, int | float)}
            accelerator.log(flat, step=record["step"])

    if start == 0 and lesson.corpus.held_out:
        held_out = held_out_record(bare, lesson, accelerator, baselines=True)
        log({"step": 0, "held_out": held_out})
    bar = tqdm(
        total=training.steps,
        initial=start,
        desc="distill",
        disable=not accelerator.is_main_process,
        mininterval=0.5,
    )
    with bar:
        for step in range(start, training.steps):
            record = take_step_(wrapped, bare, optimizer, lesson, accelerator, step, folder)
            log(record)
            done = step + 1
            shown = {"loss": f"{record['loss']:.3f}", "overlap": f"{record['overlap']:.2f}"}
            last = done == training.steps
            if lesson.corpus.held_out and (last or _due(done, training.held_out_every)):
                held_out = held_out_record(bare, lesson, accelerator, baselines=False)
                log({"step": done, "held_out": held_out})
            if held_out:
                shown["held-out"] = f"{held_out['overlap']:.2f}"
            bar.set_postfix(shown, refresh=False)
            bar.update()
            if last or _due(done, training.checkpoint_every):
                save_checkpoint(accelerator, folder, done)
    shares = [
        share_of(
            step_indices(
                step, num_documents=len(documents), batch_documents=training.batch_documents, seed=lesson.seed
            ),
            documents,
            process=accelerator.process_index,
            num_processes=accelerator.num_processes,
        )
        for step in range(training.steps)
    ]
    return {
        "steps": training.steps,
        "num_processes": accelerator.num_processes,
        "documents_of_process": gather_object([sum(len(share) for share in shares)]),
        "held_out": held_out,
    }


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def take_step_(
    wrapped: Any,
    bare: GateSet,
    optimizer: Any,
    lesson: Lesson,
    accelerator: Accelerator,
    step: int,
    folder: Path,
) -> dict[str, Any]:
    """One optimiser step over this process's share; returns the record of all processes."""
    training, documents = lesson.training, lesson.corpus.train
    indices = step_indices(
        step, num_documents=len(documents), batch_documents=training.batch_documents, seed=lesson.seed
    )
    mine = share_of(
        indices, documents, process=accelerator.process_index, num_processes=accelerator.num_processes
    )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, training)
    optimizer.zero_grad()
    outcomes = []
    batches = _batches(documents, mine, lesson)
    for batch in batches:
        last = batch is batches[-1]
        with contextlib.nullcontext() if last else accelerator.no_sync(wrapped):
            outcome_BX = score_documents(wrapped, bare, lesson, batch, step)
            accelerator.backward(outcome_BX[:, 0].sum() / len(mine))
        outcomes += outcome_BX.detach().tolist()
    norm = float(accelerator.clip_grad_norm_(bare.parameters(), training.clip))
    everyone = gather_object([{"documents": mine, "outcomes": outcomes, "norm": norm}])
    outcome_of = {
        document: outcome
        for share in everyone
        for document, outcome in zip(share["documents"], share["outcomes"], strict=True)
    }
    bad = sorted(document for document, outcome in outcome_of.items() if not math.isfinite(outcome[0]))
    if bad or not math.isfinite(norm):
        kept = latest(folder)
        raise FloatingPointError(
            f"step {step + 1}: the {'loss' if bad else 'gradient'} is not finite (batch of documents "
            f"{sorted(indices)}"
            + (f", not finite on {bad}" if bad else "")
            + "). Stopped before the gates were touched; "
            + (f"the last good checkpoint is {kept[1]}. " if kept else "there is no checkpoint yet. ")
            + "Lower training.lr, load the model in float32 (dtype=float32), or leave these documents out."
        )
    optimizer.step()
    # Summed in the order of the batch, whatever the processes: the same documents give the same digits.
    means = {
        name: math.fsum(outcome_of[i][place] for i in outcome_of) / len(outcome_of)
        for place, name in enumerate(FIELDS)
    }
    return {
        "step": step + 1,
        **means,
        "lr": learning_rate(step, training),
        "grad_norm": norm,
        "documents": [share["documents"] for share in everyone],
    }
