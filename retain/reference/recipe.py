"""Defines how reference models are trained, and their named sizes.

A `Size` is data: changes of the architecture, and a `Recipe` of stages and rates. The shipped models are the
size `small`; all sizes are trained by one loop on the same kinds of documents.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class Stage:
    """`steps` optimiser steps on sequences of up to `length` tokens."""

    length: int
    steps: int


@dataclass(frozen=True)
class Phase:
    """Stages under one schedule of rates, from fresh optimiser states.

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

    def stage_of(self, step: int) -> int:
        """Index of the stage that a step belongs to.

        Raises:
            ValueError: The phase is shorter.
        """
        ends = [*accumulate(stage.steps for stage in self.stages)]
        if step >= ends[-1]:
            raise ValueError(f"step {step} is behind the phase's {ends[-1]}: ask for one below that")
        return bisect_right(ends, step)


GROWTH = Phase((Stage(64, 500), Stage(128, 700), Stage(256, 700), Stage(512, 700), Stage(1024, 2800)))
# Keys with several values are what the first phase learns last: alone it leaves them at 90 %.
FINISH = Phase((Stage(1024, 700),), peak=0.5, decay_share=1.0, multi_share=0.35)


@dataclass(frozen=True)
class Recipe:
    """How a reference model is trained. Defaults are those of the shipped ones.

    Attributes:
        phases: In this order; between two the weights are rounded to bfloat16, as they are when saved.
        tokens_per_step: Tokens of a step; at least four sequences are taken, two of the longest.
        reach: Largest RoPE position that stretched documents see.
        stretch_share: Share of documents whose positions are stretched.
        matrix_lr: Of Muon, for the matrices of the blocks.
        vector_lr: Of AdamW, for embeddings, norms and biases.
        warmup: Steps over which the rates of a phase rise.
        log_every, save_every: Steps between two rows of the curve, and two saves (a multiple of it).
        prose_share: Share of documents whose filler is English prose instead of source code.
        statement_tokens: Most tokens of a document that statements and questions take, about.
        most_facts: Facts of a document after which no further statement is added.
        indexed: Whether each step's documents come from a seed of their own (`retain.reference.batches`);
            else they are one stream.
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
    save_every: int = 500
    prose_share: float = 0.0
    statement_tokens: int = 1024
    most_facts: int = 48
    indexed: bool = False

    @property
    def steps(self) -> int:
        """Optimiser steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def sequences(self, length: int) -> int:
        """Sequences of a step at a length."""
        return max(2 if length >= 1024 else 4, self.tokens_per_step // length)


@dataclass(frozen=True)
class Size:
    """A model that can be trained by name.

    Attributes:
        name: As `--size` takes it.
        about: What it is for, in one line.
        recipe: Of its training.
        model: Fields of `Qwen3Config` that differ from the shipped models'.
    """

    name: str
    about: str
    recipe: Recipe
    model: Mapping[str, Any] = field(default_factory=dict)


SMALL = Size("small", "the shipped models: contexts of 1,000 tokens, one CPU thread", Recipe())

# Trains in seconds and learns nothing: every path of the larger size, where there is no GPU.
TINY = Size(
    "tiny",
    "a trial of the machinery that learns nothing",
    Recipe(
        phases=(Phase((Stage(64, 6), Stage(128, 6))), Phase((Stage(128, 4),), 0.5, 1.0, 0.35)),
        tokens_per_step=512,
        reach=300,
        warmup=4,
        log_every=2,
        save_every=4,
        prose_share=0.5,
        indexed=True,
    ),
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "max_position_embeddings": 512,
    },
)

# Lengths double up to 8,192; half of the documents read as prose; up to 160 facts in one. The rate of the
# matrices is lower than the small models', as width and tokens of a step are larger. Not tuned.
LARGE = Size(
    "large",
    "contexts of up to 8,000 tokens, text half of it prose; meant for one GPU",
    Recipe(
        phases=(
            Phase(
                (
                    *GROWTH.stages[:4],
                    Stage(1024, 1500),
                    Stage(2048, 1500),
                    Stage(4096, 2000),
                    Stage(8192, 2000),
                )
            ),
            Phase((Stage(8192, 900),), peak=0.5, decay_share=1.0, multi_share=0.35),
        ),
        tokens_per_step=32_768,
        reach=16_384,
        matrix_lr=2e-3,
        warmup=100,
        prose_share=0.5,
        statement_tokens=4096,
        most_facts=160,
        indexed=True,
    ),
    {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16_384,
    },
)

SIZES = {size.name: size for size in (SMALL, TINY, LARGE)}
