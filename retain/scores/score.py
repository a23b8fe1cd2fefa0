"""Defines `Score`: one number an entry, higher = keep, with its unit; fusing unlike numbers is an error."""

from collections.abc import Callable, Mapping, Sequence
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
        unit: `risk` (value-weighted attention, `a * ||v W_O||_1`; also a maximum or mean of it over queries
            and heads, and with attention granted to every entry before the norm; not with another norm or a
            divisor), `mass` (attention alone, or a share of it) or `rank` (only the order inside a head is
            meaningful; heads may still compete by the numbers as they are, as in released presses).
        first_BHT: score of the first of two stages (`retain.two_stage`), float32; None with one stage.
        window: number of last entries that are the observation window of the score.
        layer_weight_B: float64, weight of this layer in a budget that layers share (CAKE); None without.
        fusion_weights: of a gate's score, fusion -> its calibrated weight `[H]` in 0..1; None without any.
        quotas: of a gate's score, stored budget shares of all heads and layers (`retain.budget.quotas`); None
            without any.
        draw_BHT: keys of a drawn share of a budget (`retain.budget.priority_sampling`), float32; None
            without.
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
        unit: the unit under default settings (`retain.scores.trial` finds it under others).
        needs: the evidence that the function reads beyond keys, values, padding and places, under default
            settings: `window` (as many last queries as the `Score` says, one at least), `queries` (as many as
            there are, one at least), `running` (statistics of all queries, or every query to make them from),
            `value_norm` (`value_norm_BQT`, or an output projection to make it with), `rotary`, `hidden`,
            `token_ids`, `seeds` (one integer a sequence, passed as `seeds_B`). A cache that evicts again
            keeps exactly this for the next eviction.
        paper: title and arXiv id, or where the idea comes from.
        cost: cost of a layer, in the letters of `retain.shapes` (W: window queries).
        needs_where: other needs under certain settings: (name, value) -> needs.
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
        """Needs under these settings."""
        for (name, value), needs in self.needs_where.items():
            if settings.get(name) == value:
                return needs
        return self.needs


def masked_score(
    values_BHT: Float[Tensor, "B H T"],
    exists: Bool[Tensor, "B T"] | Bool[Tensor, "B H T"],
    unit: str,
    *,
    first_BHT: Float[Tensor, "B H T"] | None = None,
    window: int = 0,
    layer_weight_B: Float64[Tensor, " B"] | None = None,
) -> Score:
    """Make a `Score` from raw numbers: float32, and -inf where a head holds no entry.

    Args:
        values_BHT: scores, any float type, finite where an entry exists.
        exists: which head holds which entry (`Evidence.exists_BHT`), or `[B, T]`, the same for all heads.
        unit: what the numbers are.
        first_BHT: score of a first stage, any float type, finite where an entry exists.
        window: observation window that the numbers were made with.
        layer_weight_B: weight of this layer in a shared budget.
    """
    missing_BHT = ~(exists[:, None] if exists.dim() == 2 else exists)
    if first_BHT is not None:
        first_BHT = first_BHT.float().masked_fill(missing_BHT, float("-inf"))
    values_BHT = values_BHT.float().masked_fill(missing_BHT, float("-inf"))
    return Score(values_BHT, unit, first_BHT, window, layer_weight_B)


def check_choice(setting: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is none of the choices.

    Raises:
        ValueError: with the setting's name and all choices.
    """
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{setting} is {', '.join(others)} or {last}; got {value!r}.")
