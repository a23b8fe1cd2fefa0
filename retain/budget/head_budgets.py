"""Computes head budgets by a number for each head (`retain.head_weights`), of the total that the user stated.

DuoAttention's numbers are 1 for a retrieval head and 0 for a streaming head: streaming heads hold the
protected entries, and retrieval heads share the rest. HeadKV's are `(beta - 1) * sum(s) + N * s_h` over N
heads, with s their importance: of what is not protected, `1 / beta` goes by importance and the rest equally.

DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads, arXiv 2410.10819.
Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning
(HeadKV), arXiv 2410.19258.
"""

from collections.abc import Sequence
from fractions import Fraction

from retain.budget.largest_remainder import fill, round_shares


def share_budgets(
    weights: Sequence[Fraction],
    total: int,
    *,
    protected: int,
    least: int,
    capacity_LH: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Budgets of one sequence: every head holds the protected entries, and its share of the rest.

    `budget_h = protected + w_h / sum w * (total - protected * L H)`, at least `least`, at most what the head
    has; what a full head leaves goes to the others by their weights (`retain.budget.largest_remainder.fill`),
    and largest remainder makes it whole. Heads of weight 0 get more than `least` only when all others are
    full.

    Args:
        weights: of all heads, layer after layer; all zero is all alike.
        total: entries over all layers and heads, at most those that exist; the budgets sum to it.
        protected: entries of every head that are protected.
        least: entries that every head gets, if it has them; no less than are protected.
        capacity_LH: entries that each head has.
    """
    flat = [own for row in capacity_LH for own in row]
    # A head that holds less than is protected (a sequence of few tokens) holds nothing that competes.
    inside = [min(protected, own) for own in flat]
    bounds = [
        [min(least, own) - safe for own, safe in zip(flat, inside, strict=True)],
        [own - safe for own, safe in zip(flat, inside, strict=True)],
    ]
    filled = round_shares(fill(total - sum(inside), weights, *bounds))
    budgets = iter([own + safe for own, safe in zip(filled, inside, strict=True)])
    return [[next(budgets) for _ in row] for row in capacity_LH]
