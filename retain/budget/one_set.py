"""One token set for all heads of a layer, or of all layers: what engines without ragged rows can hold.

A layer's heads are scored together (`shared_score`), so that heads with equal budgets keep the same tokens.
A budget that is no whole number of them leaves one more token to some of the heads, as without sharing.

Over all layers (`one_set`) nothing can be decided before the last layer has come, so a prefill holds
everything until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.budget.shares import Candidates, Shares
from retain.config import check_fields
from retain.evidence import Score
from retain.ranking import rank_entries, rank_kept_first, refuse_nan


@dataclass(frozen=True)
class Selection:
    """Which heads keep the same tokens.

    Args:
        shared: `layer`, those of each layer; `model`, those of all layers.
        by: what a token is worth to all of them: the `mean` of its scores, or the largest (`max`). Of a score
            in `rank` its place in each head counts, from 0 to 1.
    """

    shared: Literal["layer", "model"] = "layer"
    by: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        check_fields(self, "selection")


def shared_score(score: Score, by: str) -> Score:
    """One score for all heads of a layer, over the heads that hold the entry.

    `s[i] = mean_h s_h[i]`, or the maximum; of a score in `rank` of `1 - rank_h[i] / n_h`, with `n_h` the
    entries that the head holds and rank 0 its best. The same of a first stage. -inf where a head holds no
    entry.
    """
    first_BHT = score.first_BHT
    return replace(
        score,
        values_BHT=_over_heads(score.values_BHT, by, places=score.unit == "rank"),
        first_BHT=None if first_BHT is None else _over_heads(first_BHT, by, places=False),
    )


def common_first(score_BHT: Float[Tensor, "B H T"]) -> Float[Tensor, "B H T"]:
    """Rank what some heads do not hold behind everything else: else the one token that an earlier budget left
    to some would take the place of another in these alone."""
    exists_BHT = score_BHT > float("-inf")
    partly_BHT = exists_BHT & ~exists_BHT.all(1, keepdim=True)
    return score_BHT.masked_fill(partly_BHT, torch.finfo(score_BHT.dtype).min)


def _over_heads(score_BHT: Float[Tensor, "B H T"], by: str, *, places: bool) -> Float[Tensor, "B H T"]:
    refuse_nan(score_BHT)
    exists_BHT = score_BHT > float("-inf")
    values_BHT = score_BHT
    if places:
        # In float64, and rounded at the end, so that places that add up alike tie.
        values_BHT = 1 - rank_entries(score_BHT).double() / exists_BHT.sum(-1, keepdim=True).clamp_min(1)
    if by == "max":
        one_B1T = values_BHT.masked_fill(~exists_BHT, float("-inf")).amax(1, keepdim=True)
    else:
        total_B1T = values_BHT.masked_fill(~exists_BHT, 0.0).double().sum(1, keepdim=True)
        one_B1T = total_B1T / exists_BHT.sum(1, keepdim=True).clamp_min(1)
    return one_B1T.to(score_BHT.dtype).expand_as(score_BHT).masked_fill(~exists_BHT, float("-inf"))


def one_set(shares: Shares, layers: Sequence[Candidates], by: str) -> list[Bool[Tensor, "B H T"]]:
    """Compute the keep masks of all layers, which keep the same tokens: `floor(total / sum_l H_l)` of them,
    and of the next one as many entries as the total leaves, in the lowest layers and heads.

    A token is worth the mean (or maximum) of its scores over the layers; what some head of some layer does
    not hold comes behind. Protected in any layer is protected in all. Ties go to the later token.

    Args:
        layers: all that evict, in order, their heads scored together.
        by: as in `Selection`.
    """
    place_LBT = [_places(layer) for layer in layers]
    width = 1 + max(int(place_BT.max()) for place_BT in place_LBT)
    device = layers[0].score_BHT.device
    score_LBP, kept_BP = [], torch.zeros(len(place_LBT[0]), width, dtype=torch.bool, device=device)
    for layer, place_BT in zip(layers, place_LBT, strict=True):
        # Padding and what no head holds go to a column of their own, which is dropped.
        held_BT = (layer.score_BHT > float("-inf")).any(1)
        at_BT = torch.where(held_BT, place_BT, width)
        own_BP = layer.score_BHT.new_full((len(at_BT), width + 1), float("-inf"))
        score_LBP.append(own_BP.scatter_(1, at_BT, layer.score_BHT.amax(1))[:, :width].to(device))
        sure_BT = layer.kept_BHT.any(1) & held_BT
        sure_BP = torch.zeros(len(at_BT), width + 1, dtype=torch.bool, device=at_BT.device)
        kept_BP |= sure_BP.scatter_(1, at_BT, sure_BT)[:, :width].to(device)
    score_BLP = torch.stack(score_LBP, dim=1)
    lowest = torch.finfo(score_BLP.dtype).min  # of tokens that some head of a layer does not hold
    whole_BP = (score_BLP > lowest).all(1)
    worth_BP = score_BLP.amax(1) if by == "max" else score_BLP.double().mean(1).to(score_BLP.dtype)
    rest_BP = torch.where((score_BLP > float("-inf")).any(1), lowest, float("-inf"))
    score_B1P = worth_BP.where(whole_BP, rest_BP)[:, None]
    rank_BP = rank_kept_first(score_B1P, kept_BP[:, None])[:, 0]
    keeps, lower = [], 0
    for layer, place_BT, heads in zip(layers, place_LBT, shares.totals.heads_L, strict=True):
        total_B1 = torch.tensor(shares.totals.total_B, device=place_BT.device)[:, None]
        number_H = lower + torch.arange(heads, device=place_BT.device)
        tokens_BH = total_B1 // sum(shares.totals.heads_L)
        tokens_BH = tokens_BH + (number_H < total_B1 % sum(shares.totals.heads_L))
        rank_BT = rank_BP.to(place_BT.device).gather(1, place_BT)
        keeps.append((rank_BT[:, None] < tokens_BH[..., None]) & (layer.score_BHT > float("-inf")))
        lower += heads
    return keeps


def _places(layer: Candidates) -> Tensor:
    """Places of the columns of a layer in their sequences, 0 on padding."""
    B, _, T = layer.score_BHT.shape
    if layer.place_BT is None:
        return torch.arange(T, device=layer.score_BHT.device).expand(B, T)
    return layer.place_BT.to(layer.score_BHT.device).clamp_min(0)
