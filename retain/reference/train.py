"""Make a reference model: `python -m retain.reference.train --seed 0`, within an hour on one CPU thread.

In: a seed. Out: `weights/seed{N}.safetensors` and its training curve. The one decision taken here: the
schedule is counted in steps, not minutes, so that a seed gives the same curve on a slower machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from retain.reference.curriculum import KINDS, WEIGHTS, Batch, collate, example
from retain.reference.documents import Writer
from retain.reference.model import build, load_model, save_model, weights_path

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


@dataclass(frozen=True)
class Stage:
    """`steps` optimiser steps on sequences of up to `length` tokens."""

    length: int
    steps: int


@dataclass(frozen=True)
class Phase:
    """A run of stages under one schedule of rates, from fresh optimiser states.

    Attributes:
        stages: In this order.
        peak: Factor of the recipe's rates.
        decay_share: Last share of the phase's steps over which the rates fall linearly.
        multi_share: Share of statements that give a key several values.
    """

    stages: tuple[Stage, ...]
    peak: float = 1.0
    decay_share: float = 0.3
    multi_share: float = 0.18

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)


GROWTH = Phase((Stage(64, 500), Stage(128, 700), Stage(256, 700), Stage(512, 700), Stage(1024, 2800)))
# Keys with several values are what the first phase learns last: alone it leaves them at 90 %.
FINISH = Phase((Stage(1024, 700),), peak=0.5, decay_share=1.0, multi_share=0.35)


@dataclass(frozen=True)
class Recipe:
    """How a reference model is trained. Defaults make the shipped ones.

    Attributes:
        phases: In this order; between two the weights are rounded to bfloat16, as they are when saved.
        tokens_per_step: Tokens of a step; at least four sequences are taken, two of the longest.
        reach: Largest RoPE position that stretched documents see.
        stretch_share: Share of documents whose positions are stretched.
        matrix_lr: Of Muon, for the matrices of the blocks.
        vector_lr: Of AdamW, for embeddings, norms and biases.
        warmup: Steps over which the rates of a phase rise.
        log_every: Steps between two rows of the curve.
    """

    phases: tuple[Phase, ...] = (GROWTH, FINISH)
    tokens_per_step: int = 2048
    reach: int = 2200
    stretch_share: float = 0.5
    matrix_lr: float = 4e-3
    vector_lr: float = 3e-3
    weight_decay: float = 0.01
    warmup: int = 60
    log_every: int = 50


def batches(recipe: Recipe, phase_idx: int, seed: int) -> Iterator[tuple[int, Batch]]:
    """`(stage length, batch)` of every step; a fifth of the steps goes back to a shorter length."""
    phase = recipe.phases[phase_idx]
    writer = Writer("train", 1000 * (phase_idx + 1) + seed, held_out=True)
    for index, stage in enumerate(phase.stages):
        for _ in range(stage.steps):
            length = stage.length
            if index and writer.rng.random() < 0.2:
                length = phase.stages[int(writer.rng.integers(max(0, index - 2), index))].length
            count = max(2 if length >= 1024 else 4, recipe.tokens_per_step // length)
            reach = [recipe.reach if writer.rng.random() < recipe.stretch_share else 0 for _ in range(count)]
            yield stage.length, collate([example(writer, length, r, phase.multi_share) for r in reach])


def answer_loss(logits_NV: Tensor, accept: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log of what all accepted tokens get `[N]`, and whether the likeliest is accepted `[N]`.

    Args:
        logits_NV: Logits at the supervised positions.
        accept: Accepted token ids, filled with -1.
    """
    log_probs = F.log_softmax(logits_NV.float(), dim=-1).gather(1, accept.clamp(min=0))
    right = (accept == logits_NV.argmax(dim=1, keepdim=True)).any(dim=1)
    return -torch.logsumexp(log_probs.masked_fill(accept < 0, -1e9), dim=1), right


def forward_loss(
    model: Qwen3ForCausalLM, batch: Batch, kind_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss of a batch, and the loss and correctness of each target `[N]`."""
    ids = torch.from_numpy(batch.ids_BT)
    # An attention mask of ones: without one, jumps in the positions would be read as packed sequences.
    hidden = model.model(
        input_ids=ids,
        position_ids=torch.from_numpy(batch.positions_BT),
        attention_mask=torch.ones_like(ids),
        use_cache=False,
    ).last_hidden_state
    picked = hidden.reshape(-1, hidden.shape[-1])[torch.from_numpy(batch.places)]
    losses, right = answer_loss(model.lm_head(picked), torch.from_numpy(batch.accept))
    weights = kind_weights[torch.from_numpy(batch.kinds)]
    return (losses * weights).sum() / weights.sum(), losses.detach(), right


def optimisers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon (Jordan 2024, with the AdamW-like scale of arXiv 2502.16982) for matrices, AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(
            matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=recipe.vector_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate(phase: Phase, warmup: int, step: int) -> float:
    """Factor of the learning rates at a step of a phase: warm-up, flat, linear decay."""
    left = (phase.steps - step) / (phase.decay_share * phase.steps)
    return phase.peak * min(1.0, (step + 1) / warmup) * max(0.02, min(1.0, left))


class Curve:
    """Collects what the training loop sees and writes a row every `every` steps."""

    def __init__(self, every: int, path: Path | None) -> None:
        self.every = every
        self.path = path
        self.rows: list[dict[str, float]] = []
        self.started = time.time()
        self.tokens = 0
        self._clear()

    def go_on_after(self, step: int) -> None:
        """Take up the rows of the file up to `step`, drop later ones, and count on from there."""
        assert self.path is not None
        head, *lines = self.path.read_text().splitlines()
        self.rows = [row for row in map(json.loads, lines) if row["step"] <= step]
        self.path.write_text("\n".join([head, *map(json.dumps, self.rows)]) + "\n")
        self.tokens = int(self.rows[-1]["tokens"])
        self.started -= 60 * self.rows[-1]["minutes"]

    def _clear(self) -> None:
        self.loss = 0.0
        self.sums = np.zeros((3, len(KINDS)))

    def add(self, step: int, length: int, batch: Batch, loss: float, losses: Tensor, right: Tensor) -> bool:
        """Note one step, counted over all phases; True if that made a row."""
        self.loss += loss
        self.tokens += batch.ids_BT.size
        for row, values in zip(
            self.sums, (np.ones(len(batch.kinds)), right.numpy(), losses.numpy()), strict=True
        ):
            np.add.at(row, batch.kinds, values)
        if step % self.every:
            return False
        made = {
            "step": step,
            "length": length,
            "tokens": self.tokens,
            "loss": round(self.loss / self.every, 4),
            "minutes": round((time.time() - self.started) / 60, 2),
        }
        for i, kind in enumerate(KINDS):
            if self.sums[0, i]:
                made[kind] = round(self.sums[1, i] / self.sums[0, i], 4)
                made[f"{kind}_nats"] = round(self.sums[2, i] / self.sums[0, i], 4)
        self.rows.append(made)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(made) + "\n")
        self._clear()
        return True


def train_phase(
    model: Qwen3ForCausalLM,
    recipe: Recipe,
    phase_idx: int,
    seed: int,
    curve: Curve,
    *,
    checkpoint: Path | None = None,
    stop_after: int | None = None,
) -> None:
    """Train a model, in place, through one phase of a recipe.

    Args:
        model: In train mode.
        recipe: Schedule and rates.
        phase_idx: Which of its phases.
        seed: Of the documents.
        curve: Takes note of every step.
        checkpoint: Where to write the weights now and then, for a look at an unfinished model.
        stop_after: Stop after that many steps of the full schedule (for tests).
    """
    phase = recipe.phases[phase_idx]
    before = sum(earlier.steps for earlier in recipe.phases[:phase_idx])
    steppers = optimisers(model, recipe)
    base = [stepper.param_groups[0]["lr"] for stepper in steppers]
    kind_weights = torch.tensor(list(WEIGHTS.values()))
    steps = min(phase.steps, stop_after or phase.steps)
    bar = tqdm(batches(recipe, phase_idx, seed), total=steps, desc=f"seed {seed}, phase {phase_idx + 1}")
    for step, (length, batch) in enumerate(bar):
        if step >= steps:
            break
        for stepper, lr in zip(steppers, base, strict=True):
            stepper.param_groups[0]["lr"] = lr * rate(phase, recipe.warmup, step)
        with torch.autocast("cpu", torch.bfloat16):
            loss, losses, right = forward_loss(model, batch, kind_weights)
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss is {loss.item()} at step {before + step + 1}, length {length}")
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        if curve.add(before + step + 1, length, batch, loss.item(), losses, right):
            row = curve.rows[-1]
            bar.set_postfix({name: row.get(name) for name in ("loss", "get", "all", "common")})
            if checkpoint is not None and not (before + step + 1) % (10 * recipe.log_every):
                save_model(model, checkpoint)


@torch.no_grad()
def round_weights_(model: Qwen3ForCausalLM) -> None:
    """Round a model's weights to bfloat16, as saving does."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))


def main() -> None:
    """Command line: train a seed, save its weights and its curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of initialisation and documents")
    parser.add_argument("--output", type=Path, default=None, help="weights file; default: inside the package")
    parser.add_argument(
        "--first-phase", type=Path, default=None, help="weights after the first phase, if kept"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe, seed = Recipe(), arguments.seed
    output = arguments.output or weights_path(seed)
    output.parent.mkdir(parents=True, exist_ok=True)
    curve = Curve(recipe.log_every, output.with_suffix(".curve.jsonl"))
    if arguments.first_phase is None:
        model = build(seed).train()
        output.with_suffix(".curve.jsonl").write_text(
            json.dumps({"seed": seed, "recipe": asdict(recipe)}) + "\n"
        )
        train_phase(model, recipe, 0, seed, curve, checkpoint=output.with_suffix(".unfinished"))
        save_model(model, output.with_suffix(".phase1"))
    else:
        model = load_model(seed, path=arguments.first_phase).train().requires_grad_(True)
        curve.go_on_after(recipe.phases[0].steps)
    for phase_idx in range(1, len(recipe.phases)):
        round_weights_(model)
        train_phase(model, recipe, phase_idx, seed, curve)
    save_model(model, output)
    for suffix in (".unfinished", ".phase1"):
        output.with_suffix(suffix).unlink(missing_ok=True)
    print(f"weights: {output}\ncurve: {output.with_suffix('.curve.jsonl')}")


if __name__ == "__main__":
    main()
