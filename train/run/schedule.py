"""Computes the learning rate of a step.

The schedule is a function of the step, not an object with a state: resuming and several processes need
nothing from it.
"""

import math
from typing import Annotated, Literal

from pydantic import Field

from retain.config import Count, Many, NotNegative, Positive, Whole
from retain.train.settings import section

Beta = Annotated[float, Field(ge=0, lt=1)]


@section
class TrainingSettings:
    """Settings of steps, batches, AdamW, and how often the run looks and saves."""

    steps: Count = 200
    """Optimiser steps."""
    batch_documents: Many = 8
    """Documents of a step, over all processes; a multiple of their number."""
    micro_batch: Count = 4
    """Documents of one forward pass of one process; bounds the memory, changes no number but by rounding."""
    lr: Positive = 5e-3
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "constant", "halving", "decay"] = "cosine"
    """After the warm-up: `cosine` down to `final_lr`; `constant`; `halving` at a half and at three quarters
    of the steps (Fast KVzip, arXiv 2601.17668); `decay`, constant but for the last tenth, which falls
    linearly to `final_lr` (warm-up, stable, decay: WG-KV, arXiv 2512.17452)."""
    final_lr: NotNegative = 0.05
    """Share of `lr` that `cosine` and `decay` end at."""
    weight_decay: NotNegative = 0.01
    """Of AdamW."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Of AdamW."""
    eps: Positive = 1e-8
    """Of AdamW, beside the root of the second moment: gradients far below it hardly move anything (those of a
    decay that opens at 18 are 1e-8 of others)."""
    warmup_steps: Whole = 10
    """Linear warm-up."""
    clip: Positive = 1.0
    """Largest gradient norm."""
    held_out_every: Whole = 50
    """Steps between looks at the held-out documents (0 = only at the end)."""
    checkpoint_every: Whole = 50
    """Steps between checkpoints (0 = none)."""


def learning_rate(step: int, settings: TrainingSettings) -> float:
    """Linear warm-up, then as `settings.schedule` says; `step` counts from 0."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    fallen = {
        "cosine": 0.5 * (1 - math.cos(math.pi * done)),
        "constant": 0.0,
        "halving": 0.0,
        "decay": max(0.0, (done - 0.9) / (1 - 0.9)),
    }[settings.schedule]
    halvings = sum(done >= share for share in (0.5, 0.75)) if settings.schedule == "halving" else 0
    return settings.lr * (1 - (1 - settings.final_lr) * fallen) * 0.5**halvings
