"""Defines a loss term's input: one layer's predictions and targets of a document, and the settings."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from retain.config import NotNegative, Positive, PositiveShare, ProperShare, Whole
from retain.gates import Gate
from retain.train.settings import section


@section
class LossSettings:
    """The terms and what they need."""

    terms: dict[str, NotNegative] = field(default_factory=lambda: {"mse": 1.0, "pairwise": 0.5})
    """Weight of each term: `mse`, `smooth_l1`, `bce`, `smooth`, `pairwise`, `layer_output`; 0 reports a term
    and does not train on it."""
    keep_ratios: tuple[ProperShare, ...] = (0.1, 0.2, 0.4)
    """Budgets whose boundary is trained."""
    band: PositiveShare = 0.15
    """Width of the band on either side of a boundary, as a share of the entries."""
    pairs: Annotated[int, Field(ge=0, le=2**16)] = 64
    """Pairs per head, budget and document."""
    temperature: Positive = 1.0
    """Difference in the gate's unit at which a pair counts as told apart, or an entry as kept."""
    output_queries: Whole = 64
    """Queries of a document, and of each branch, that `layer_output` looks at; 0: all."""


@dataclass(frozen=True)
class Case:
    """A layer's predictions and targets of one document, with a batch axis of one.

    Args:
        output_BHT: the gate's output, in its unit, in float32 or float64.
        target_BHT: the output that is wanted, as risk, mass or rank; 0 where nothing is defined.
        reached_BHT: entries that count.
        gate: for its unit and its floor.
        settings: of all terms.
        key: of this document at this step and layer; seeds all draws.
        view: the layer (`retain.train.teacher.View`, or None); only `layer_output` looks at it.
        horizon: recent entries that are protected; only `layer_output` asks.
    """

    output_BHT: Float[Tensor, "B H T"]
    target_BHT: Float[Tensor, "B H T"]
    reached_BHT: Bool[Tensor, "B H T"]
    gate: Gate
    settings: LossSettings
    key: tuple[int, ...]
    view: Any
    horizon: int

    @property
    def wanted_BHT(self) -> Float[Tensor, "B H T"]:
        """The target in the gate's unit: `log(risk + floor)`, the floor per head, for gates that say
        log-risk; as it is for all others."""
        if self.gate.unit == "log_risk":
            return (self.target_BHT + self.gate.risk_floor_H.to(self.target_BHT.device)[:, None]).log()
        return self.target_BHT

    def reached_of(self, values_BHT: Tensor, other: float = 0.0) -> Tensor:
        """The values of reached entries; those of others, which may hold anything (and 0 times infinity is
        not 0), are `other`."""
        return values_BHT.masked_fill(~self.reached_BHT, other)


def boundary_of(count_BH1: Tensor, ratio: float) -> Tensor:
    """Number of `n` entries that a budget keeps: `round(ratio n)`, at least one, and at least one is
    evicted."""
    return torch.round(ratio * count_BH1).long().clamp_min(1).minimum((count_BH1 - 1).clamp_min(0))


def keyed_generator(key: tuple[int, ...]) -> torch.Generator:
    """A CPU generator that depends on several integers and nothing else (mixed by the constants of
    splitmix64)."""
    state = 0
    for part in key:
        state = (state + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 27
    return torch.Generator().manual_seed(state >> 1)


def mean_over_reached(
    each_BHT: Float[Tensor, "B H T"], counts_BHT: Bool[Tensor, "B H T"]
) -> Float[Tensor, " B"]:
    """Mean over a head's entries that count, then over heads; a head in which none does gives 0."""
    each_BHT = each_BHT.masked_fill(~counts_BHT, 0.0)
    return (each_BHT.sum(-1) / counts_BHT.sum(-1).clamp_min(1)).mean(-1)
