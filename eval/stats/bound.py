"""Bounds a mean difference from below, for any distribution of differences.

"Equivalent" is a claim about items that were *not* seen: policies that agree but for one item in fifty, where
one of them loses everything, show next to no spread in most runs of fifty items, and a t test or a bootstrap
then trusts that spread.

The bound of Gaffke (*Three Test Statistics for a Nonparametric One-Sided Hypothesis on the Mean of a
Nonnegative Variable*, 2005; Phan, Thomas, Learned-Miller, *Towards Practical Mean Bounds for Small Samples*,
arXiv 2106.03163) assumes only how much one item can lose. It adds one item that loses that much, and weighs
all items at random: for 0/1 scores it is Clopper and Pearson's exact bound, without any loss among n items
the rule of three, and for many items with smooth differences it is t. A lost item never counts for a policy.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize

# The most that one item can lose, in points.
WORST = 100.0
# No p is said to be smaller.
SMALLEST = 1e-290
# Where the integral of `_tail` is taken, and how far its path may bend: exact to nine digits, from one item
# to 20,000, at either end of p.
_GRID, _BEND = np.linspace(0.0, 12.0, 193), 0.3


def p_at_most(strata: Sequence[np.ndarray], value: float) -> float:
    """One-sided p of "the true macro mean is `value` or less": with E_i independent exponentials, w_i the
    weight of item i in the macro mean, and item 0 the added one, at the largest weight,

        p = P(sum_i w_i E_i (x_i - value) + max_i w_i E_0 (-WORST - value) <= 0)

    by its moment-generating function, integrated along a path of descent.

    Args:
        strata: One array per stratum (task), one number per item: policy minus baseline, in points.
        value: In points.
    """
    seen = [np.unique(stratum, return_counts=True) for stratum in strata]
    sizes = [np.full(one.size, 1 / (len(strata) * s.size)) for s, (one, _) in zip(strata, seen, strict=True)]
    values, counts = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    weights = np.concatenate(sizes)
    added = float(weights.max()) * (-WORST - value)
    steps, counts = np.append(weights * (values - value), added), np.append(counts, 1.0)
    counts, steps = counts[steps != 0], steps[steps != 0]
    if not steps.size or steps.max() <= 0:
        return 1.0
    if steps.min() >= 0:
        return SMALLEST
    steps = steps / np.abs(steps).max()
    # P(S <= 0) on the side where 0 is the tail, so that no digit is lost: S above its mean, or below.
    below = float((counts * steps).sum()) > 0
    tail = _tail(steps if below else -steps, counts)
    return max(SMALLEST, min(1.0, tail if below else 1.0 - tail))


def p_within(differences: Sequence[np.ndarray], margin: float) -> float:
    """p of "the true macro-mean difference is at least the margin, in either direction". A small p says
    equivalent.

    Args:
        margin: Largest difference that would not matter, > 0, stated before the run.
    """
    return max(p_at_most([sign * one for one in differences], -margin) for sign in (1.0, -1.0))


def _tail(steps: np.ndarray, counts: np.ndarray) -> float:
    """P(S <= 0) of `S = sum_j sum_{i <= counts_j} steps_j E_i`, of mean above 0: the inverse transform
    `1 / (2 pi i) * integral of exp(K(s)) / -s ds`, `K(s) = -sum_j counts_j log(1 - s steps_j)`, through the
    lowest point of the integrand between K's pole below 0 and 0."""
    pole = 1 / float(steps.min())

    def slope(share: float) -> float:
        s = pole * share
        return float((counts * steps / (1 - s * steps)).sum()) - 1 / s

    middle = pole * float(optimize.brentq(slope, 1e-14, 1 - 1e-14, xtol=1e-15))
    ratios = steps / (1 - middle * steps)
    second = float((counts * ratios**2).sum()) + 1 / middle**2
    third = 2 * float((counts * ratios**3).sum()) - 2 / middle**3
    width, bend = 1 / math.sqrt(second), float(np.clip(-third / (3 * second**1.5), -_BEND, _BEND))
    # A hyperbola that leaves the saddle along the path of steepest descent. A straight line would swing at
    # every scale where one step is far larger than the others.
    away = width * (1j * np.sinh(_GRID) - bend * (np.cosh(_GRID) - 1))
    along = width * (1j * np.cosh(_GRID) - bend * np.sinh(_GRID))
    height = float(-(counts * np.log1p(-middle * steps)).sum()) - math.log(-middle)
    # K(s) - K(middle), term by term, so that no digit is lost.
    curve = np.exp(-(counts * np.log1p(-np.multiply.outer(away, ratios))).sum(axis=1))
    heights = (curve * along * middle / (middle + away)).imag
    area = float(heights.sum() - heights[0] / 2) * float(_GRID[1])
    return math.exp(height) * area / math.pi
