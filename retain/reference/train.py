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
from retain.reference.model import build, save_model, weights_path

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


@dataclass(frozen=True)
class Stage:
    """`steps` optimiser steps on sequences of up to `length` tokens."""

    length: int
    steps: int


@dataclass(frozen=True)
class Recipe:
    """How a reference model is trained. Defaults make the shipped ones.

    Attributes:
        tokens_per_step: Tokens of a step; at least four sequences are taken.
        reach: Largest RoPE position that stretched documents see.
        stretch_share: Share of documents whose positions are stretched.
        matrix_lr: Of Muon, for the matrices of the blocks.
        vector_lr: Of AdamW, for embeddings, norms and biases.
        decay_share: Last share of all steps over which both rates fall linearly.
        log_every: Steps between two rows of the curve.
    """

    stages: tuple[Stage, ...] = (
        Stage(64, 500),
        Stage(128, 700),
        Stage(256, 700),
        Stage(512, 700),
        Stage(1024, 2800),
    )
    tokens_per_step: int = 2048
    reach: int = 2200
    stretch_share: float = 0.5
    matrix_lr: float = 4e-3
    vector_lr: float = 3e-3
    weight_decay: float = 0.01
    warmup: int = 60
    decay_share: float = 0.3
    log_every: int = 50

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)


def batches(recipe: Recipe, seed: int) -> Iterator[tuple[int, Batch]]:
    """`(stage length, batch)` of every step; a fifth of the steps goes back to a shorter length."""
    writer = Writer("train", 1000 + seed, held_out=True)
    for index, stage in enumerate(recipe.stages):
        for _ in range(stage.steps):
            length = stage.length
            if index and writer.rng.random() < 0.2:
                length = recipe.stages[int(writer.rng.integers(max(0, index - 2), index))].length
            count = max(2 if length >= 1024 else 4, recipe.tokens_per_step // length)
            reach = [recipe.reach if writer.rng.random() < recipe.stretch_share else 0 for _ in range(count)]
            yield stage.length, collate([example(writer, length, r) for r in reach])


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


def rate(recipe: Recipe, step: int) -> float:
    """Factor of the learning rates at a step: warm-up, flat, linear decay."""
    left = (recipe.steps - step) / (recipe.decay_share * recipe.steps)
    return min(1.0, (step + 1) / recipe.warmup) * max(0.02, min(1.0, left))


def train(
    recipe: Recipe,
    seed: int,
    *,
    curve: Path | None = None,
    checkpoint: Path | None = None,
    stop_after: int | None = None,
) -> tuple[Qwen3ForCausalLM, list[dict[str, float]]]:
    """Train one seed.

    Args:
        recipe: Schedule and rates.
        seed: Of initialisation and documents.
        curve: JSON-lines file for the curve, a row every `log_every` steps.
        checkpoint: Where to write the weights now and then, for a look at an unfinished model.
        stop_after: Stop after that many steps of the full schedule (for tests).

    Returns:
        The model and the rows of its curve: step, tokens, loss, and per kind of target its accuracy and loss.
    """
    model = build(seed).train()
    steppers = optimisers(model, recipe)
    base = [stepper.param_groups[0]["lr"] for stepper in steppers]
    kind_weights = torch.tensor(list(WEIGHTS.values()))
    rows: list[dict[str, float]] = []
    sums = np.zeros((3, len(KINDS)))
    total, tokens, started = 0.0, 0, time.time()
    steps = min(recipe.steps, stop_after or recipe.steps)
    bar = tqdm(batches(recipe, seed), total=steps, desc=f"reference seed {seed}", mininterval=5)
    for step, (length, batch) in enumerate(bar):
        if step >= steps:
            break
        for stepper, lr in zip(steppers, base, strict=True):
            stepper.param_groups[0]["lr"] = lr * rate(recipe, step)
        with torch.autocast("cpu", torch.bfloat16):
            loss, losses, right = forward_loss(model, batch, kind_weights)
        model.zero_grad(set_to_none=True)
        loss.backward()
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss is {loss.item()} at step {step}, length {length}")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        total += loss.item()
        tokens += batch.ids_BT.size
        for row, values in zip(sums, (np.ones(len(batch.kinds)), right.numpy(), losses.numpy()), strict=True):
            np.add.at(row, batch.kinds, values)
        if (step + 1) % recipe.log_every == 0:
            row = {
                "step": step + 1,
                "length": length,
                "tokens": tokens,
                "loss": round(total / recipe.log_every, 4),
            }
            row["minutes"] = round((time.time() - started) / 60, 2)
            for i, kind in enumerate(KINDS):
                if sums[0, i]:
                    row[kind] = round(sums[1, i] / sums[0, i], 4)
                    row[f"{kind}_nats"] = round(sums[2, i] / sums[0, i], 4)
            rows.append(row)
            bar.set_postfix(
                loss=row["loss"], get=row.get("get"), all=row.get("all"), common=row.get("common")
            )
            if curve is not None:
                with curve.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            sums[:], total = 0, 0.0
            if checkpoint is not None and (step + 1) % (10 * recipe.log_every) == 0:
                save_model(model, checkpoint)
    return model.eval(), rows


def main() -> None:
    """Command line: train a seed, save its weights and its curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of initialisation and documents")
    parser.add_argument("--output", type=Path, default=None, help="weights file; default: inside the package")
    parser.add_argument("--steps", type=int, default=None, help="stop early after that many steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe()
    output = arguments.output or weights_path(arguments.seed)
    output.parent.mkdir(parents=True, exist_ok=True)
    curve = output.with_suffix(".curve.jsonl")
    curve.write_text(json.dumps({"seed": arguments.seed, "recipe": asdict(recipe)}) + "\n")
    model, _ = train(
        recipe,
        arguments.seed,
        curve=curve,
        checkpoint=output.with_suffix(".unfinished"),
        stop_after=arguments.steps,
    )
    save_model(model, output)
    output.with_suffix(".unfinished").unlink(missing_ok=True)
    print(f"weights: {output}\ncurve: {curve}")


if __name__ == "__main__":
    main()
