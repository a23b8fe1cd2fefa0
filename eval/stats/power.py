"""Computes the smallest difference that a comparison could have shown, from its spread and number of items.

Reads no scores, only the standard deviation of paired differences per cluster (from a pilot, or from an
inconclusive run). "Inconclusive" beside a smallest detectable difference of ten points says "too few items";
beside one of half a point it says something about the policies.

Clusters are the unit, as everywhere in these statistics, and every size is for one comparison at `alpha`. In
a family of m comparisons under Holm's method, alpha / m is the safe value.
"""

import math

from retain.process.extras import deferred

with deferred("eval", "scipy", what="a comparison's statistics"):
    from scipy import optimize, stats


def _check(**values: float | int) -> None:
    """Check the numbers given; all problems in one message."""
    problems = []
    for name, value in values.items():
        if name in ("alpha", "power") and not 0 < value < 1:
            problems.append(f"{name} must lie in (0, 1), got {value}")
        elif name == "num_items" and value < 2:
            problems.append(f"num_items must be at least 2, got {value}")
        elif name == "sd" and not 0 < value < math.inf:
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
