"""Computes the keep sets of all layers, at once or layer by layer while a model prefills.

`head_budgets` serves both. While layers are still to come it gives the *ceiling* of each share, which
contains the final answer, so a `Cascade` that evicts at every step ends with the one-shot sets. Its peak is
the budget plus one full layer (plus rounding: one entry a layer, one a head with the convex safeguard).

Exact for joint selection (scope `model`: a running threshold) and for shares by weight (LAVa, CAKE), since
shares only shrink as layers come. Not exact for CAKE's released repair (`spread: even`), which at the end
spreads a full layer's excess over layers that may have evicted it already.

A second eviction has all layers at once: `keep_sets` decides with what heads hold (`Candidates.capacity_BH`),
and no cascade runs.

For each entry of a cut layer a cascade stores its row and its rank in its head (8 bytes) and its bid if heads
compete (12 bytes); with a drawn share a flag instead of the rank (5 bytes) and a key with each bid (16): a
few percent of the keys and values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from retain.budget.allocation import (
    Allocation,
    Bids,
    Won,
    allocate_joint,
    allocate_uniform,
    mix_convex,
    press_line,
    pyramid,
    repaired,
    spread_evenly,
)
from retain.budget.largest_remainder import exact, fill, round_shares
from retain.budget.priority_sampling import Draw
from retain.budget.quotas import Quotas, quota_budgets
from retain.budget.statement import Totals
from retain.head_classes import check_shape, class_budgets
from retain.ranking import admit, rank_kept_first, select
from retain.two_stage import FirstStage, stage_by_budget


@dataclass(frozen=True)
class Split:
    """How a policy splits a budget: scope, allocation, first stage, draw.

    Args:
        scope: `head`, `layer` or `model`.
        allocation: over layers and heads.
        first_stage: None for selection in one stage.
        draw: None where all goes by score.
        window: entries of the score's observation window; 0 without one.
    """

    scope: str
    allocation: Allocation = Allocation()
    first_stage: FirstStage | None = None
    draw: Draw | None = None
    window: int = 0

    @property
    def drawn_share(self) -> float | None:
        """Share of a shared budget that is drawn; None: nothing."""
        return None if self.draw is None else self.draw.share

    @property
    def crosses_layers(self) -> bool:
        """Whether the keep set of a layer depends on other layers."""
        return self.scope == "model" or self.allocation.layers in ("cake", "entropy")

    @property
    def two_stages(self) -> bool:
        """Whether a head's first stage depends on its budget."""
        return self.first_stage is not None and self.first_stage.by == "budget"


@dataclass(frozen=True)
class Shares:
    """Totals and shares that are known before any layer comes.

    Args:
        split: the policy's.
        totals: entries of each sequence, over all layers.
        protected_B: entries of every head that are protected by their place.
        threshold: of admission; then the totals are what exists, and no budget decides.
        seen_B: tokens of each sequence, padding apart, where lengths are announced; None: the lengths.
        quotas: shares of heads, for an allocation by quotas; None: unknown.
    """

    split: Split
    totals: Totals
    protected_B: tuple[int, ...]
    threshold: float | None = None
    seen_B: tuple[int, ...] | None = None
    quotas: Quotas | None = None

    @cached_property
    def least_B(self) -> list[int]:
        """Entries that every head keeps whatever the scores: protected ones, those of a safeguard, and at
        least one."""
        own = self.split.allocation
        least = []
        for protected, mean in zip(self.protected_B, self.totals.per_head_B, strict=True):
            guarded = protected
            if own.safeguard == "guaranteed":
                guarded = min(math.floor(mean), protected + math.floor(exact(own.safeguard_share) * mean))
            elif own.safeguard == "counted":
                guarded = math.floor(exact(own.safeguard_share) * mean)
            least.append(max(1, protected, guarded))
        return least

    @cached_property
    def fixed_LB(self) -> list[list[int]] | None:
        """Entries of each layer and sequence, if scores do not decide them: the stated share, or all that it
        still holds."""
        if self.split.crosses_layers:
            return None
        rows = self.totals.equal_BL
        if self.split.allocation.layers == "pyramid":
            rows = tuple(self._pyramid(row) for row in range(len(self.totals.lengths_B)))
        held = self.totals.capacity_BL
        rows_BL = [map(min, own, most) for own, most in zip(rows, held, strict=True)]
        return [list(column) for column in zip(*rows_BL, strict=True)]

    def _pyramid(self, row: int) -> tuple[int, ...]:
        """One sequence's entries of each layer: a line over depth, in entries a head."""
        heads_L, protected = self.totals.heads_L, self.protected_B[row]
        if self.split.allocation.line == "whole":
            length, beta = self.totals.lengths_B[row], self.split.allocation.beta
            line_L = press_line(self.totals.mean_of(row), length, self.split.window, len(heads_L), beta)
            return tuple(own * heads for own, heads in zip(line_L, heads_L, strict=True))
        room = self.totals.lengths_B[row] - protected
        least = min(room, max(0, self.least_B[row] - protected))
        free = self.totals.stated_B[row] - protected * sum(heads_L)
        mean = Fraction(free, sum(heads_L))
        line = pyramid(mean, Fraction(room), len(heads_L), self.split.allocation.beta)
        weights = [share * heads for share, heads in zip(line, heads_L, strict=True)]
        bounds = [[bound * heads for heads in heads_L] for bound in (least, room)]
        shares = round_shares(fill(free, weights, *bounds))
        return tuple(share + protected * heads for share, heads in zip(shares, heads_L, strict=True))

    @cached_property
    def classes_LBH(self) -> list[list[list[int]]] | None:
        """Entries of each head by a table of head classes; a head with fewer entries keeps all, and its
        remainder goes to no other."""
        own, totals = self.split.allocation, self.totals
        if own.head_classes is None:
            return None
        classes_LH = check_shape(own.head_classes, totals.heads_L)
        budgets_BLH = [
            class_budgets(classes_LH, own.head_threshold, total, least, length)
            for total, least, length in zip(totals.stated_B, self.least_B, totals.lengths_B, strict=True)
        ]
        return [list(layer) for layer in zip(*budgets_BLH, strict=True)]

    @cached_property
    def quotas_LBH(self) -> list[list[list[int]]]:
        """Entries of each head by its quota while heads still hold all tokens, as in a cascade."""
        rows_BLH = []
        for length in self.totals.lengths_B:
            rows_BLH.append([[length] * heads for heads in self.totals.heads_L])
        return self.quota_budgets(rows_BLH)

    def quota_budgets(self, capacity_BLH: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
        """Entries of each head by its quota, `[layer][sequence][head]`.

        The keep_ratio by which quotas are looked up is that of what competes: as stated, what is protected
        apart, so that it does not change with what earlier evictions have left.

        Args:
            capacity_BLH: entries that each head holds.

        Raises:
            ValueError: something has to go, and there are no quotas.
        """
        heads, totals, budgets_BLH = sum(self.totals.heads_L), self.totals, []
        for row, capacity_LH in enumerate(capacity_BLH):
            held, protected = sum(map(sum, capacity_LH)), self.protected_B[row]
            if totals.stated_B[row] >= held:
                budgets_BLH.append([list(own) for own in capacity_LH])
                continue
            if self.quotas is None:
                raise ValueError(
                    "allocation.quotas 'calibrated' wants quotas that are stored with gates, and there are "
                    "none: score with gates that were trained with calibration.quotas true, pass quotas= to "
                    "plan_of, or leave quotas out."
                )
            room = (totals.lengths_B[row] - protected) * heads
            free = totals.stated_B[row] - protected * heads
            budgets_BLH.append(
                quota_budgets(
                    self.quotas,
                    totals.stated_B[row],
                    keep_ratio=Fraction(free, room) if room > 0 else Fraction(1),
                    protected=protected,
                    least=self.least_B[row],
                    capacity_LH=capacity_LH,
                )
            )
        return [list(layer) for layer in zip(*budgets_BLH, strict=True)]

    @property
    def covers_B(self) -> list[bool]:
        """Whether each sequence keeps everything, whatever the scores."""
        totals, heads = self.totals, sum(self.totals.heads_L)
        held_B = [sum(row) for row in totals.capacity_BL]
        if self.threshold is not None:
            kept_B = [protected * heads for protected in self.protected_B]
        elif self.classes_LBH is not None:
            # How much each head holds is not known here; no more than every token.
            least_LB = [[min(own) for own in rows] for rows in self.classes_LBH]
            least_B = [min(column) for column in zip(*least_LB, strict=True)]
            parts = zip(held_B, least_B, self.seen_B or totals.lengths_B, strict=True)
            kept_B = [held if least >= seen else -1 for held, least, seen in parts]
        elif self.split.allocation.quotas is not None:
            kept_B = totals.total_B
        elif self.fixed_LB is not None:
            kept_B = [sum(column) for column in zip(*self.fixed_LB, strict=True)]
        else:
            kept_B = totals.total_B
        return [kept == held for kept, held in zip(kept_B, held_B, strict=True)]

    def select_batch(self, rows: Sequence[int]) -> "Shares":
        """Select some of the sequences; their totals no longer depend on the others."""
        return replace(
            self,
            totals=self.totals.select_batch(rows),
            protected_B=tuple(self.protected_B[row] for row in rows),
            seen_B=None if self.seen_B is None else tuple(self.seen_B[row] for row in rows),
        )


@dataclass(frozen=True)
class Candidates:
    """One layer's entries with scores and guaranteed entries, before any budget.

    Args:
        score_BHT: orders each head; -inf where the head holds no entry.
        kept_BHT: kept in any case: protected, or in a first stage by mass.
        held_B: entries of each sequence, over all heads.
        guaranteed_B: of those, how many the layer keeps in any case.
        first_BHT: score of a first stage by budget; None without one.
        bids: entries with which the heads compete; None if they do not.
        weight_B: weight of the layer in a shared budget, per sequence; None if layers get fixed shares.
    """

    score_BHT: Float[Tensor, "B H T"]
    kept_BHT: Bool[Tensor, "B H T"]
    held_B: tuple[int, ...]
    guaranteed_B: tuple[int, ...]
    first_BHT: Float[Tensor, "B H T"] | None = None
    bids: Bids | None = None
    weight_B: tuple[Fraction, ...] | None = None

    @cached_property
    def capacity_BH(self) -> Int64[Tensor, "B H"]:
        """Entries that each head holds."""
        return (self.score_BHT > float("-inf")).sum(-1)


@dataclass(frozen=True)
class Held:
    """State of a layer that a cascade has cut, entry by entry in the order of its store.

    Args:
        rows: `(B, H)`.
        row_N: `b * H + h`.
        rank_N: rank in the head; None if another rule decides.
        stages_N: score, first-stage score and kept, where a second stage ranks anew at every budget.
        free_N: with a drawn share, which entries bid: winners stay, and entries without a bid.
        held_B, guaranteed_B, bids, weight_B: as in `Candidates`.
        capacity_BH: entries that each head had when the layer came.
    """

    rows: tuple[int, int]
    row_N: Int32[Tensor, " N"]
    rank_N: Int32[Tensor, " N"] | None
    stages_N: tuple[Tensor, Tensor, Tensor] | None
    free_N: Bool[Tensor, " N"] | None
    held_B: tuple[int, ...]
    guaranteed_B: tuple[int, ...]
    bids: Bids | None
    weight_B: tuple[Fraction, ...] | None
    capacity_BH: Int64[Tensor, "B H"]


Layer = Candidates | Held


def keep_sets(shares: Shares, layers: Sequence[Candidates], *, first: int = 0) -> list[Bool[Tensor, "B H T"]]:
    """Compute the keep mask of each layer.

    Args:
        shares: totals and shares.
        layers: those that have come: all, or the first few of those that evict.
        first: place of `layers[0]` among them; not 0 only where layers do not depend on each other.

    Returns:
        keep masks; their sum is exact when all layers have come.

    Raises:
        ValueError: if a budget cannot hold the guaranteed entries.
    """
    if shares.threshold is not None:
        return [admit(layer.score_BHT, layer.kept_BHT, shares.threshold) for layer in layers]
    found = head_budgets(shares, layers, first=first)
    return [
        _keep(shares.split, layer, budget_BH, won_N)
        for layer, budget_BH, won_N in zip(layers, found.budgets, found.won, strict=True)
    ]


class Found(NamedTuple):
    """Budgets and winning bids of layers.

    Attributes:
        budgets: entries of each head.
        bids: those that may still win when more layers come; None where heads do not bid.
        won: which bids of each layer these are; None where heads do not bid.
    """

    budgets: list[Int64[Tensor, "B H"]]
    bids: list[Bids | None]
    won: list[Bool[Tensor, " N"] | None]


def head_budgets(shares: Shares, layers: Sequence[Layer], *, first: int = 0) -> Found:
    """Compute the entries of each head of each layer.

    Args:
        shares: totals and shares.
        layers: those that have come.
        first: place of `layers[0]`.
    """
    split, totals = shares.split, shares.totals
    final = first + len(layers) == len(totals.heads_L)
    if split.scope == "model":
        return _found(allocate_joint([_bids(layer) for layer in layers], totals.total_B, split.drawn_share))
    nothing: list[None] = [None] * len(layers)
    if shares.classes_LBH is not None:
        own = shares.classes_LBH[first : first + len(layers)]
        budgets = [
            torch.minimum(_tensor(rows, layer), layer.capacity_BH)
            for rows, layer in zip(own, layers, strict=True)
        ]
        return Found(budgets, [*nothing], [*nothing])
    if split.allocation.quotas is not None:
        if first == 0 and final:
            # All have come: what each head holds is known.
            rows_LBH = [layer.capacity_BH.tolist() for layer in layers]
            own = shares.quota_budgets([list(rows_LH) for rows_LH in zip(*rows_LBH, strict=True)])
        else:
            own = shares.quotas_LBH[first : first + len(layers)]
        budgets = [_tensor(rows, layer) for rows, layer in zip(own, layers, strict=True)]
        return Found(budgets, [*nothing], [*nothing])
    totals_LB = (
        _shared(shares, layers, final)
        if shares.fixed_LB is None
        else shares.fixed_LB[first : first + len(layers)]
    )
    if split.scope == "head":
        budgets = [
            allocate_uniform(_tensor(own_B, layer), layer.capacity_BH)
            for own_B, layer in zip(totals_LB, layers, strict=True)
        ]
        return Found(budgets, [*nothing], [*nothing])
    found = _found(
        [
            allocate_joint([_bids(layer)], own, split.drawn_share)[0]
            for layer, own in zip(layers, totals_LB, strict=True)
        ]
    )
    if split.allocation.safeguard == "convex":
        share, round_up = split.allocation.safeguard_share, split.crosses_layers and not final
        budgets = [
            mix_convex(budget_BH, share, capacity_BH=layer.capacity_BH, round_up=round_up)
            for budget_BH, layer in zip(found.budgets, layers, strict=True)
        ]
        return found._replace(budgets=budgets)
    return found


def _found(won: Sequence[Won]) -> Found:
    return Found([own.budget_BH for own in won], [own.bids for own in won], [own.won_N for own in won])


def _bids(layer: Layer) -> Bids:
    assert layer.bids is not None, "heads that share a budget have bids"
    return layer.bids


def _device(layer: Layer) -> torch.device:
    return layer.row_N.device if isinstance(layer, Held) else layer.score_BHT.device


def _tensor(numbers: Sequence[int] | Sequence[list[int]], layer: Layer) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=_device(layer))


def _shared(shares: Shares, layers: Sequence[Layer], final: bool) -> list[list[int]]:
    """Entries of each layer, `[layer][sequence]`, by the layers' weights; while layers are to come, the
    ceilings of their shares."""
    own, totals = shares.split.allocation, shares.totals
    columns = []
    for row, total in enumerate(totals.total_B):
        # Protected entries of layers that are still to come are set aside; the rest is for those here.
        protected = [shares.protected_B[row] * heads for heads in totals.heads_L]
        parts = list(zip(layers, protected, totals.heads_L, strict=False))
        least = [max(0, layer.guaranteed_B[row] - safe) for layer, safe, _ in parts]
        most = [layer.held_B[row] - safe for layer, safe, _ in parts]
        weights = [_weight(layer, row) * heads for layer, _, heads in parts]
        here = min(total - sum(protected), sum(most))
        if final and own.layers == "cake" and own.spread == "even":
            if own.rounding == "head":
                asked, safe = [_weight(layer, row) for layer in layers], shares.protected_B[row]
                a_head = repaired(totals.mean_of(row), asked, totals.lengths_B[row], safe)
                got = [own * heads for own, heads in zip(a_head, totals.heads_L, strict=True)]
            else:
                got = spread_evenly(here, weights, least, most)
        else:
            filled = fill(here, weights, least, most)
            got = round_shares(filled) if final else [math.ceil(share) for share in filled]
        columns.append([share + safe for share, (_, safe, _) in zip(got, parts, strict=True)])
    return [list(column) for column in zip(*columns, strict=True)]


def _weight(layer: Layer, row: int) -> Fraction:
    assert layer.weight_B is not None, "layers that share a budget have weights"
    return layer.weight_B[row]


def _keep(
    split: Split, layer: Candidates, budget_BH: Int64[Tensor, "B H"], won_N: Bool[Tensor, " bids"] | None
) -> Bool[Tensor, "B H T"]:
    """Keep mask of a layer that is still complete."""
    if split.draw is None:
        return _keep_first(split, layer.score_BHT, layer.first_BHT, layer.kept_BHT, budget_BH)
    # A drawn set follows no order of the head.
    free_BHT = _bids(layer).free_BHT
    assert free_BHT is not None and won_N is not None, "where a share is drawn, all entries bid"
    return _won_or_sure(free_BHT, won_N) & (layer.score_BHT > float("-inf"))


def _won_or_sure(free: Bool[Tensor, "..."], won_N: Bool[Tensor, " bids"]) -> Bool[Tensor, "..."]:
    """Mask of the entries that won a bid or made none."""
    return (~free).masked_scatter(free, won_N)


def _keep_first(
    split: Split, score: Tensor, first: Tensor | None, kept: Tensor, budget_BH: Int64[Tensor, "B H"]
) -> Bool[Tensor, "B H T"]:
    """The top of each head, in one stage or two."""
    if split.two_stages:
        assert split.first_stage is not None and first is not None
        kept = kept | stage_by_budget(first, kept, budget_BH, split.first_stage.share)
    return select(score, kept, budget_BH)


class Cascade:
    """Decides layer by layer, and shrinks lower layers as layers come.

    Args:
        shares: totals and shares.
    """

    def __init__(self, shares: Shares):
        self.shares = shares
        self.num_added = 0
        self.held: list[Held] = []

    def add(self, layer: Candidates) -> tuple[Bool[Tensor, "B H T"], list[Bool[Tensor, " N"] | None]]:
        """Add the next layer.

        Args:
            layer: all its entries.

        Returns:
            its keep mask; and one for each lower layer, over the entries that it holds, row after row in
            order of time; None for one that keeps them all.
        """
        split = self.shares.split
        self.num_added += 1
        if not split.crosses_layers:
            (keep_BHT,) = keep_sets(self.shares, [layer], first=self.num_added - 1)
            return keep_BHT, [None] * (self.num_added - 1)
        budgets, bids, won = head_budgets(self.shares, [*self.held, layer])
        # Remaining entries of each sequence in each layer, in one transfer.
        device = budgets[0].device
        counts_LB = torch.stack([budget_BH.sum(-1).to(device) for budget_BH in budgets]).tolist()
        lower: list[Bool[Tensor, " N"] | None] = []
        for idx, held in enumerate(self.held):
            keep_N = None
            if tuple(counts_LB[idx]) != held.held_B:  # budgets only shrink: the same sum is the same budgets
                keep_N = _keep_held(split, held, budgets[idx], won[idx])
                self.held[idx] = _cut(held, keep_N, tuple(counts_LB[idx]), bids[idx])
            lower.append(keep_N)
        keep_BHT = _keep(split, layer, budgets[-1], won[-1])
        if self.num_added == len(self.shares.totals.heads_L):
            self.held = []
        else:
            self.held.append(_held(split, layer, keep_BHT, tuple(counts_LB[-1]), bids[-1]))
        return keep_BHT, lower


def _held(
    split: Split,
    layer: Candidates,
    keep_BHT: Bool[Tensor, "B H T"],
    held_B: tuple[int, ...],
    bids: Bids | None,
) -> Held:
    """Store the state of a layer that was just cut."""
    B, H, _ = keep_BHT.shape
    row_BHT = torch.arange(B * H, dtype=torch.int32, device=keep_BHT.device).view(B, H, 1)
    rank_N = stages_N = free_N = None
    if split.draw is not None:
        free_BHT = _bids(layer).free_BHT
        assert free_BHT is not None
        free_N = free_BHT[keep_BHT]
    elif split.two_stages:
        assert layer.first_BHT is not None
        stages_N = (layer.score_BHT[keep_BHT], layer.first_BHT[keep_BHT], layer.kept_BHT[keep_BHT])
    else:
        rank_N = rank_kept_first(layer.score_BHT, layer.kept_BHT)[keep_BHT].int()
    parts = row_BHT.expand(keep_BHT.shape)[keep_BHT], rank_N, stages_N, free_N
    return Held((B, H), *parts, held_B, layer.guaranteed_B, bids, layer.weight_B, layer.capacity_BH)


def _keep_held(
    split: Split,
    held: Held,
    budget_BH: Int64[Tensor, "B H"],
    won_N: Bool[Tensor, " bids"] | None,
) -> Bool[Tensor, " N"]:
    """Mask of the held entries of a layer that it still keeps."""
    if held.free_N is not None:
        assert won_N is not None
        return _won_or_sure(held.free_N, won_N)
    rows = held.row_N.long()
    if held.rank_N is not None:
        return held.rank_N < budget_BH.flatten()[rows]
    # A second stage ranks anew: rows are padded to the longest for it, and back.
    assert held.stages_N is not None
    count_R = torch.bincount(rows, minlength=budget_BH.numel())
    place_N = torch.arange(len(rows), device=rows.device) - (count_R.cumsum(0) - count_R)[rows]
    shape = (budget_BH.numel(), int(count_R.max()))

    def padded(values_N: Tensor, empty: float | bool) -> Tensor:
        out = values_N.new_full(shape, empty)
        out[rows, place_N] = values_N
        return out.view(*held.rows, shape[1])

    score_N, first_N, kept_N = held.stages_N
    lowest = float("-inf")
    parts = padded(score_N, lowest), padded(first_N, lowest), padded(kept_N, False)
    keep = _keep_first(split, *parts, budget_BH)
    return keep.view(shape)[rows, place_N]


def _cut(held: Held, keep_N: Bool[Tensor, " N"], held_B: tuple[int, ...], bids: Bids | None) -> Held:
    """Drop evicted entries from the state."""
    at_N = keep_N.nonzero()[:, 0]  # counted once, for all of its fields
    stages_N = held.stages_N
    if stages_N is not None:
        stages_N = stages_N[0][at_N], stages_N[1][at_N], stages_N[2][at_N]
    return replace(
        held,
        row_N=held.row_N[at_N],
        rank_N=None if held.rank_N is None else held.rank_N[at_N],
        stages_N=stages_N,
        free_N=None if held.free_N is None else held.free_N[at_N],
        held_B=held_B,
        bids=bids,
    )
