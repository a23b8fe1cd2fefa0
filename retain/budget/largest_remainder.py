"""Shares whole entries exactly: rational shares in, integers of exact sum out, rounded once."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction


def exact(number: float | Fraction) -> Fraction:
    """Convert a number as written to a fraction: `exact(0.1)` is 1/10, not the nearest double."""
    return number if isinstance(number, Fraction) else Fraction(str(number))


def ratio_of(number: float) -> tuple[int, int]:
    """Write a share in [0, 1] as `part / whole`, small enough that whole entries times it fit in 64 bits:
    exact to six decimals, else the nearest millionth or better."""
    return exact(number).limit_denominator(10**6).as_integer_ratio()


def fill(
    total: int | Fraction, weights: Sequence[Fraction], least: Sequence[int], most: Sequence[int]
) -> list[Fraction]:
    """Share by weight between bounds, exactly: `share_i = min(max(level * w_i, least_i), most_i)`.

    The shares sum to the total, which lies between `sum(least)` and `sum(most)`; weights are non-negative.
    The level falls when another share joins, so that earlier ones only shrink (a cascade relies on it).
    Zero weights get their least until all others are full, then share the rest equally.

    Raises:
        ValueError: if the total does not fit between the bounds.
    """
    if not sum(least) <= total <= sum(most):
        raise ValueError(
            f"{total} entries do not fit in capacities {list(most)}, which hold {sum(most)}, of which at "
            f"least {list(least)}, {sum(least)} in all, are taken."
        )
    heavy = [i for i, weight in enumerate(weights) if weight]
    light = [i for i, weight in enumerate(weights) if not weight]
    shares = [Fraction(low) for low in least]
    left = Fraction(total) - sum(shares[i] for i in light)
    if not heavy or left > sum(most[i] for i in heavy):
        rest = Fraction(total) - sum(most[i] for i in heavy)
        limits = ([bound[i] for i in light] for bound in (least, most))
        equal = iter(fill(rest, [Fraction(1)] * len(light), *limits) if light else [])
        return [next(equal) if not weight else Fraction(most[i]) for i, weight in enumerate(weights)]

    def held(level: Fraction) -> list[Fraction]:
        return [min(max(level * weights[i], Fraction(least[i])), Fraction(most[i])) for i in heavy]

    # Between two neighbouring bounds the sum is a straight line in the level.
    bounds = sorted({Fraction(bound[i]) / weights[i] for bound in (least, most) for i in heavy})
    level = bounds[max(0, bisect_right(bounds, left, key=lambda bound: sum(held(bound), Fraction(0))) - 1)]
    slope = sum(weights[i] for i in heavy if least[i] <= level * weights[i] < most[i])
    if slope:
        level += (left - sum(held(level))) / slope
    for i, share in zip(heavy, held(level), strict=True):
        shares[i] = share
    return shares


def largest_remainder(
    total: int,
    weights: Sequence[Fraction],
    capacity: Sequence[int] | None = None,
    *,
    protected: Sequence[int] | None = None,
    least: Sequence[int] | None = None,
    round_up: bool = False,
) -> list[int]:
    """Share whole entries by weight, exactly: `sum(result) == total`, `least <= result <= capacity`.

    Every share holds its protected entries; what is left of the total goes by weight between the bounds
    (`fill`), and is rounded by largest remainder (Hamilton): the floor of each, and the rest one by one to
    the largest remainders, ties to the lower index.

    Args:
        total: entries in all.
        weights: of the shares; all zero is all alike.
        capacity: most entries of each; None: no limit.
        protected: entries of each that do not go by weight; None: none.
        least: entries that each gets in any case; None: the protected ones.
        round_up: round each share up, so that none shrinks when it is rounded later.

    Raises:
        ValueError: if the total does not fit.
    """
    inside = [0] * len(weights) if protected is None else protected
    limit = [total + safe for safe in inside] if capacity is None else capacity
    low = [max(0, bound - safe) for bound, safe in zip(least or inside, inside, strict=True)]
    high = [bound - safe for bound, safe in zip(limit, inside, strict=True)]
    filled = fill(total - sum(inside), weights, low, high)
    whole = [math.ceil(share) if round_up else math.floor(share) for share in filled]
    left = max(0, int(sum(filled)) - sum(whole))
    for i in sorted(range(len(whole)), key=lambda i: whole[i] - filled[i])[:left]:
        whole[i] += 1
    return [share + safe for share, safe in zip(whole, inside, strict=True)]
