"""Selects the first of two stages: entries kept for their attention before a second score ranks the rest.

A first stage is a mask beside protection, inside the budget, so that one selection serves every method.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from retain.attention.ranking import order_entries, rank_entries
from retain.budget.largest_remainder import ratio_of


def stage_by_budget(
    first_BHT: Float[Tensor, "B H T"],
    kept_BHT: Bool[Tensor, "B H T"],
    budget_BH: Int64[Tensor, "B H"],
    share: float,
) -> Bool[Tensor, "B H T"]:
    """Select the first `floor(share * budget)` entries of each head in the order (kept, first, later
    position).

    Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective (CriticalKV), arXiv
    2502.03805: its alpha, 0.5. Kept (protected) entries count, as the window does in its released code.

    Args:
        first_BHT: score of the stage; -inf on padding.
        kept_BHT: protected entries.
        budget_BH: entries of each head.
        share: alpha.
    """
    part, whole = ratio_of(share)
    count_BH1 = (budget_BH * part // whole)[..., None]
    exists_BHT = first_BHT > float("-inf")
    return (rank_entries(first_BHT.masked_fill(kept_BHT, float("inf"))) < count_BH1) & exists_BHT


def stage_by_mass(
    first_BHT: Float[Tensor, "B H T"],
    kept_BHT: Bool[Tensor, "B H T"],
    limit_B: Sequence[int],
    share: float,
    *,
    window: int,
) -> Bool[Tensor, "B H T"]:
    """Select the entries before the window that, from the most attended on, hold a share of all observed
    attention.

    With `a` the mean attention of the window's queries, `a_1 >= a_2 >= ...` over the entries before the
    window: entry `k` is in while `a_1 + ... + a_k < share * sum(a) - mass(window)`; the entry that crosses
    the line is out, as in the released code. Of these, at most the first `limit` unprotected ones of each
    head.

    Taming the Fragility of KV Cache Eviction (DefensiveKV), arXiv 2510.13334; share 0.9. In its released code
    the mass of the window is that of the last `window` entries *before* the window, whose own columns had
    been cut off; here it is the window's, as the text has it.

    Args:
        first_BHT: mean attention, window included; -inf on padding.
        kept_BHT: protected entries, which take no part of the limit.
        limit_B: entries a head, per sequence: the head's mean budget without protected entries (the released
            code clamps at the budget of what stands before the window). Below zero is zero, where the
            released code takes almost all.
        share: of the attention.
        window: the last entries, which are the observation window.
    """
    T = first_BHT.shape[-1]
    exists_BHT = first_BHT > float("-inf")
    before_BHT = exists_BHT & (torch.arange(T, device=first_BHT.device) < T - window)
    attention = first_BHT.masked_fill(~exists_BHT, 0.0)
    before = attention.masked_fill(~before_BHT, 0.0)
    before_BH1 = before.sum(-1, keepdim=True)
    total_BH1 = attention.sum(-1, keepdim=True)
    line_BH1 = share * total_BH1 - (total_BH1 - before_BH1)
    order = order_entries(before.masked_fill(~before_BHT, float("-inf")))
    below = before.gather(-1, order).cumsum(-1) < line_BH1
    inside_BHT = torch.zeros_like(below).scatter_(-1, order, below) & before_BHT & ~kept_BHT
    limit = torch.tensor([max(0, limit) for limit in limit_B], device=first_BHT.device)[:, None, None]
    return inside_BHT & (rank_entries(before.masked_fill(~inside_BHT, float("-inf"))) < limit)
