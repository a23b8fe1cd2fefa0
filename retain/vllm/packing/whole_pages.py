"""Rounds a plan to whole pages a head, and selects by it: an engine frees memory by the page.

A page is N entries of one head. Of a prompt of T tokens, `F = T // N` pages are full, and the *tail*, the
`T - F N` entries of the unfilled last page, stays in every head. The total is rounded up once, to K pages a
head in the mean. K follows from plain numbers, so that a scheduler knows it before a model has run. Budgets
of heads, spread with that total as ever (`retain.budget.cascade.head_budgets`), are rounded to pages of the
same sum. All is of one prompt, of which nothing has gone: B = 1.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from retain.budget.cascade import head_budgets, keep_first
from retain.budget.shares import Candidates
from retain.policy import Plan
from retain.ranking import rank_entries, refuse_nan


def pages_a_head(mean: Fraction, length: int, page: int, protected: int) -> int:
    """Full pages that a head holds in the mean: `K = min(F, max(ceil((mean - tail) / N), ceil(p / N), 0))`.

    Args:
        mean: stated entries a head, in the mean over all heads (`Totals.per_head_B`), exact.
        length: T, tokens seen.
        page: N, entries a page.
        protected: p, protected entries of a head that do not lie in the tail.
    """
    return min(length // page, max(math.ceil((mean - length % page) / page), -(-protected // page), 0))


def in_pages(plan: Plan, page: int) -> Plan:
    """Round a plan's total up to whole pages a head and the tail, and protect the tail.

    Args:
        plan: of one sequence; its totals are entries.
        page: N, entries a page.
    """
    totals, protected_BT = plan.shares.totals, plan.protected_BT.clone()
    ((length,), heads_L) = totals.lengths_B, totals.heads_L
    tail = length % page
    inside = int(protected_BT[:, : length - tail].sum())
    held = pages_a_head(totals.per_head_B[0], length, page, inside) * page + tail
    totals = replace(totals, equal_BL=(tuple(held * heads for heads in heads_L),), means_B=None)
    protected_BT[:, length - tail :] = True
    shares = replace(plan.shares, totals=totals, protected_B=(int(protected_BT.sum()),))
    if shares.split.allocation.layers == "pyramid":
        assert shares.fixed_LB is not None
        full, least = length // page, max(0, -((tail - min(shares.least_B[0], length)) // page))
        entries_L = [own - tail * heads for (own,), heads in zip(shares.fixed_LB, heads_L, strict=True)]
        bounds = [[bound * heads for heads in heads_L] for bound in (least, full)]
        pages_L = round_to_pages(entries_L, held // page * sum(heads_L), page, *bounds)
        rounded_L = (own * page + tail * heads for own, heads in zip(pages_L, heads_L, strict=True))
        # Its layers are as good as stated from here on.
        split = replace(shares.split, allocation=replace(shares.split.allocation, layers="uniform"))
        shares = replace(shares, split=split, totals=replace(totals, equal_BL=(tuple(rounded_L),)))
    return replace(plan, shares=shares, protected_BT=protected_BT)


def round_to_pages(
    entries: Sequence[int], total: int, page: int, least: Sequence[int], most: Sequence[int]
) -> list[int]:
    """Round the entries of heads (or of layers) to whole pages of a given sum, by largest remainder.

    Each gets `floor(entries / N)` pages, within its bounds. While the sum is below the total, a page goes to
    the one that is furthest below its entries, of equal ones to the lower index. While it is above, which
    lower bounds can bring about, a page is taken from the one with the smallest remainder that is above its
    lower bound, of equal ones from the higher index.

    Args:
        entries: beside the tail, of each.
        total: pages of all.
        page: N.
        least, most: pages of each.

    Returns:
        pages of each, which sum to the total.

    Raises:
        ValueError: the total does not lie between the sums of the bounds.

    Examples:
        >>> round_to_pages([23, 9, 0], 2, 16, [0, 0, 0], [9, 9, 9])
        [1, 1, 0]
        >>> round_to_pages([23, 9, 0], 2, 16, [0, 0, 1], [9, 9, 9])
        [1, 0, 1]
    """
    if not sum(least) <= total <= sum(most):
        raise ValueError(
            f"{total} pages of {page} entries do not fit {len(entries)} heads or layers, which need at least "
            f"{sum(least)} (guaranteed entries, rounded up) and can hold {sum(most)}: raise the budget, or "
            "protect or guarantee less."
        )
    pages = [min(max(own // page, low), high) for own, low, high in zip(entries, least, most, strict=True)]
    left = total - sum(pages)
    sign, bound = (1, most) if left > 0 else (-1, least)
    for _ in range(abs(left)):
        some = [i for i, own in enumerate(pages) if own != bound[i]]
        pages[max(some, key=lambda i: (sign * (entries[i] - pages[i] * page), -sign * i))] += sign
    return pages


def keep_pages(plan: Plan, layers: Sequence[Candidates], page: int) -> list[Bool[Tensor, "B H T"]]:
    """Keep masks of all layers, of whole pages and the tail in every head.

    Heads' entries are rounded inside a layer where its total is fixed, else over the heads of all layers.

    Args:
        plan: of `in_pages`.
        layers: all that evict, in order.
        page: N, entries a page.

    Raises:
        ValueError: guaranteed entries take more pages than there are, or a score is NaN.
    """
    shares, (length,) = plan.shares, plan.shares.totals.lengths_B
    for layer in layers:
        refuse_nan(layer.score_BHT)
    budgets = head_budgets(shares, layers)
    tail, alone = length % page, shares.fixed_LB is not None and not shares.by_capacity
    groups = [[idx] for idx in range(len(layers))] if alone else [[*range(len(layers))]]
    keeps = []
    for group in groups:
        entries = torch.cat([budgets[idx].budget_BH[0] for idx in group]) - tail
        sure = torch.cat([layers[idx].guaranteed_BH[0] for idx in group]) - tail
        total = sum(shares.totals.equal_BL[0][idx] for idx in group) - tail * len(entries)
        least = [max(0, -(-own // page)) for own in sure.tolist()]
        most = [length // page] * len(entries)
        pages = torch.tensor(round_to_pages(entries.tolist(), total // page, page, least, most))
        own_LH = (pages.to(entries.device) * page + tail).view(len(group), -1)
        for idx, own_H in zip(group, own_LH, strict=True):
            layer, split, won = layers[idx], shares.split, budgets[idx].budget_BH
            drawn_N = budgets[idx].drawn_N
            if drawn_N is not None:
                keeps.append(_keep_drawn(layer, won, drawn_N, own_H[None]))
            else:
                keeps.append(keep_first(split, layer.score_BHT, layer.first_BHT, layer.kept_BHT, own_H[None]))
    return keeps


def _keep_drawn(
    layer: Candidates,
    won_BH: Int64[Tensor, "B H"],
    drawn_N: Bool[Tensor, " bids"],
    budget_BH: Int64[Tensor, "B H"],
) -> Bool[Tensor, "B H T"]:
    """Keep mask of a layer where a share is drawn.

    A head that won w bids, d of them by their keys, and has `w'` places now, fills `d' = floor(d w' / w)` of
    them by key, and the others before by score: of its own bids, ties to the later.

    Args:
        layer: its candidates; all entries bid.
        won_BH: entries of each head before anything was rounded.
        drawn_N: which bids won by their key.
        budget_BH: entries of each head.
    """
    bids = layer.bids
    assert bids is not None and bids.free_BHT is not None and bids.draw_N is not None
    free_BHT = bids.free_BHT
    places_BH = budget_BH - bids.guaranteed_BH
    drawn_BH = torch.zeros_like(free_BHT).masked_scatter(free_BHT, drawn_N).sum(-1)
    drawn_BH = drawn_BH * places_BH // (won_BH - bids.guaranteed_BH).clamp_min(1)
    value_BHT, key_BHT = (_spread_out(field_N, free_BHT) for field_N in (bids.value_N, bids.draw_N))
    scored_BHT = free_BHT & (rank_entries(value_BHT) < (places_BH - drawn_BH)[..., None])
    left_BHT = free_BHT & ~scored_BHT
    key_BHT = key_BHT.masked_fill(~left_BHT, float("-inf"))
    return ~free_BHT | scored_BHT | (left_BHT & (rank_entries(key_BHT) < drawn_BH[..., None]))


def _spread_out(field_N: Float[Tensor, " bids"], free_BHT: Bool[Tensor, "B H T"]) -> Float[Tensor, "B H T"]:
    """A field of the bids at the places of their entries, -inf elsewhere."""
    lowest = field_N.new_full(free_BHT.shape, float("-inf"))
    return lowest.masked_scatter(free_BHT, field_N)
