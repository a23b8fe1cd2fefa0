"""Which entries of each layer stay, for all layers at once or layer by layer while a model prefills.

In: layers, each scored and guarded (`Candidates`), and what the sequences may hold. Out: keep masks. The
decision taken here: one function, `keep_sets`, answers both for all layers and for those that have come so
far. While layers are still to come it gives the *ceiling* of each share, of which the final answer is a part;
so a `Cascade` that evicts at every step ends with the one-shot sets, and holds no more than the budget (one
entry a layer more, for the ceilings) and one full layer.

Exact for joint selection (scope `model`: a running threshold) and for shares by weight (LAVa, CAKE), since
shares only shrink as layers come. Not exact for CAKE's released repair (`spread: even`): what a full layer
cannot hold is spread at the end over layers that may have evicted it already.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from retain.allocation import (
    Allocation,
    Bids,
    allocate_joint,
    allocate_uniform,
    mix_convex,
    pyramid,
    spread_evenly,
)
from retain.apportion import fill, round_shares
from retain.budget import Totals
from retain.head_classes import check_shape, class_budgets
from retain.selection import select
from retain.stages import FirstStage, stage_by_budget


@dataclass(frozen=True)
class Candidates:
    """One layer's entries, scored and guarded, before any budget.

    Args:
        score_BHM: orders each head; -inf where there is no entry.
        kept_BHM: kept in any case: protected, or in a first stage by mass.
        first_BHM: what a first stage by budget ranks by; None without one.
        bids: what the heads compete with; None where they do not.
        weight_B: what the layer asks for, per sequence; None where layers get fixed shares.
        protected_B: entries a head that are protected by their place.
    """

    score_BHM: Float[Tensor, "B H M"]
    kept_BHM: Bool[Tensor, "B H M"]
    first_BHM: Float[Tensor, "B H M"] | None = None
    bids: Bids | None = None
    weight_B: tuple[Fraction, ...] | None = None
    protected_B: tuple[int, ...] = ()

    @property
    def held_BH(self) -> Int64[Tensor, "B H"]:
        """Entries that each head has."""
        return (self.score_BHM > float("-inf")).sum(-1)


@dataclass(frozen=True)
class Split:
    """How a policy splits a budget: its scope, its allocation, its first stage.

    Args:
        scope: `head`, `layer` or `model`.
        allocation: over layers and heads.
        first_stage: None for selection in one stage.
    """

    scope: str
    allocation: Allocation = Allocation()
    first_stage: FirstStage | None = None

    @property
    def crosses_layers(self) -> bool:
        """Whether what a layer keeps depends on other layers."""
        return self.scope == "model" or self.allocation.layers in ("cake", "entropy")


def keep_sets(
    split: Split, layers: Sequence[Candidates], totals: Totals, *, first: int = 0
) -> list[Bool[Tensor, "B H M"]]:
    """What each layer keeps.

    Args:
        split: the policy's.
        layers: those that have come: all, or the first few of those that evict.
        totals: over all layers.
        first: place of `layers[0]` among them; not 0 only where layers do not depend on each other.

    Returns:
        keep masks; their sum is exact when all layers have come.

    Raises:
        ValueError: if a budget cannot hold what is guaranteed.
    """
    budgets, _ = head_budgets(split, layers, totals, first=first)
    return [_keep(split, layer, budget) for layer, budget in zip(layers, budgets, strict=True)]


def head_budgets(
    split: Split, layers: Sequence[Candidates], totals: Totals, *, first: int = 0
) -> tuple[list[Int64[Tensor, "B H"]], list[Int64[Tensor, "B H"]]]:
    """Entries of each head of each layer.

    Args:
        split: the policy's.
        layers: those that have come.
        totals: over all layers.
        first: place of `layers[0]`.

    Returns:
        the budgets, and how far each head's bids reached before a safeguard (the same without one).
    """
    final = first + len(layers) == len(totals.heads_L)
    if split.scope == "model":
        budgets = allocate_joint([_bids(layer) for layer in layers], totals.total_B)
        return budgets, budgets
    if split.allocation.head_classes is not None:
        budgets = _class_budgets(split.allocation, layers, totals, first)
        return budgets, budgets
    shares_LB = _layer_totals(split, layers, totals, first, final)
    if split.scope == "head":
        budgets = [
            allocate_uniform(torch.tensor(own, device=layer.score_BHM.device), layer.held_BH)
            for layer, own in zip(layers, shares_LB, strict=True)
        ]
        return budgets, budgets
    reached = [allocate_joint([_bids(layer)], own)[0] for layer, own in zip(layers, shares_LB, strict=True)]
    if split.allocation.safeguard != "convex":
        return reached, reached
    share, round_up = split.allocation.safeguard_share, split.crosses_layers and not final
    return [mix_convex(budget, share, round_up=round_up) for budget in reached], reached


def _bids(layer: Candidates) -> Bids:
    assert layer.bids is not None, "heads that share a budget have bids"
    return layer.bids


def _keep(split: Split, layer: Candidates, budget_BH: Int64[Tensor, "B H"]) -> Bool[Tensor, "B H M"]:
    """The top of each head, in one stage or two."""
    kept_BHM, stage = layer.kept_BHM, split.first_stage
    if stage is not None and stage.by == "budget":
        assert layer.first_BHM is not None
        kept_BHM = kept_BHM | stage_by_budget(layer.first_BHM, kept_BHM, budget_BH, stage.share)
    return select(layer.score_BHM, kept_BHM, budget_BH)


def _layer_totals(
    split: Split, layers: Sequence[Candidates], totals: Totals, first: int, final: bool
) -> list[list[int]]:
    """Entries of each layer, `[layer][sequence]`; while layers are to come, the ceilings of their shares."""
    kind = split.allocation.layers
    if kind == "uniform":
        return [[row[first + idx] for row in totals.equal_BL] for idx in range(len(layers))]
    held_LB = [layer.held_BH.sum(-1).tolist() for layer in layers]
    if split.scope == "head":  # all heads get what the fullest of them needs
        guaranteed_LB = [
            (layer.kept_BHM.sum(-1).amax(1).clamp_min(1) * layer.score_BHM.shape[1]).tolist()
            for layer in layers
        ]
    else:
        guaranteed_LB = [_bids(layer).guaranteed_BH.sum(-1).tolist() for layer in layers]
    columns = []
    for row, total in enumerate(totals.total_B):
        protected = [layers[0].protected_B[row] * heads for heads in totals.heads_L]
        free = total - sum(protected)
        safe = protected[first : first + len(layers)]
        least = [max(0, own[row] - part) for own, part in zip(guaranteed_LB, safe, strict=True)]
        most = [own[row] - part for own, part in zip(held_LB, safe, strict=True)]
        if kind == "pyramid":
            columns.append(_pyramid(split, totals, row, free, protected, first, len(layers)))
            continue
        weights = []
        for layer in layers:
            assert layer.weight_B is not None
            weights.append(layer.weight_B[row])
        # Layers to come have their protected entries set aside; the rest is for those that are here.
        here = min(free, sum(most))
        if final and split.allocation.spread == "even" and kind == "cake":
            shares = spread_evenly(here, weights, least, most)
        else:
            filled = fill(here, weights, least, most)
            shares = round_shares(filled) if final else [math.ceil(share) for share in filled]
        columns.append([share + part for share, part in zip(shares, safe, strict=True)])
    return [list(column) for column in zip(*columns, strict=True)]


def _pyramid(
    split: Split, totals: Totals, row: int, free: int, protected: Sequence[int], first: int, count: int
) -> list[int]:
    """PyramidKV's entries of some layers: known before any layer came."""
    num_layers = len(totals.heads_L)
    capacity = totals.capacity_BL[row]
    room = [own - part for own, part in zip(capacity, protected, strict=True)]
    least = [max(0, heads - part) for heads, part in zip(totals.heads_L, protected, strict=True)]
    line = pyramid(Fraction(free, num_layers), Fraction(min(room)), num_layers, split.allocation.beta)
    shares = round_shares(fill(free, line, least, room))
    return [share + part for share, part in zip(shares, protected, strict=True)][first : first + count]


def _class_budgets(
    allocation: Allocation, layers: Sequence[Candidates], totals: Totals, first: int
) -> list[Int64[Tensor, "B H"]]:
    """Budgets by head classes: known before any layer came."""
    assert allocation.head_classes is not None
    classes_LH = check_shape(allocation.head_classes, totals.heads_L)
    budgets_BLH = [
        class_budgets(classes_LH, allocation.head_threshold, total, max(1, least), length)
        for total, least, length in zip(totals.total_B, layers[0].protected_B, totals.lengths_B, strict=True)
    ]
    return [
        torch.tensor(
            [rows[first + idx] for rows in budgets_BLH], dtype=torch.int64, device=layer.score_BHM.device
        )
        for idx, layer in enumerate(layers)
    ]


class Cascade:
    """Decides layer by layer, and lets lower layers shrink as layers come.

    Args:
        split: the policy's.
        totals: over all layers.
    """

    def __init__(self, split: Split, totals: Totals):
        self.split = split
        self.totals = totals
        self.num_added = 0
        self.held: list[Candidates] = []

    def add(self, layer: Candidates) -> tuple[Bool[Tensor, "B H T"], list[Bool[Tensor, " N"] | None]]:
        """The next layer has come.

        Args:
            layer: all its entries.

        Returns:
            its keep mask; and one for each lower layer, over the entries that it holds, row after row in
            order of time; None for one that keeps them all.
        """
        if not self.split.crosses_layers:
            (keep_BHT,) = keep_sets(self.split, [layer], self.totals, first=self.num_added)
            self.num_added += 1
            return keep_BHT, [None] * (self.num_added - 1)
        self.held.append(layer)
        self.num_added += 1
        lower: list[Bool[Tensor, " N"] | None] = []
        keep_BHT = layer.kept_BHM
        budgets, reached = head_budgets(self.split, self.held, self.totals)
        for idx, (budget_BH, reached_BH) in enumerate(zip(budgets, reached, strict=True)):
            held = self.held[idx]
            if idx < self.num_added - 1 and torch.equal(budget_BH, held.held_BH):
                lower.append(None)
                continue
            keep_BHM = _keep(self.split, held, budget_BH)
            if idx < self.num_added - 1:
                lower.append(keep_BHM[held.score_BHM > float("-inf")])
            else:
                keep_BHT = keep_BHM
            self.held[idx] = _cut(held, keep_BHM, reached_BH)
        if self.num_added == len(self.totals.heads_L):
            self.held = []
        return keep_BHT, lower


def _cut(layer: Candidates, keep_BHM: Bool[Tensor, "B H M"], reached_BH: Int64[Tensor, "B H"]) -> Candidates:
    """The candidates that are left, in order of time, each row from the front; and the bids that may still
    count."""
    count_BH = keep_BHM.sum(-1)
    longest = int(count_BH.max())
    row_BHM = (keep_BHM.cumsum(-1) - 1)[keep_BHM]
    b, h, _ = keep_BHM.nonzero(as_tuple=True)

    def take(values_BHM: Tensor, empty: float | bool) -> Tensor:
        out = values_BHM.new_full((*count_BH.shape, longest), empty)
        out[b, h, row_BHM] = values_BHM[keep_BHM]
        return out

    return replace(
        layer,
        score_BHM=take(layer.score_BHM, float("-inf")),
        kept_BHM=take(layer.kept_BHM, False),
        first_BHM=None if layer.first_BHM is None else take(layer.first_BHM, float("-inf")),
        bids=None if layer.bids is None else layer.bids.first(reached_BH),
    )
