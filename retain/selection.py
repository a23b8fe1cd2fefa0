"""Selects the keep set from scores, protection and budgets.

The order is (protected, score, later position), the same on every backend; no head is left empty.
"""

from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from retain.ranking import rank_kept_first, refuse_nan


def select(
    score_BHT: Float32[Tensor, "B H T"], protected_BHT: Bool[Tensor, "B H T"], budget_BH: Int64[Tensor, "B H"]
) -> Bool[Tensor, "B H T"]:
    """Keep the first `budget` entries of each head in the order (protected, score, later position).

    `keep[b, h, i] = protected[b, h, i] or #{k unprotected: s[k] > s[i], or s[k] == s[i] and k > i} < budget -
    #protected`

    Args:
        score_BHT: float32, higher = keep; -inf where a head holds no entry (padding, or gone before), and
            nowhere else; no NaN.
        protected_BHT: kept whatever the score.
        budget_BH: entries to keep, protected ones included.

    Returns:
        True where kept.

    Raises:
        ValueError: if a score is NaN, or a budget is below the protected count, above what exists, or 0.
    """
    refuse_nan(score_BHT)
    exists_BHT = score_BHT > float("-inf")
    protected_count_BH = protected_BHT.sum(-1)
    held_BH = exists_BHT.sum(-1)
    empty_BH = (budget_BH < 1) & (held_BH > 0)
    if (bad_BH := (budget_BH < protected_count_BH) | (budget_BH > held_BH) | empty_BH).any():
        b, h = bad_BH.nonzero()[0].tolist()
        budget, protected, held = (int(count[b, h]) for count in (budget_BH, protected_count_BH, held_BH))
        why = (
            f"{protected - budget} fewer than the {protected} protected"
            if budget < protected
            else f"{budget - held} more than the {held} that exist"
            if budget > held
            else "and no head may be empty"
        )
        raise ValueError(
            f"sequence {b}, head {h} has a budget of {budget} entries, {why}: "
            f"pass a budget between {max(1, protected)} and {held}."
        )
    return rank_kept_first(score_BHT, protected_BHT) < budget_BH[..., None]
