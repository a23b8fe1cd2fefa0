"""Defines `Score`: one number an entry, higher = keep, and its unit.

A score carries its unit, so that fusing unlike numbers is an error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

UNITS = ("risk", "mass", "rank")


@dataclass(frozen=True)
class Score:
    """Scores of one layer's entries.

    Args:
        values_BHT: float32, higher = keep, -inf on entries that do not exist (padding, or not held by the
            head) and on no other.
        unit: `risk` (value-weighted attention, `a * ||v W_O||_1`; a maximum or a mean of it over queries and
            heads, and attention granted to every entry before the norm, are still in that unit; another norm
            or a divisor is not), `mass` (attention alone, or a share of it) or `rank` (only the order inside
            a head is meaningful; heads may still compete by the numbers as they are, as in released
            presses).
        first_BHT: score of the first of two stages (`retain.two_stage`), float32; None with one stage.
        draw_BHT: keys of a drawn share of a budget (`retain.budget.priority_sampling`), float32; None
            without.
        window: number of last entries that are the observation window of the score.
        layer_weight_B: float64, weight of this layer in a budget that layers share (CAKE); None without.
        fusion_weights: of a gate's score, fusion -> its calibrated weight `[H]` in 0..1; None without any.
        quotas: of a gate's score, stored budget shares of all heads and layers (`retain.budget.quotas`); None
            without any.
    """

    values_BHT: Float[Tensor, "B H T"]
    unit: str
    first_BHT: Float[Tensor, "B H T"] | None = None
    window: int = 0
    layer_weight_B: Float64[Tensor, " B"] | None = None
    fusion_weights: Mapping[str, Tensor] | None = None
    quotas: Mapping[str, Any] | None = None
    draw_BHT: Float[Tensor, "B H T"] | None = None

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"a score's unit is one of {', '.join(UNITS)}; got {self.unit!r}.")
        if self.values_BHT.dtype != torch.float32 or self.values_BHT.dim() != 3:
            shape = list(self.values_BHT.shape)
            raise ValueError(
                f"a score is float32 [B, H, T]; got {self.values_BHT.dtype} {shape}: build it with "
                f"scores.masked_score."
            )


@dataclass(frozen=True)
class ScoreFamily:
    """Entry of the registry of observed scores.

    Args:
        function: `(evidence, **settings) -> Score`.
        unit: the unit under default settings (the `Score` that comes back has the last word;
            `retain.scores.trial` finds it beforehand).
        needs: what the function reads beyond keys, values, padding and places, under default settings
            (`needs_with` knows the others): `window` (as many last queries as the `Score` says, one at
            least), `queries` (as many as there are, one at least), `running` (statistics of all queries, or
            every query to make them from), `value_norm` (`value_norm_BQT`, or an output projection to make
            it with), `rotary`, `hidden`, `token_ids`, `seeds` (one integer a sequence, passed as `seeds_B`).
            Empty: nothing. A cache that evicts again keeps exactly this for the next eviction.
        paper: title and arXiv id, or where the idea comes from.
        cost: cost of a layer, in the letters of `retain.shapes` (W: window queries).
        needs_where: settings under which the function reads something else: (name, value) -> what it reads.
    """

    function: Callable[..., Score]
    unit: str
    needs: frozenset[str]
    paper: str
    cost: str = ""
    needs_where: Mapping[tuple[str, Any], frozenset[str]] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def needs_with(self, settings: Mapping[str, Any]) -> frozenset[str]:
        """What the function reads under these settings."""
        for (name, value), needs in self.needs_where.items():
            if settings.get(name) == value:
                return needs
        return self.needs


def masked_score(
    values_BHT: Float[Tensor, "B H T"],
    valid_BT: Bool[Tensor, "B T"],
    unit: str,
    *,
    first_BHT: Float[Tensor, "B H T"] | None = None,
    window: int = 0,
    layer_weight_B: Float64[Tensor, " B"] | None = None,
    held_BHT: Bool[Tensor, "B H T"] | None = None,
) -> Score:
    """Make a `Score` from raw numbers: float32, and -inf on padding and on entries that the head does not
    hold.

    Args:
        values_BHT: scores, any float type, finite where an entry exists.
        valid_BT: False on padding.
        unit: what the numbers are.
        first_BHT: score of a first stage, any float type, finite where an entry exists.
        window: observation window that the numbers were made with.
        layer_weight_B: weight of this layer in a shared budget.
        held_BHT: which head holds which entry; None: every head every valid one.
    """
    missing_BHT = ~valid_BT[:, None] if held_BHT is None else ~(valid_BT[:, None] & held_BHT)
    if first_BHT is not None:
        first_BHT = first_BHT.float().masked_fill(missing_BHT, float("-inf"))
    values_BHT = values_BHT.float().masked_fill(missing_BHT, float("-inf"))
    return Score(values_BHT, unit, first_BHT, window, layer_weight_B)
