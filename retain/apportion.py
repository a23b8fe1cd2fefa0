"""Whole entries from shares: exact rational numbers in, integers of exact sum out.

In: a total, weights, and what each can hold. Out: integers. The decision taken here: a number that a person
wrote is taken as written (0.1 is 1/10, not the nearest double), and is rounded once, by largest remainder,
where entries become whole.
"""

import math
from collections.abc import Sequence
from fractions import Fraction


def exact(number: float | Fraction) -> Fraction:
    """The rational number that a person wrote: `exact(0.1)` is 1/10, not the nearest double."""
    return number if isinstance(number, Fraction) else Fraction(str(number))


def apportion(total: int, weights: Sequence[Fraction], capacity: Sequence[int] | None = None) -> list[int]:
    """Share whole entries by weight, exactly: `sum(result) == total`, `result[i] <= capacity[i]`.

    Largest remainder (Hamilton): `floor(total * w_i / sum w)` each, and the rest one by one to the largest
    remainders, ties to the lower index. Whoever's share reaches its capacity is given that, and the others
    share what is left.

    Args:
        total: entries to share, at most `sum(capacity)`.
        weights: non-negative, exact.
        capacity: what each can hold; None for no limit.

    Raises:
        ValueError: if the total does not fit.
    """
    limit: list[float] = [math.inf] * len(weights) if capacity is None else list(capacity)
    if total > sum(limit):
        raise ValueError(f"{total} entries do not fit in capacities {list(limit)}, which hold {sum(limit)}.")
    shares = [0] * len(weights)
    active, left = list(range(len(weights))), total
    while left:
        # When all that weighs is full, the rest is shared alike.
        if not any(weights[i] for i in active):
            weights = [Fraction(1)] * len(weights)
        scale = sum((weights[i] for i in active), Fraction(0))
        quota = {i: left * weights[i] / scale for i in active}
        full = [i for i in active if quota[i] >= limit[i]]
        if full:
            for i in full:
                shares[i] = int(limit[i])
                left -= shares[i]
            active = [i for i in active if i not in full]
            continue
        for i in active:
            shares[i] = math.floor(quota[i])
        left -= sum(shares[i] for i in active)
        for i in sorted(active, key=lambda i: shares[i] - quota[i])[:left]:
            shares[i] += 1
        break
    return shares
