"""Defines a loss term's input: one layer's predictions and targets of a document, and the settings."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

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
    """Name in `TERMS` -> weight; 0 reports a term and does not train on it."""
    huber_delta: Positive = 1.0
    """Where the Huber loss turns linear, in the gate's unit (nats of log-risk)."""
    smooth_l1_beta: Positive = 1.0
    """The same of Locret's SmoothL1, in mass or risk."""
    keep_ratios: tuple[ProperShare, ...] = (0.1, 0.2, 0.4)
    """Budgets whose boundary is trained."""
    band: PositiveShare = 0.15
    """Width of the band on either side of a boundary, as a share of the entries."""
    pairs: Annotated[int, Field(ge=0, le=2**16)] = 64
    """Pairs per head, budget and document."""
    temperature: Positive = 1.0
    """Difference in the gate's unit at which a pair counts as told apart, or an entry as kept."""
    margin: NotNegative = 0.01
    """Of the hinge, in the gate's unit."""
    listwise: Literal["sum", "softmax"] = "sum"
    """How a prediction becomes a distribution: `sum` (divided by its sum) or `softmax` (of the gate's output
    over `temperature`)."""
    layer_output: Literal["exact", "bound"] = "exact"
    """`exact` (attention is run with the soft keep-mask) or `bound` (linear in it)."""
    output_norm: Literal["l1", "l2"] = "l2"
    """Of the residual stream, for `layer_output: exact`."""
    output_queries: Whole = 64
    """Queries of a document, and of each branch, that `layer_output` looks at; 0: all."""


@dataclass(frozen=True)
class Case:
    """One layer of one document, with a batch axis of one.

    Args:
        output_BHT: what the gate said, in its own unit.
        target_BHT: what it should have said, as risk, mass or rank; 0 where nothing is defined.
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
    def target_own_BHT(self) -> Float[Tensor, "B H T"]:
        """The target in the gate's own unit."""
        return target_for_loss(self.target_BHT, self.gate)

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


def target_for_loss(target: Float[Tensor, "*B H T"], gate: Gate) -> Float[Tensor, "*B H T"]:
    """A target in the gate's own unit: `log(risk + floor)`, the floor per head, for gates that say log-risk;
    as it is for all others."""
    if gate.unit == "log_risk":
        return (target + gate.risk_floor_H.to(target.device)[:, None]).log()
    return target


def mean_over_reached(
    each_BHT: Float[Tensor, "B H T"], counts_BHT: Bool[Tensor, "B H T"]
) -> Float[Tensor, " B"]:
    """Mean over a head's entries that count, then over heads; a head in which none does gives 0."""
    each_BHT = each_BHT.masked_fill(~counts_BHT, 0.0)
    return (each_BHT.sum(-1) / counts_BHT.sum(-1).clamp_min(1)).mean(-1)
