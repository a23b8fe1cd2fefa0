"""Computes the number of items that a comparison needs, from a spread and a margin.

Reads no scores, only the standard deviation of paired differences per cluster (from a pilot, or from an
inconclusive run). "Inconclusive" beside a smallest detectable difference of ten points says "too few items";
beside one of half a point it says something about the policies.

Clusters are the unit, as everywhere in these statistics, and every size is for one comparison at `alpha`. In
a family of m comparisons under Holm's method, alpha / m is the safe value.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from retain.process.extras import deferred

with deferred("eval", "scipy", what="a comparison's statistics"):
    from scipy import optimize, stats

from retain.eval.stats.not_worse import WORST


def _check(**values: float | int) -> None:
    """Check the numbers given; all problems in one message."""
    problems = []
    for name, value in values.items():
        if name in ("alpha", "power") and not 0 < value < 1:
            problems.append(f"{name} must lie in (0, 1), got {value}")
        elif name == "num_items" and value < 2:
            problems.append(f"num_items must be at least 2, got {value}")
        elif name in ("sd", "margin", "worst") and not 0 < value < math.inf:
            problems.append(f"{name} must be positive, got {value}")
    if problems:
        raise ValueError("Power: " + "; ".join(problems) + ".")


def _noncentral_t(x: float, df: int, shift: float) -> float:
    """P(T <= x). scipy says nan for some large shifts; the normal approximation is as good as exact there."""
    exact = float(stats.nct.cdf(x, df, shift))
    if math.isfinite(exact):
        return exact
    z = (x * (1 - 1 / (4 * df)) - shift) / math.sqrt(1 + x * x / (2 * df))
    return float(stats.norm.cdf(z))


def _difference_power(num_items: int, effect: float, alpha: float) -> float:
    """P(|T| > t) of the two-sided test at a true difference of `effect` standard deviations. The lower tail
    goes through `_noncentral_t` too: `nct.cdf` itself is nan at -t for shifts that do occur."""
    df, shift = num_items - 1, effect * math.sqrt(num_items)
    quantile = float(stats.t.isf(alpha / 2, df))
    return 1 - _noncentral_t(quantile, df, shift) + _noncentral_t(-quantile, df, shift)


def _fewest_items(chance: Callable[[int], float], power: float) -> int:
    """The smallest n >= 2 whose chance reaches the power; the chance rises with n."""
    high = 2
    while chance(high) < power:
        high *= 2
    return bisect_left(range(high), power, lo=max(2, high // 2), key=chance)


def equivalence_power(
    num_items: int, *, sd: float, margin: float, true_difference: float = 0.0, alpha: float = 0.05
) -> float:
    """Probability that TOST shows equivalence: both one-sided t tests reject at alpha.

    `max(0, F(-t; (D - m) / se) - F(t; (D + m) / se))`, where F is the noncentral t with n - 1 degrees of
    freedom, `t` its central 1 - alpha quantile, `se = sd / sqrt(n)`, D the true difference and m the margin
    (the noncentral t approximation of Phillips, *Power of the Two One-Sided Tests Procedure*, 1990).

    Args:
        num_items: Clusters, >= 2.
        sd: Standard deviation of the paired differences.
        margin: Of equivalence, in the same unit.
        true_difference: D; 0 for policies that are truly alike.
        alpha: Level of each one-sided test.
    """
    _check(num_items=num_items, sd=sd, margin=margin, alpha=alpha)
    error, df = sd / math.sqrt(num_items), num_items - 1
    quantile = float(stats.t.ppf(1 - alpha, df))
    below_upper = _noncentral_t(-quantile, df, (true_difference - margin) / error)
    below_lower = _noncentral_t(quantile, df, (true_difference + margin) / error)
    return max(0.0, below_upper - below_lower)


def verdict_power(
    num_items: int,
    *,
    sd: float,
    margin: float,
    true_difference: float = 0.0,
    alpha: float = 0.05,
    level: float = 0.95,
    worst: float = WORST,
) -> float:
    """Probability that the verdicts (`retain.eval.stats.paired_result`) see a difference within the margin,
    of one task whose differences are near normal: the interval lies within it, and so does, at alpha, the
    bound that counts one item lost. The word is "equivalent" unless the interval leaves out 0 too.

    The first is TOST at `(1 - level) / 2`. For the second a mean m must keep from either margin the
    `1 - alpha` quantile q of `se * Z + worst / (n + 1) * E`, Z normal, E exponential, so that its chance is
    `P(|m| < margin - q)`. The smaller of the two is given: of means that pass one, nearly all pass the other.

    Args:
        num_items, sd, margin, true_difference: As of `equivalence_power`.
        alpha: Level of the family; alpha / m for one of m comparisons.
        level: Coverage of the interval.
        worst: The most that one item can lose, in the same unit.
    """
    _check(num_items=num_items, sd=sd, margin=margin, alpha=alpha)
    error, added = sd / math.sqrt(num_items), worst / (num_items + 1)
    interval = equivalence_power(
        num_items, sd=sd, margin=margin, true_difference=true_difference, alpha=(1 - level) / 2
    )
    room = margin - float(stats.exponnorm.isf(alpha, added / error, scale=error))
    if room <= 0:
        return 0.0
    ends = stats.norm.cdf([(room - true_difference) / error, (-room - true_difference) / error])
    return min(interval, float(ends[0] - ends[1]))


def items_for_equivalence(
    sd: float,
    margin: float,
    *,
    power: float = 0.8,
    alpha: float = 0.05,
    true_difference: float = 0.0,
    method: str = "verdict",
    worst: float = WORST,
) -> int:
    """Clusters that it takes to show equivalence.

    "verdict" is the smallest n at which `verdict_power` reaches `power`: what the word needs here. TOST,
    which papers plan by, needs fewer, since it asks for a 90 % interval and counts nothing that was not seen:
    "t" is the smallest n at which `equivalence_power` reaches `power`, and "normal" its closed form for a
    true difference of 0, rounded up: `n = ((z_{1-alpha} + z_{(1+power)/2}) * sd / margin)^2`.

    Args:
        sd: Standard deviation of the paired differences.
        margin: Of equivalence, in the same unit, larger than |true_difference|.
        power: Probability wanted.
        alpha: Level of each one-sided test.
        true_difference: D; the closed form has it at 0.
        method: "verdict", "t" or "normal".
        worst: The most that one item can lose, in the unit of `sd`: 100 of points, 1 of scores in [0, 1].

    Examples:
        >>> items_for_equivalence(0.217, 0.02, method="normal")
        1009
        >>> items_for_equivalence(0.217, 0.02, worst=1.0)
        1239
    """
    _check(sd=sd, margin=margin, power=power, alpha=alpha, worst=worst)
    if method not in ("verdict", "t", "normal"):
        raise ValueError(f"Unknown method {method!r}: write 'verdict', 't' or 'normal'.")
    if abs(true_difference) >= margin:
        raise ValueError(
            f"No number of items shows a true difference of {true_difference} to be inside a margin of "
            f"{margin}."
        )
    if method == "normal":
        if true_difference != 0:
            raise ValueError("The closed form is for a true difference of 0: use method='t' for another.")
        root = (stats.norm.ppf(1 - alpha) + stats.norm.ppf((1 + power) / 2)) * sd / margin
        return max(2, math.ceil(root**2))
    true = float(true_difference)
    chance = partial(equivalence_power, sd=sd, margin=margin, true_difference=true, alpha=alpha)
    if method == "verdict":
        chance = partial(verdict_power, sd=sd, margin=margin, true_difference=true, alpha=alpha, worst=worst)
    return _fewest_items(chance, power)


def smallest_difference(num_items: int, *, sd: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """The smallest true mean difference that a two-sided paired t test over this many clusters finds with the
    wanted power, in the unit of `sd`: the root in D of `P(|t| > t_{1-alpha/2}) = power`, t noncentral with
    n - 1 degrees of freedom and noncentrality `sqrt(n) * D / sd`.

    Brent's method between 0, where the power is alpha, and a D that has enough of it.
    `statsmodels.stats.power.TTestPower.solve_power` asks the same, and fails or answers wrongly at the small
    alpha of a large family.

    Args:
        num_items: Clusters, >= 2.
        sd: Standard deviation of the paired differences.
        power: Probability wanted, above alpha.
        alpha: Level of the two-sided test.
    """
    _check(num_items=num_items, sd=sd, power=power, alpha=alpha)
    if power <= alpha:
        raise ValueError(f"Power: a power of {power} is had without any difference at alpha {alpha}.")

    def lacking(effect: float) -> float:
        return _difference_power(num_items, effect, alpha) - power

    high = (float(stats.t.isf(alpha / 2, num_items - 1)) + 6) / math.sqrt(num_items)
    while lacking(high) < 0:
        high *= 2
    return float(sd * optimize.brentq(lacking, 0.0, high))
