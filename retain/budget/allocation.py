"""Spreads a budget over layers, and over the heads of a layer, as whole entries of exact sum.

*Guaranteed* entries (protected ones, a first stage, one entry a head) lie inside a share; only the rest is
shared. Layers share by one water level (`retain.budget.largest_remainder.fill`): when a layer joins, the
shares of the others only shrink, so that a cascade can evict early and still end at the one-shot result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from retain.budget.largest_remainder import exact, ratio_of
from retain.config import Range, Share, check_fields
from retain.ranking import rank_kept_first, refuse_nan

Layers = Literal["uniform", "pyramid", "cake", "entropy"]
LAYERS: tuple[Layers, ...] = get_args(Layers)


@dataclass(frozen=True)
class Allocation:
    """Settings of how a budget is spread.

    Args:
        layers: `uniform`; `pyramid` (PyramidKV: falls linearly with depth); `cake` (by the weight that the
            score measures: CAKE's preference); `entropy` (LAVa: by the entropy of the scores that compete).
        beta: of `pyramid`: the last layer gets a share `1 / beta` of the mean.
        spread: of `cake`: what a layer cannot hold goes to the others by `weight`, or `even`ly, as released
            (then a cascade is not exact).
        safeguard: where heads share a budget. `guaranteed`: each head keeps its first entries beside the
            protected ones, `safeguard_share` of the mean budget; None: one entry a head.
        safeguard_share: in [0, 1].
        normalise: divide scores by their mean over the `head` or the `layer` before heads and layers compete.
        compete_by: heads and layers compete by their `score`, or by the score of their `first` stage (AdaKV
            under CriticalKV).
        weights: path of a number for each KV head (`retain.head_weights`), in proportion to which the heads
            of all layers share what is not protected (DuoAttention, HeadKV); only with scope `head`.
    """

    layers: Layers = "uniform"
    beta: Annotated[float, Range(least=1)] = 20.0
    spread: Literal["weight", "even"] = "weight"
    safeguard: Literal["guaranteed"] | None = None
    safeguard_share: Share = 0.2
    normalise: Literal["head", "layer"] | None = None
    compete_by: Literal["score", "first"] = "score"
    weights: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "allocation")


@dataclass(frozen=True)
class Bids:
    """Entries of one layer that compete for a shared budget, in no particular order.

    Args:
        guaranteed_BH: entries that each head has in any case; they do not bid.
        value_N, place_N, row_N: score, place in the sequence, and row `b * H + h` of the others.
        draw_N: their keys where a share is drawn (`retain.budget.priority_sampling`).
        free_BHT: which entries bid, row after row in the order of these fields; None where only some of the
            bids are left, or they are on another device than the entries.
    """

    guaranteed_BH: Int64[Tensor, "B H"]
    value_N: Float[Tensor, " N"]
    place_N: Int32[Tensor, " N"]
    row_N: Int32[Tensor, " N"]
    draw_N: Float[Tensor, " N"] | None = None
    free_BHT: Bool[Tensor, "B H T"] | None = None

    def select(self, which_N: Bool[Tensor, " N"]) -> "Bids":
        """Select some of the bids."""
        # Counted once, for all of their fields: a mask is waited for each time that it indexes.
        at_N = which_N.nonzero()[:, 0]
        return self._changed(self.guaranteed_BH, lambda field_N: field_N[at_N])

    def to(self, device: torch.device) -> "Bids":
        """Move the bids to another device; `free_BHT` is dropped, since it marks entries on the old one."""
        return self._changed(self.guaranteed_BH.to(device), lambda field_N: field_N.to(device))

    def _changed(self, guaranteed_BH: Tensor, change: Callable[[Tensor], Tensor]) -> "Bids":
        draw_N = None if self.draw_N is None else change(self.draw_N)
        return Bids(guaranteed_BH, change(self.value_N), change(self.place_N), change(self.row_N), draw_N)


class Won(NamedTuple):
    """Budgets of one layer's heads.

    Attributes:
        budget_BH: entries of each head, guaranteed ones included.
        made: the bids that were made; None where heads do not bid.
        won_N: which of them won; None where heads do not bid.
        drawn_N: which of the bids that were made won by their key; None where nothing is drawn.
    """

    budget_BH: Int64[Tensor, "B H"]
    made: Bids | None = None
    won_N: Bool[Tensor, " N"] | None = None
    drawn_N: Bool[Tensor, " N"] | None = None

    @property
    def bids(self) -> Bids | None:
        """Those that won, and may still win when more layers come. To select them waits for the device, so
        it is done where they are asked for."""
        return None if self.made is None or self.won_N is None else self.made.select(self.won_N)


def make_bids(
    compete_BHT: Float[Tensor, "B H T"],
    exists_BHT: Bool[Tensor, "B H T"],
    kept_BHT: Bool[Tensor, "B H T"],
    least_B: Sequence[int],
    place_BT: Int[Tensor, "B T"] | None = None,
    draw_BHT: Float[Tensor, "B H T"] | None = None,
) -> Bids:
    """Make one layer's bids: its entries apart from the guaranteed ones.

    Args:
        compete_BHT: comparable across heads; no NaN.
        exists_BHT: False where the head holds no entry.
        kept_BHT: kept in any case (protected, a first stage).
        least_B: entries that every head of a sequence gets at least, the first of (kept, score).
        place_BT: places in the sequences; None: the index, the same in all layers.
        draw_BHT: keys where a share is drawn.
    """
    refuse_nan(compete_BHT)
    if draw_BHT is not None:
        refuse_nan(draw_BHT)
    compete_BHT = compete_BHT.masked_fill(~exists_BHT, float("-inf"))
    least_B11 = torch.tensor(least_B, device=compete_BHT.device)[:, None, None]
    guaranteed_BHT = kept_BHT | ((rank_kept_first(compete_BHT, kept_BHT) < least_B11) & exists_BHT)
    free_BHT = exists_BHT & ~guaranteed_BHT
    b, h, t = free_BHT.nonzero(as_tuple=True)
    row_N = b * compete_BHT.shape[1] + h
    place_N = t if place_BT is None else place_BT.to(t.device)[b, t]
    draw_N = None if draw_BHT is None else draw_BHT[b, h, t]
    parts = guaranteed_BHT.sum(-1), compete_BHT[b, h, t], place_N.int(), row_N.int()
    return Bids(*parts, draw_N, free_BHT)


def normalised(score_BHT: Float[Tensor, "B H T"], kind: str | None) -> Float[Tensor, "B H T"]:
    """Divide scores by their mean, so that heads or layers of unlike scale can compete.

    `head: s_h[i] / mean_i s_h[i]`, `layer: s_h[i] / mean_{h, i} s_h[i]`, over the entries that exist (score
    above -inf); None leaves the scores alone. The order inside a head (or layer) stays.

    Raises:
        ValueError: if a score is negative.
    """
    if kind is None:
        return score_BHT
    exists_BHT = score_BHT > float("-inf")
    refuse_negative(score_BHT, "allocation.normalise divides scores by their mean")
    axes = (-1,) if kind == "head" else (-2, -1)
    total = score_BHT.masked_fill(~exists_BHT, 0.0).sum(axes, keepdim=True)
    mean = total / exists_BHT.sum(axes, keepdim=True).clamp_min(1)
    return score_BHT / mean.clamp_min(torch.finfo(score_BHT.dtype).tiny)


def _level(total_B: Tensor, capacity_BH: Tensor) -> tuple[Tensor, Tensor]:
    """Water level up to which heads are filled so that they hold the total, as `part / whole`, `[B, 1]` each;
    smaller heads are full."""
    capacity, _ = capacity_BH.sort(dim=-1)
    below = capacity.cumsum(-1) - capacity
    others = torch.arange(capacity.shape[1], 0, -1, device=capacity.device).expand_as(capacity)
    # With the i smallest heads full, the others share the rest; it is right for the first i that it fits.
    rest = total_B[:, None] - below
    first_B1 = (rest <= capacity * others).int().argmax(-1, keepdim=True)
    return rest.gather(-1, first_B1), others.gather(-1, first_B1)


def allocate_uniform(total_B: Int64[Tensor, " B"], capacity_BH: Int64[Tensor, "B H"]) -> Int64[Tensor, "B H"]:
    """Give every head of a layer the same, the remainder to the lowest heads, capped at what a head has.

    `budget[b, h] = min(capacity[b, h], level_b)`, plus one for the first heads that can hold it, until the
    sum is `total_b`, which is at most what the heads have.
    """
    top_B1, others_B1 = _level(total_B, capacity_BH)
    budget_BH = torch.minimum(capacity_BH, top_B1 // others_B1)
    left_B1 = total_B[:, None] - budget_BH.sum(-1, keepdim=True)
    more_BH = capacity_BH > budget_BH
    return budget_BH + (more_BH & (more_BH.cumsum(-1) <= left_B1)).long()


def allocate_joint(
    layers: Sequence[Bids], total_B: Sequence[int], drawn_share: float | None = None
) -> list[Won]:
    """Budgets of a joint top-k: heads, of one layer or of several, compete for one total.

    `budget_l[b, h] = guaranteed_l[b, h] + #{its bids among the first total_b - sum(guaranteed)}`. Equal bids
    go to the later position, then to the lower layer, then to the lower head. Afterwards a head's own
    top-`budget` is exactly its part of the joint top-k.

    With a drawn share, `floor(drawn_share * (total_b - sum(guaranteed)))` of the places go, among the bids
    that the others leave, to the largest keys, ties as above. As layers come both parts only lose to later
    ones: an entry that is in neither now is in neither at the end.

    Ada-KV (arXiv 2407.11550) flattens the heads of a layer so, Layer-DefensiveKV (arXiv 2510.13334) those of
    all layers.

    Args:
        layers: bids of each.
        total_B: entries that each sequence may keep; where fewer exist, all are kept.
        drawn_share: in [0, 1], of the entries that are not guaranteed; None: nothing is drawn.

    Raises:
        ValueError: if the guaranteed entries alone exceed the total.
    """
    device = layers[0].value_N.device
    there = [bids.to(device) for bids in layers]
    total = torch.tensor(total_B, dtype=torch.int64, device=device)
    free_B = total - torch.stack([bids.guaranteed_BH.sum(-1) for bids in there]).sum(0)
    if (free_B < 0).any():
        row = int((free_B < 0).nonzero()[0])
        raise ValueError(
            f"sequence {row} has a budget of {int(total[row])} entries, {-int(free_B[row])} fewer than its "
            "heads are guaranteed (protected, a first stage, a safeguard, and one a head): raise the budget, "
            "or protect less."
        )
    value_N = torch.cat([bids.value_N for bids in there])
    # Where all else is equal the later place counts, then, as they stand here, the lower layer and head.
    later_N = torch.cat([bids.place_N for bids in there]).sort(descending=True, stable=True).indices
    sequence_N = torch.cat([bids.row_N // bids.guaranteed_BH.shape[1] for bids in there]).long()
    drawn_B = torch.zeros_like(free_B)
    if drawn_share is not None:
        part, whole = ratio_of(drawn_share)
        drawn_B = free_B * part // whole
    scored_N = _first_of_each(value_N, later_N, sequence_N, free_B - drawn_B)
    chosen_N = scored_N
    if drawn_share is not None:
        keys = [bids.draw_N for bids in there if bids.draw_N is not None]
        keys_N = torch.cat(keys).masked_fill(scored_N, float("-inf"))
        # Those that went by score stand last; where there is too little left to draw, all of it is drawn.
        chosen_N = scored_N | (_first_of_each(keys_N, later_N, sequence_N, drawn_B) & ~scored_N)
    sizes = [len(bids.value_N) for bids in there]
    parts = zip(layers, there, chosen_N.split(sizes), scored_N.split(sizes), strict=True)
    drawn = drawn_share is not None
    return [_won(own, bids, won_N, by_score_N if drawn else None) for own, bids, won_N, by_score_N in parts]


def _won(bids: Bids, there: Bids, won_N: Bool[Tensor, " N"], scored_N: Bool[Tensor, " N"] | None) -> Won:
    """Winning bids of a layer and its budgets; `there` are its bids on the device of `won_N`, and `scored_N`
    those that won by score where the others were drawn."""
    extra_R = torch.zeros_like(there.guaranteed_BH).flatten()
    extra_R.scatter_add_(0, there.row_N.long(), won_N.long())
    budget_BH = there.guaranteed_BH + extra_R.view_as(there.guaranteed_BH)
    home = bids.value_N.device
    drawn_N = None if scored_N is None else (won_N & ~scored_N).to(home)
    won_N = won_N.to(home)
    return Won(budget_BH.to(home), bids, won_N, drawn_N)


def _first_of_each(value_N: Tensor, later_N: Tensor, sequence_N: Tensor, count_B: Tensor) -> Tensor:
    """Mask of the first `count_B` of each sequence: by value, then in the order of `later_N`."""
    # One stable sort after another, the last the first to count.
    order_N = later_N[value_N[later_N].sort(descending=True, stable=True).indices]
    if len(count_B) > 1:
        order_N = order_N[sequence_N[order_N].sort(stable=True).indices]
    held_B = torch.zeros_like(count_B).scatter_add_(0, sequence_N, torch.ones_like(sequence_N))
    sorted_N = sequence_N[order_N]
    place_N = torch.arange(len(order_N), device=value_N.device) - (held_B.cumsum(0) - held_B)[sorted_N]
    return torch.zeros_like(order_N, dtype=torch.bool).scatter_(0, order_N, place_N < count_B[sorted_N])


def pyramid(mean: Fraction, most: Fraction, num_layers: int, beta: float) -> list[Fraction]:
    """Compute PyramidKV's shares: a straight line over depth whose mean is the uniform share.

    `first = 2 mean - last`, `last = mean / beta`; if the first would exceed what exists, `first = most` and
    `last = 2 mean - most`.

    PyramidKV (arXiv 2406.02069); beta 20 as its code and comparisons have it. Theirs rounds each step down,
    and computes the line once for the first prompt; here it is exact, and each prompt's own.
    """
    if num_layers == 1:
        return [mean]
    last = mean / exact(beta)
    first = 2 * mean - last
    if first > most:
        first, last = most, 2 * mean - most
    return [first - (first - last) * idx / (num_layers - 1) for idx in range(num_layers)]


def _rounded_down(total: int, weights: Sequence[Fraction]) -> list[int]:
    """Shares by weight, each rounded down; equal ones where all weights are zero."""
    scale = sum(weights)
    return [
        math.floor(total * (weight / scale if scale else Fraction(1, len(weights)))) for weight in weights
    ]


def spread_evenly(
    total: int, weights: Sequence[Fraction], least: Sequence[int], most: Sequence[int]
) -> list[int]:
    """Compute CAKE's shares as released: by weight and rounded down, then capped; the remainder is spread
    evenly over the layers that can hold more (an excess is taken evenly from those that can give).

    The shares sum to the total, which lies between `sum(least)` and `sum(most)`. Weights are non-negative;
    all zero is all alike.
    """
    bounds = zip(_rounded_down(total, weights), least, most, strict=True)
    shares = [min(max(share, low), high) for share, low, high in bounds]
    while left := total - sum(shares):
        sign = 1 if left > 0 else -1
        bound = most if sign > 0 else least
        open_to = [i for i, share in enumerate(shares) if share != bound[i]]
        each, more = divmod(abs(left), len(open_to))
        for order, i in enumerate(open_to):
            step = min(each + (order < more), abs(bound[i] - shares[i]))
            shares[i] += sign * step
    return shares


def entropy_weight(
    score_BHT: Float[Tensor, "B H T"], competes_BHT: Bool[Tensor, "B H T"]
) -> Float[Tensor, " B"]:
    """Compute LAVa's weight of a layer: the entropy of its scores, `-sum p log(p + tiny)`, `p = s / (sum s +
    tiny)`.

    Over the entries of all heads that compete (not padding, not protected), in float64. Its code divides by
    `ln(H * m)`, its paper by `H * N`; both are the same for all layers of a prompt, and change no share.

    LAVa: Layer-wise KV Cache Eviction with Dynamic Budget Allocation, arXiv 2509.09754.

    Raises:
        ValueError: if a score is negative.
    """
    refuse_negative(score_BHT, "allocation.layers 'entropy' takes scores for shares of a whole")
    tiny = 1e-16
    score = score_BHT.double().masked_fill(~competes_BHT, 0.0).flatten(1)
    p = score / (score.sum(-1, keepdim=True) + tiny)
    return -(p * (p + tiny).log()).sum(-1).clamp_max(0.0)


def refuse_negative(score_BHT: Float[Tensor, "B H T"], why: str) -> None:
    """Raise `ValueError` for scores below zero, of which shares would be meaningless."""
    if ((score_BHT < 0) & (score_BHT > float("-inf"))).any():
        raise ValueError(
            f"{why}, and there are scores below zero: take a score in 'risk' or 'mass', or none of the two."
        )
