"""A score: one number an entry, higher = keep, and the unit it is in.

In: what a score function computed, and which entries exist. Out: a `Score` in float32 whose padding is -inf.
The decision taken here: a score carries its unit, so that fusing unlike numbers is an error and not an
accident.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

UNITS = ("risk", "mass", "rank")


@dataclass(frozen=True)
class Score:
    """Scores of one layer's entries.

    Args:
        values_BHT: float32, higher = keep, -inf on entries that do not exist (padding) and on no other.
        unit: `risk` (value-weighted attention, `a * ||v W_O||_1`), `mass` (attention alone, or a share of it)
            or `rank` (only the order inside a head means something).
    """

    values_BHT: Float[Tensor, "B H T"]
    unit: str

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
    """One entry of the registry of observed scores.

    Args:
        function: `(evidence, **settings) -> Score`.
        unit: the unit under default settings (the `Score` that comes back has the last word).
        needs: what the function reads beyond keys and padding: `window` (the last queries), `all_queries`,
            `hidden`, `token_ids`, `seeds` (one integer a sequence, passed as `seeds_B`).
        paper: title and arXiv id, or where the idea comes from.
    """

    function: Callable[..., Score]
    unit: str
    needs: frozenset[str]
    paper: str


def masked_score(values_BHT: Float[Tensor, "B H T"], valid_BT: Bool[Tensor, "B T"], unit: str) -> Score:
    """A `Score` from raw numbers: float32, and -inf where the entry is padding.

    Args:
        values_BHT: finite scores, any float type.
        valid_BT: False on padding.
        unit: what the numbers are.
    """
    return Score(values_BHT.float().masked_fill(~valid_BT[:, None], float("-inf")), unit)
