"""Rounds a plan to whole pages a head, and selects by it: an engine frees memory by the page.

A page is N entries of one head. Of a prompt of T tokens, `F = T // N` pages are full, and the *tail*, the
`T - F N` entries of the unfilled last page, stays in every head. The total is rounded up once, to K pages a
head in the mean. K follows from plain numbers, so that a scheduler knows it before a model has run. Budgets
of heads, spread with that total as ever (`retain.budget.cascade.head_budgets`), are rounded to pages of the
same sum. All of this is of one prompt that holds every entry: B = 1.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from retain.attention.ranking import rank_entries, refuse_nan
from retain.budget.allocation import Candidates
from retain.budget.cascade import head_budgets, keep_first
from retain.budget.joint import Won
from retain.policy import Plan
from retain.presets import Uniform


def in_pages(plan: Plan, page: int) -> Plan:
    """Round a plan's total up to whole pages a head and the tail, and protect the tail.

    With p protected entries of a head outside the tail, `K = min(F, max(ceil((mean - tail) / N), ceil(p / N),
    0))`, where the mean over all heads is as stated, exact.

    Args:
        plan: of one sequence; its totals are entries.
        page: N, entries a page.
    """
    totals, protected_BT = plan.totals, plan.protected_BT.clone()
    (length,), (mean,) = totals.lengths_B, totals.per_head_B
    full, tail = divmod(length, page)
    inside = int(protected_BT[:, : length - tail].sum())
    pages = min(full, max(math.ceil((mean - tail) / page), -(-inside // page), 0))
    equal_L = tuple((pages * page + tail) * heads for heads in totals.heads_L)
    protected_BT[:, length - tail :] = True
    totals = replace(totals, equal_BL=(equal_L,))
    return replace(plan, totals=totals, protected_BT=protected_BT)


def round_to_pages(
    entries: Sequence[int], total: int, page: int, least: Sequence[int], most: Sequence[int]
) -> list[int]:
    """Round the entries of heads to whole pages of a given sum, by largest remainder.

    Each gets `floor(entries / N)` pages, within its bounds. While the sum is below the total, a page goes to
    the one that is furthest below its entries, of equal ones to the lower index. While it is above, which
    lower bounds can bring about, a page is taken from the one with the smallest remainder that is above its
    lower bound, of equal ones from the higher index.

    Args:
        entries: of each, without the tail.
        total: pages of all.
        page: N.
        least, most: pages of each.

    Raises:
        ValueError: the total does not lie between the sums of the bounds.

    Examples:
        >>> round_to_pages([23, 9, 0], 2, 16, [0, 0, 1], [9, 9, 9])
        [1, 0, 1]
    """
    if not sum(least) <= total <= sum(most):
        raise ValueError(
            f"{total} pages of {page} entries do not fit {len(entries)} heads, which need at least "
            f"{sum(least)} (guaranteed entries, rounded up) and can hold {sum(most)}: raise the budget, or "
            "protect or guarantee less."
        )
    pages = [
        min(max(count // page, low), high) for count, low, high in zip(entries, least, most, strict=True)
    ]
    left = total - sum(pages)
    sign, bound = (1, most) if left > 0 else (-1, least)
    for _ in range(abs(left)):
        some = [i for i, count in enumerate(pages) if count != bound[i]]
        pages[max(some, key=lambda i: (sign * (entries[i] - pages[i] * page), -sign * i))] += sign
    return pages


def keep_pages(plan: Plan, layers: Sequence[Candidates], page: int) -> list[Bool[Tensor, "B H T"]]:
    """Keep masks of all layers, of whole pages and the tail in every head.

    Heads' entries are rounded inside a layer where layers get the same, else over the heads of all layers.

    Args:
        plan: of `in_pages`.
        layers: all that evict, in order.
        page: N, entries a page.

    Raises:
        ValueError: guaranteed entries take more pages than there are, or a score is NaN.
    """
    (length,) = plan.totals.lengths_B
    for layer in layers:
        refuse_nan(layer.score_BHT)
    budgets = head_budgets(plan, layers)
    tail, split = length % page, plan.policy
    alone = split.scope != "model" and isinstance(split.allocation, Uniform)
    groups = [[idx] for idx in range(len(layers))] if alone else [[*range(len(layers))]]
    keeps = []
    for group in groups:
        entries = torch.cat([budgets[idx].budget_BH[0] for idx in group]) - tail
        sure = torch.cat([layers[idx].guaranteed_BH[0] for idx in group]) - tail
        total = sum(plan.totals.equal_BL[0][idx] for idx in group) - tail * len(entries)
        least = [max(0, -(-count // page)) for count in sure.tolist()]
        most = [length // page] * len(entries)
        pages = torch.tensor(round_to_pages(entries.tolist(), total // page, page, least, most))
        held_LH = (pages.to(entries.device) * page + tail).view(len(group), -1)
        for idx, held_H in zip(group, held_LH, strict=True):
            layer = layers[idx]
            if split.draw is None:
                keeps.append(keep_first(split, layer, held_H[None]))
            else:
                keeps.append(_keep_drawn(layer, budgets[idx], held_H[None]))
    return keeps


def _keep_drawn(layer: Candidates, won: Won, budget_BH: Int64[Tensor, "B H"]) -> Bool[Tensor, "B H T"]:
    """Keep mask of a layer where a share is drawn.

    A head that won w bids, d of them by their keys, and has `w'` places now, fills `d' = floor(d w' / w)` of
    them by key, and the others before by score: of its bids, ties to the later.

    Args:
        layer: its candidates; all entries bid.
        won: of the layer, before anything was rounded.
        budget_BH: entries of each head.
    """
    bids, free_BHT, drawn_N = layer.bids, layer.free_BHT, won.drawn_N
    assert bids is not None and free_BHT is not None and bids.draw_N is not None and drawn_N is not None
    places_BH = budget_BH - bids.guaranteed_BH
    lowest = bids.value_N.new_full(free_BHT.shape, float("-inf"))
    value_BHT, key_BHT = (
        lowest.masked_scatter(free_BHT, number_N) for number_N in (bids.value_N, bids.draw_N)
    )
    drawn_BH = torch.zeros_like(free_BHT).masked_scatter(free_BHT, drawn_N).sum(-1)
    drawn_BH = drawn_BH * places_BH // (won.budget_BH - bids.guaranteed_BH).clamp_min(1)
    scored_BHT = free_BHT & (rank_entries(value_BHT) < (places_BH - drawn_BH)[..., None])
    left_BHT = free_BHT & ~scored_BHT
    key_BHT = key_BHT.masked_fill(~left_BHT, float("-inf"))
    return ~free_BHT | scored_BHT | (left_BHT & (rank_entries(key_BHT) < drawn_BH[..., None]))
