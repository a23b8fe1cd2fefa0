"""Computes head budgets from tables of heads (`retain.head_tables`): by class, or by importance.

By class (DuoAttention) streaming heads hold the protected entries, and retrieval heads share the rest. By
importance (HeadKV) heads share a part of the budget in proportion, and the rest equally. The total stays as
the user stated it.

DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads, arXiv 2410.10819.
Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning
(HeadKV), arXiv 2410.19258.
"""

from collections.abc import Sequence
from fractions import Fraction

from retain.budget.largest_remainder import exact, fill, round_shares


def class_budgets(
    classes_LH: Sequence[Sequence[float]],
    threshold: float,
    total: int,
    least: int,
    capacity_LH: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Budgets of one sequence: streaming heads hold `least`, retrieval heads share the rest alike.

    What full retrieval heads cannot hold goes to the streaming heads, equally.

    Args:
        classes_LH: the table.
        threshold: a head at or above it is a retrieval head.
        total: entries over all layers and heads, at most those that exist.
        least: entries of every head that has them (protected ones, at least one).
        capacity_LH: entries that each head has.

    Returns:
        entries `[L][H]`, which sum to the total.
    """
    weights = [Fraction(int(cell >= threshold)) for row in classes_LH for cell in row]
    most = [own for row in capacity_LH for own in row]
    shares = iter(round_shares(fill(total, weights, [min(least, own) for own in most], most)))
    return [[next(shares) for _ in row] for row in classes_LH]


def importance_shares(
    importance_LC: Sequence[Sequence[float]], heads_L: Sequence[int], beta: float
) -> list[Fraction]:
    """Each KV head's share of a budget by importance, layer after layer (HeadKV); they sum to 1.

    `share_h = (1 - 1 / beta) / N + (1 / beta) * s_h / sum s`, over the N KV heads of all layers, with `s_h`
    the mean importance of the query heads of its group. With `b` entries a head in the mean, a head gets
    `b - b / beta`, and its part of the pool of `N b / beta`. Where no head has any importance, equal parts.

    HeadKV's released code caches each *query* head by itself, and takes whole entries `floor(b / beta)` for
    the pool; a KV head here gets the mean of what its query heads get there.

    Args:
        importance_LC: the table, of KV heads or of query heads.
        heads_L: KV heads of each layer.
        beta: at least 1; 1 / beta of the budget goes by importance.
    """
    means: list[Fraction] = []
    for row, heads in zip(importance_LC, heads_L, strict=True):
        group = len(row) // heads
        means += [
            sum(map(exact, row[h * group : (h + 1) * group]), Fraction(0)) / group for h in range(heads)
        ]
    whole, count, pool = sum(means), len(means), 1 / exact(beta)
    parts = [own / whole if whole else Fraction(1, count) for own in means]
    return [(1 - pool) / count + pool * part for part in parts]


def share_budgets(
    shares: Sequence[Fraction],
    total: int,
    *,
    protected: int,
    least: int,
    capacity_LH: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Budgets of one sequence: every head holds the protected entries, and its share of the rest.

    `budget_h = protected + share_h * (total - protected * L H)`, at least `least`, at most what the head has;
    what a full head leaves goes to the others by their shares (`retain.budget.largest_remainder.fill`), and
    largest remainder makes it whole. Heads whose share is 0 get more than `least` only when all others are
    full.

    Args:
        shares: of all heads, layer after layer, which sum to 1 (`importance_shares`).
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
    filled = round_shares(fill(total - sum(inside), shares, *bounds))
    budgets = iter([own + safe for own, safe in zip(filled, inside, strict=True)])
    return [[next(budgets) for _ in row] for row in capacity_LH]
