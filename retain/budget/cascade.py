"""Computes the keep sets of all layers, at once or layer by layer while a model prefills.

`head_budgets` serves both. While layers are still to come it gives the *ceiling* of each share, which
contains the final answer, so a `Cascade` that evicts at every step ends with the one-shot sets. Its peak is
the budget plus one full layer (plus rounding: one entry a layer).

Exact for joint selection (scope `model`: a running threshold) and for shares by weight (LAVa, CAKE), since
shares only shrink as layers come; not for CAKE's released repair (`spread: even`), which at the end spreads
a full layer's excess over layers that may have evicted it already. A second eviction has all layers at once:
no cascade runs.

A cascade stores 8 bytes for each entry of a cut layer (row, rank), and 12 more if heads compete; with a drawn
share 5 and 16: a few percent of the keys and values.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from retain.budget.allocation import (
    Bids,
    Won,
    allocate_joint,
    allocate_uniform,
    spread_evenly,
)
from retain.budget.largest_remainder import fill, round_shares
from retain.budget.shares import Candidates, Shares, Split
from retain.ranking import admit, rank_kept_first, select
from retain.two_stage import stage_by_budget


@dataclass(frozen=True)
class Held:
    """State of a layer that a cascade has cut.

    Args:
        entries: by name, a value of each entry in the order of the layer's store: its `row`, `b * H + h`;
            and its `rank` in the head, or where a second stage ranks anew at every budget its `score`,
            `first` score and whether it is `kept` in any case, or with a drawn share whether it is `free` to
            bid (winners stay, and entries without a bid).
        held_B, guaranteed_B, bids, weight_B: as in `Candidates`.
        capacity_BH: entries that each head had when the layer came.
    """

    entries: Mapping[str, Tensor]
    held_B: tuple[int, ...]
    guaranteed_B: tuple[int, ...]
    bids: Bids | None
    weight_B: tuple[Fraction, ...] | None
    capacity_BH: Int64[Tensor, "B H"]


Layer = Candidates | Held


def keep_sets(shares: Shares, layers: Sequence[Candidates], *, first: int = 0) -> list[Bool[Tensor, "B H T"]]:
    """Compute the keep mask of each layer; their sum is exact when all layers have come.

    Args:
        shares: totals and shares.
        layers: those that have come: all, or the first few of those that evict.
        first: place of `layers[0]` among them; not 0 only where layers do not depend on each other.

    Raises:
        ValueError: if a budget cannot hold the guaranteed entries.
    """
    if shares.threshold is not None:
        return [admit(layer.score_BHT, layer.kept_BHT, shares.threshold) for layer in layers]
    budgets = head_budgets(shares, layers, first=first)
    return [_keep(shares.split, layer, own) for layer, own in zip(layers, budgets, strict=True)]


def head_budgets(shares: Shares, layers: Sequence[Layer], *, first: int = 0) -> list[Won]:
    """Compute the entries of each head of each layer; arguments as of `keep_sets`."""
    split, totals = shares.split, shares.totals
    here = slice(first, first + len(layers))
    final = here.stop == len(totals.heads_L)
    if split.scope == "model":
        return allocate_joint([_bids(layer) for layer in layers], totals.total_B, split.drawn_share)
    if shares.by_capacity:
        if first == 0 and final:  # all have come: the entries of each head are known
            budgets_LBH = shares.static_of(_capacities(layers))
        else:
            budgets_LBH = shares.static_LBH[here]
        return [Won(_tensor(own, layer)) for own, layer in zip(budgets_LBH, layers, strict=True)]
    totals_LB = _shared(shares, layers, final) if shares.fixed_LB is None else shares.fixed_LB[here]
    pairs = list(zip(layers, totals_LB, strict=True))
    if split.scope == "head":
        return [Won(allocate_uniform(_tensor(own, layer), layer.capacity_BH)) for layer, own in pairs]
    return [allocate_joint([_bids(layer)], own, split.drawn_share)[0] for layer, own in pairs]


def _capacities(layers: Sequence[Layer]) -> list[list[list[int]]]:
    """Entries that each head holds, `[L][B][H]`."""
    return _lists([layer.capacity_BH for layer in layers])


def _lists(counts: Sequence[Int64[Tensor, "B H"]]) -> list[list[list[int]]]:
    """Numbers of the heads of each layer, `[L][B][H]`, in one transfer."""
    device = counts[0].device
    flat = torch.cat([own_BH.flatten().to(device) for own_BH in counts])
    parts = zip(flat.cpu().split([own_BH.numel() for own_BH in counts]), counts, strict=True)
    return [part.view_as(own_BH).tolist() for part, own_BH in parts]


def _bids(layer: Layer) -> Bids:
    assert layer.bids is not None, "heads that share a budget have bids"
    return layer.bids


def _tensor(numbers: Sequence[int] | Sequence[list[int]], layer: Layer) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=layer.capacity_BH.device)


def _shared(shares: Shares, layers: Sequence[Layer], final: bool) -> list[list[int]]:
    """Entries of each layer and sequence by the layers' weights, rounded up while layers are to come."""
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
            got = spread_evenly(here, weights, least, most)
        else:
            filled = fill(here, weights, least, most)
            got = round_shares(filled) if final else [math.ceil(share) for share in filled]
        columns.append([share + safe for share, (_, safe, _) in zip(got, parts, strict=True)])
    return [list(column) for column in zip(*columns, strict=True)]


def _weight(layer: Layer, row: int) -> Fraction:
    assert layer.weight_B is not None, "layers that share a budget have weights"
    return layer.weight_B[row]


def _keep(split: Split, layer: Candidates, won: Won) -> Bool[Tensor, "B H T"]:
    """Keep mask of a layer that is still complete."""
    if split.draw is None:
        return keep_first(split, layer.score_BHT, layer.first_BHT, layer.kept_BHT, won.budget_BH)
    # A drawn set follows no order of the head.
    free_BHT = _bids(layer).free_BHT
    assert free_BHT is not None and won.won_N is not None, "where a share is drawn, all entries bid"
    return _won_or_sure(free_BHT, won.won_N) & (layer.score_BHT > float("-inf"))


def _won_or_sure(free: Bool[Tensor, "..."], won_N: Bool[Tensor, " bids"]) -> Bool[Tensor, "..."]:
    """Mask of the entries that won a bid or made none."""
    return (~free).masked_scatter(free, won_N)


def keep_first(
    split: Split, score: Tensor, first: Tensor | None, kept: Tensor, budget_BH: Int64[Tensor, "B H"]
) -> Bool[Tensor, "B H T"]:
    """The top of each head, in one stage or two."""
    if split.two_stages:
        assert split.first_stage is not None and first is not None
        kept = kept | stage_by_budget(first, kept, budget_BH, split.first_stage.share)
    return select(score, kept, budget_BH)


# What lower layers may still hold of what they have lost, as part of a whole layer's entries, until the last
# layer comes. A cut lays a layer out anew, and L layers would be cut L^2 / 2 times. An entry that is held
# longer changes no decision: what has lost once loses whenever more layers come.
LEFT_OVER = Fraction(1, 2)


class Cascade:
    """Decides layer by layer, and shrinks lower layers as layers come, those first that lose most: to all of
    their budget and `LEFT_OVER`, and exactly with the last layer."""

    def __init__(self, shares: Shares):
        self.shares = shares
        self.num_added = 0
        self.held: list[Held] = []

    def add(self, layer: Candidates) -> tuple[Bool[Tensor, "B H T"], list[Bool[Tensor, " N"] | None]]:
        """Add the next layer.

        Returns:
            its keep mask; and one for each lower layer, over the entries that it holds, row after row in
            order of time; None for one that keeps them all.
        """
        split = self.shares.split
        self.num_added += 1
        if not split.crosses_layers:
            (keep_BHT,) = keep_sets(self.shares, [layer], first=self.num_added - 1)
            return keep_BHT, [None] * (self.num_added - 1)
        budgets = head_budgets(self.shares, [*self.held, layer])
        # Remaining entries of each sequence in each layer, in one transfer.
        device = budgets[0].budget_BH.device
        counts_LB = torch.stack([won.budget_BH.sum(-1).to(device) for won in budgets]).tolist()
        last = self.num_added == len(self.shares.totals.heads_L)
        # Budgets only shrink: the same sum is the same budgets.
        gone = [sum(own.held_B) - sum(count_B) for own, count_B in zip(self.held, counts_LB, strict=False)]
        left_over, spare = sum(gone), 0 if last else LEFT_OVER * sum(layer.held_B)
        due: set[int] = set()
        for idx in sorted(range(len(gone)), key=gone.__getitem__, reverse=True):
            if left_over > spare:
                due.add(idx)
                left_over -= gone[idx]
        lower: list[Bool[Tensor, " N"] | None] = []
        for idx, (held, won, count_B) in enumerate(zip(self.held, budgets, counts_LB, strict=False)):
            keep_N = None
            if idx in due:
                keep_N = _keep_held(split, held, won)
                at_N = keep_N.nonzero()[:, 0]  # counted once, for all of its fields
                left = {name: values_N[at_N] for name, values_N in held.entries.items()}
                self.held[idx] = replace(held, entries=left, held_B=tuple(count_B), bids=won.bids)
            lower.append(keep_N)
        keep_BHT = _keep(split, layer, budgets[-1])
        if last:
            self.held = []
        else:
            entries = _entries(split, layer, keep_BHT)
            count_B, bids = tuple(counts_LB[-1]), budgets[-1].bids
            self.held.append(
                Held(entries, count_B, layer.guaranteed_B, bids, layer.weight_B, layer.capacity_BH)
            )
        return keep_BHT, lower


def _entries(split: Split, layer: Candidates, keep_BHT: Bool[Tensor, "B H T"]) -> dict[str, Tensor]:
    """State of the entries of a layer that was just cut (`Held`)."""
    B, H, _ = keep_BHT.shape
    row_BHT = torch.arange(B * H, dtype=torch.int32, device=keep_BHT.device).view(B, H, 1)
    parts = {"row": row_BHT.expand(keep_BHT.shape)}
    if split.draw is not None:
        free_BHT = _bids(layer).free_BHT
        assert free_BHT is not None
        parts["free"] = free_BHT
    elif split.two_stages:
        assert layer.first_BHT is not None
        parts |= {"score": layer.score_BHT, "first": layer.first_BHT, "kept": layer.kept_BHT}
    else:
        parts["rank"] = rank_kept_first(layer.score_BHT, layer.kept_BHT).int()
    return {name: values_BHT[keep_BHT] for name, values_BHT in parts.items()}


def _keep_held(split: Split, held: Held, won: Won) -> Bool[Tensor, " N"]:
    """Mask of the held entries of a layer that it still keeps."""
    entries = held.entries
    if "free" in entries:
        assert won.won_N is not None
        return _won_or_sure(entries["free"], won.won_N)
    rows, budget_R = entries["row"].long(), won.budget_BH.flatten()
    if "rank" in entries:
        return entries["rank"] < budget_R[rows]
    # A second stage ranks anew: rows are padded to the longest for it, and back.
    count_R = torch.bincount(rows, minlength=len(budget_R))
    place_N = torch.arange(len(rows), device=rows.device) - (count_R.cumsum(0) - count_R)[rows]
    shape = (len(budget_R), int(count_R.max()))

    def padded(name: str, empty: float | bool) -> Tensor:
        out = entries[name].new_full(shape, empty)
        out[rows, place_N] = entries[name]
        return out.view(*won.budget_BH.shape, shape[1])

    lowest = float("-inf")
    parts = padded("score", lowest), padded("first", lowest), padded("kept", False)
    return keep_first(split, *parts, won.budget_BH).view(shape)[rows, place_N]
