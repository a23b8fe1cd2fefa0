"""Trains a reference model: `python -m retain.reference.train --seed 0`, within an hour on one CPU thread.

A larger one, with a GPU: `--size large --device cuda --loaders 8` (`--plan` estimates its cost). Writes
`weights/seed{N}.safetensors`, or for other sizes a folder that transformers loads, and the training curve.
The schedule is counted in steps, not minutes, so that a seed gives the same curve on a slower machine. The
same command resumes a killed run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from retain.hf.version_names import set_checkpointing_
from retain.process.command import command
from retain.reference.batches import batches, parts
from retain.reference.checkpoint import Checkpoint
from retain.reference.curriculum import KINDS, WEIGHTS, Batch
from retain.reference.model import build, save_folder, save_model, weights_path
from retain.reference.recipe import SIZES, SMALL, Phase, Recipe, Size
from retain.registry import lookup

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


@dataclass(frozen=True)
class Resources:
    """Resources of a run; they do not change what is learned, beyond rounding.

    Attributes:
        micro_tokens: Most tokens that are read together; None: a whole step's.
        checkpointing: Whether activations are computed again in the backward pass instead of held.
        loaders: Processes that write documents; 0: the one that trains.
    """

    micro_tokens: int | None = None
    checkpointing: bool = False
    loaders: int = 0


def answer_loss(logits_NV: Tensor, accept: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log probability of all accepted tokens `[N]`, and whether the likeliest is accepted `[N]`.

    `accept` has a row of token ids for each of `logits_NV`, filled with -1.
    """
    log_probs = F.log_softmax(logits_NV.float(), dim=-1).gather(1, accept.clamp(min=0))
    right = (accept == logits_NV.argmax(dim=1, keepdim=True)).any(dim=1)
    return -torch.logsumexp(log_probs.masked_fill(accept < 0, -1e9), dim=1), right


def step_loss(
    model: Qwen3ForCausalLM, batch: Batch, kind_weights: Tensor, micro_tokens: int | None
) -> tuple[float, Tensor, Tensor]:
    """Add the gradients of one step's loss to the model's; return the loss, and loss and correctness of each
    target. `micro_tokens` as in `Resources`; at least one sequence is read."""
    whole = float(kind_weights[torch.from_numpy(batch.kinds)].sum())
    total, losses, right = 0.0, [], []
    count, length = batch.ids_BT.shape
    for part in parts(batch, count if micro_tokens is None else max(1, micro_tokens // length)):
        ids, positions, places, accept, kinds = (
            torch.from_numpy(array).to(model.device)
            for array in (part.ids_BT, part.positions_BT, part.places, part.accept, part.kinds)
        )
        with torch.autocast(model.device.type, torch.bfloat16):
            # Without an attention mask, jumps in the positions would be read as packed sequences.
            hidden = model.model(
                input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False
            ).last_hidden_state
            own, hit = answer_loss(model.lm_head(hidden.reshape(-1, hidden.shape[-1])[places]), accept)
            loss = (own * kind_weights.to(model.device)[kinds]).sum() / whole
        loss.backward()
        total += loss.item()
        losses.append(own.detach().cpu())
        right.append(hit.cpu())
    # In the order of the parts: the targets of a sequence stand together, as `collate` puts them.
    return total, torch.cat(losses), torch.cat(right)


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
    """Collects results of training steps and writes a row every `every` steps."""

    def __init__(self, every: int, path: Path | None) -> None:
        self.every, self.path = every, path
        self.rows: list[dict[str, float]] = []
        self.started, self.tokens = time.time(), 0
        self._clear()

    def go_on_after(self, step: int) -> None:
        """Keep the rows of the file up to `step`, drop later ones (and a line cut short), and count on.

        Raises:
            ValueError: The file is gone, or its rows do not reach the step.
        """
        assert self.path is not None
        text = self.path.read_text() if self.path.exists() else ""
        head, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]
        self.rows = [row for row in map(json.loads, lines) if row["step"] <= step]
        last = self.rows[-1]["step"] if self.rows else 0
        if last != step:
            raise ValueError(
                f"{self.path} is gone or cut: its rows end at step {last}, and the unfinished run beside it "
                f"goes on from step {step}. Give another output, or remove what is unfinished to start anew."
            )
        self.path.write_text("\n".join([head, *map(json.dumps, self.rows)]) + "\n")
        self.tokens = int(self.rows[-1]["tokens"])
        self.started -= 60 * self.rows[-1]["minutes"]

    def _clear(self) -> None:
        self.loss = 0.0
        self.sums = np.zeros((3, len(KINDS)))

    def add(self, step: int, length: int, batch: Batch, loss: float, losses: Tensor, right: Tensor) -> bool:
        """Add one step, counted over all phases; True if that made a row."""
        self.loss += loss
        self.tokens += batch.ids_BT.size
        for row, values in zip(self.sums, (np.ones(len(right)), right.numpy(), losses.numpy()), strict=True):
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
    unfinished: Checkpoint | None = None,
    room: Resources = Resources(),
    stop_after: int | None = None,
) -> None:
    """Train a model, in place, through one phase of a recipe.

    Args:
        model: In train mode.
        recipe, phase_idx: Schedule and rates, and which of its phases.
        seed: Of the documents.
        curve: Gets every step.
        unfinished: Where the run is saved now and then; if it was saved in this phase, it goes on there.
        room: Resources that it may take.
        stop_after: Stop after that many steps of the full schedule (for tests).
    """
    phase = recipe.phases[phase_idx]
    before = sum(earlier.steps for earlier in recipe.phases[:phase_idx])
    both = optimisers(model, recipe)
    base = [own.param_groups[0]["lr"] for own in both]
    start = unfinished.restore(phase_idx, model, both) if unfinished is not None else 0
    kind_weights = torch.tensor(list(WEIGHTS.values()))
    steps = min(phase.steps, stop_after or phase.steps)
    bar = tqdm(
        batches(recipe, phase_idx, seed, start=start, loaders=room.loaders),
        total=steps,
        initial=start,
        desc=f"seed {seed}, phase {phase_idx + 1}",
    )
    for step, (length, batch) in enumerate(bar, start):
        if step >= steps:
            break
        for own, lr in zip(both, base, strict=True):
            own.param_groups[0]["lr"] = lr * rate(phase, recipe.warmup, step)
        model.zero_grad(set_to_none=True)
        loss, losses, right = step_loss(model, batch, kind_weights, room.micro_tokens)
        if not math.isfinite(loss):
            kept = f"; the last good state is in {unfinished.path}" if unfinished is not None else ""
            raise RuntimeError(f"the loss is {loss} at step {before + step + 1}, length {length}{kept}")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for own in both:
            own.step()
        if curve.add(before + step + 1, length, batch, loss, losses, right):
            row = curve.rows[-1]
            bar.set_postfix({name: row.get(name) for name in ("loss", "get", "all", "common")})
        if unfinished is not None and not (before + step + 1) % recipe.save_every:
            unfinished.save(phase_idx, step + 1, model, both)


@torch.no_grad()
def round_weights_(model: Qwen3ForCausalLM) -> None:
    """Round a model's weights to bfloat16, as saving does."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))


def train(
    model: Qwen3ForCausalLM,
    recipe: Recipe,
    seed: int,
    curve: Curve,
    *,
    unfinished: Checkpoint | None = None,
    room: Resources = Resources(),
) -> None:
    """Train a model, in place, through all phases, from the last checkpoint."""
    model.train()
    if room.checkpointing:
        set_checkpointing_(model, True)
    first = unfinished.phase_idx if unfinished is not None else 0
    for phase_idx in range(first, len(recipe.phases)):
        # A phase begins with weights as they are saved; a run that goes on has rounded them already.
        if phase_idx:
            round_weights_(model)
        train_phase(model, recipe, phase_idx, seed, curve, unfinished=unfinished, room=room)


def run_settings(size: Size, seed: int, *, planted: bool = True) -> dict[str, Any]:
    """Settings that decide the numbers of a run; runs that differ in them cannot be merged."""
    return {
        "size": size.name,
        "seed": seed,
        "planted": planted,
        "model": {**size.model},
        "recipe": asdict(size.recipe),
    }


def files_of(output: Path) -> tuple[Path, Path]:
    """Where the curve of a run stands, and its unfinished state."""
    if output.suffix == ".safetensors":
        return output.with_suffix(".curve.jsonl"), output.with_suffix(".unfinished")
    return output / "curve.jsonl", output / "unfinished"


def make(
    size: Size, seed: int, output: Path, *, device: torch.device, room: Resources, planted: bool = True
) -> None:
    """Train and save; resumes the same run if it is unfinished.

    Args:
        size: What is trained.
        seed: Of first weights and documents.
        output: A `.safetensors` file of the weights alone, as the package ships them (`small` only), or a
            folder that transformers loads.
        device: Where it is trained.
        room: Resources that it may take.
        planted: With `model.plant_induction`.

    Raises:
        ValueError: Weights alone of a size that is loaded from folders, a finished model, or an unfinished
            run that is another.
    """
    is_file = output.suffix == ".safetensors"
    if is_file and size.model:
        raise ValueError(
            f"--output {output} is a file of weights, and only size small is loaded from one: "
            f"pass a folder for size {size.name}"
        )
    if not is_file and (output / "model.safetensors").exists():
        raise ValueError(f"{output} holds a finished model: pass another --output, or remove it")
    curve_path, unfinished_path = files_of(output)
    curve_path.parent.mkdir(parents=True, exist_ok=True)
    settings = run_settings(size, seed, planted=planted)
    curve = Curve(size.recipe.log_every, curve_path)
    unfinished = Checkpoint(unfinished_path, settings)
    if unfinished.found:
        done = sum(phase.steps for phase in size.recipe.phases[: unfinished.phase_idx]) + unfinished.step
        curve.go_on_after(done)
        print(f"goes on at step {done} of {size.recipe.steps}")
    else:
        curve_path.write_text(json.dumps(settings) + "\n")
    model = build(seed, planted=planted, **size.model).to(device)
    train(model, size.recipe, seed, curve, unfinished=unfinished, room=room)
    model = model.cpu().eval()
    if is_file:
        save_model(model, output)
    else:
        round_weights_(model)
        save_folder(model, output)
    unfinished_path.unlink(missing_ok=True)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: train a size and seed, save the model and its curve."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    about = "; ".join(f"{size.name}: {size.about}" for size in SIZES.values())
    add("--size", default=SMALL.name, help=f"{about} (default small)")
    add("--seed", type=int, default=0, help="of initialisation and documents")
    add(
        "--output",
        type=Path,
        help="folder of the model, or of size small a .safetensors file; default: inside the package, of "
        "another size runs/reference-SIZE-seedN",
    )
    add("--device", default="cpu", help="cpu, cuda, cuda:1, or auto (default cpu)")
    add("--threads", type=int, default=1, help="of the CPU (default 1: the shipped models')")
    add("--loaders", type=int, default=0, help="processes that write documents (not of small)")
    add(
        "--micro-tokens", type=int, help="most tokens read together; less memory, the same step (default all)"
    )
    add("--checkpointing", action="store_true", help="compute activations twice to hold fewer")
    add("--no-planting", action="store_true", help="without the planted induction heads")
    add("--plan", action="store_true", help="print what it would take, and train nothing")
    given = options.parse_args(arguments)
    size: Size = lookup(given.size, SIZES, what="size of a reference model")
    for name, least in (("seed", 0), ("threads", 1), ("loaders", 0), ("micro_tokens", 1)):
        value = getattr(given, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: pass {least} or more")
    if given.loaders and not size.recipe.indexed:
        raise ValueError(
            f"--loaders {given.loaders}: the documents of size {size.name} are one stream, which one "
            "process writes: leave it out"
        )
    default = (
        weights_path(given.seed) if size is SMALL else Path(f"runs/reference-{size.name}-seed{given.seed}")
    )
    output = given.output or default
    room = Resources(given.micro_tokens, given.checkpointing, given.loaders)
    torch.set_num_threads(given.threads)
    if given.plan:
        from retain.reference.cost import plan

        print(plan(size, room))
        return 0
    device = _device(given.device)
    make(size, given.seed, output, device=device, room=room, planted=not given.no_planting)
    print(f"model: {output}\ncurve: {files_of(output)[0]}")
    return 0


def _device(name: str) -> torch.device:
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        device = torch.device(kind)
    except RuntimeError:
        raise ValueError(f"--device {name!r} is none: pass cpu, cuda, cuda:1, or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name!r}, and torch sees no GPU here: pass cpu, or auto")
    return device


if __name__ == "__main__":
    sys.exit(main())
