"""Rounds a plan to whole pages a head, and selects by it: an engine frees memory by the page.

A page is N entries of one head. Of a prompt of T tokens, `F = T // N` pages are full, and the *tail*, the
`T - F N` entries of the unfilled last page, stays in every head. The total is rounded up once, to K pages a
head in the mean. K follows from plain numbers, so that a scheduler knows it before a model has run. Budgets
of heads, spread with that total as ever (`retain.budget.cascade.head_budgets`), are rounded to pages of the
same sum over the heads of all layers. All of this is of one prompt that holds every entry: B = 1.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from retain.attention.ranking import refuse_nan, select
from retain.budget.allocation import Candidates
from retain.budget.cascade import head_budgets, keep_first
from retain.budget.joint import Won
from retain.budget.largest_remainder import largest_remainder
from retain.policy import Plan


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


def keep_pages(plan: Plan, layers: Sequence[Candidates], page: int) -> list[Bool[Tensor, "B H T"]]:
    """Keep masks of all layers, of whole pages and the tail in every head.

    Heads share the pages of all layers by their entries, by largest remainder; a head gets at least as many
    as hold its guaranteed entries.

    Args:
        plan: of `in_pages`.
        layers: all that evict, in order.
        page: N, entries a page.

    Raises:
        ValueError: guaranteed entries take more pages than there are, or a score is NaN.
    """
    for layer in layers:
        refuse_nan(layer.score_BHT)
    full, tail = divmod(plan.totals.lengths_B[0], page)
    budgets = head_budgets(plan, layers)
    entries = [count - tail for won in budgets for count in won.budget_BH[0].tolist()]
    sure = [count - tail for layer in layers for count in layer.guaranteed_BH[0].tolist()]
    pages = largest_remainder(
        sum(entries) // page,
        [Fraction(count) for count in entries],
        [full] * len(entries),
        least=[max(0, -(-count // page)) for count in sure],
    )
    keeps, held_LBH = [], (torch.tensor(pages) * page + tail).view(len(layers), 1, -1)
    for layer, won, held_BH in zip(layers, budgets, held_LBH.to(layers[0].score_BHT.device), strict=True):
        if plan.policy.draw is None:
            keeps.append(keep_first(plan.policy, layer, held_BH))
        else:
            keeps.append(_keep_drawn(layer, won, held_BH))
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
    drawn_BH = torch.zeros_like(free_BHT).masked_scatter(free_BHT, drawn_N).sum(-1)
    places_BH, won_BH = (count_BH - bids.guaranteed_BH for count_BH in (budget_BH, won.budget_BH))
    scored_BHT = select(layer.score_BHT, ~free_BHT, budget_BH - drawn_BH * places_BH // won_BH.clamp_min(1))
    key_BHT = layer.score_BHT.masked_scatter(free_BHT, bids.draw_N)
    return select(key_BHT, scored_BHT, budget_BH)
