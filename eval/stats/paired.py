"""Compares two policies on the same items: estimate, interval, tests, and a verdict in one word.

`judge` takes all comparisons of a family, fixed before the run, and gives each its word:

- better / worse: the interval excludes 0 *and* the Holm-adjusted p of the difference test is below alpha;
- equivalent: neither of these, the interval lies strictly inside (-margin, +margin) *and* the Holm-adjusted p
  of "the difference is at least the margin" (`retain.eval.stats.bound.p_within`) is below alpha;
- inconclusive: everything else, equal scores on too few items too.

The difference p values are one Holm family and those of equivalence another, each at alpha; the two null
hypotheses of one comparison exclude each other. TOST is no part of it: where rare items lose everything and
the others next to nothing, most runs of fifty items hold no such item, and t says "equivalent" of them.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from scipy import stats

from retain.eval.stats.bound import WORST, p_within
from retain.eval.stats.interval import Interval, paired_interval

Name = TypeVar("Name", bound=Hashable)
Verdict = Literal["better", "worse", "equivalent", "inconclusive"]
ALPHA = 0.05
# Of the sum of all absolute differences: sums that are no further apart are one.
TIE = 1e-10
# Points, a hundredth of a millionth of one: what is smaller is rounding of equal scores, not a difference.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Comparison:
    """Policy minus baseline, in the unit of the scores.

    Attributes:
        interval: Estimate and interval of the macro-mean difference.
        holm_p: p of the difference test (`sign_flip`), adjusted within its family.
        holm_p_within: p of "the difference is at least the margin", adjusted within its family.
        family_size: Comparisons that were adjusted together.
        verdict: In the family.
    """

    interval: Interval
    holm_p: float
    holm_p_within: float
    family_size: int
    verdict: Verdict


def sign_flip(strata: Sequence[np.ndarray], *, resamples: int = 9999, seed: int = 0) -> float:
    """Two-sided p of "the macro-mean difference is zero", by flipping the sign of each item's difference:
    `p = 2 * min(P(m* >= m), P(m* <= m))`, `m = (1/K) * sum_k mean_i d_ki`; 1 where nothing differs.

    It assumes that, were the policies alike, each difference would be as likely to have the other sign. In
    one stratum whose differences have one size (right or wrong answers) it is the binomial test, which is
    McNemar's exact one. Otherwise all patterns are counted when they are no more than `resamples`, or
    `resamples` are drawn and `(count + 1) / (resamples + 1)` is used. Of the n differences of one size as
    many are drawn positive as heads of n coins, so that no coin is tossed for each.

    Args:
        strata: One array per stratum, one difference per item.
        resamples: Most patterns tried. The smallest p is about 2 / resamples, which a large family must be
            able to afford (`judge` sees to it).
        seed: Of the drawn patterns.
    """
    # Each difference in its share of the macro mean: their sum is the macro mean, whatever is flipped.
    shares = np.concatenate([stratum / (stratum.size * len(strata)) for stratum in strata])
    shares = shares[shares != 0]
    if not shares.size:
        return 1.0
    if len(strata) == 1 and np.ptp(np.abs(shares)) == 0:
        return float(stats.binomtest(int((shares > 0).sum()), shares.size).pvalue)
    shares = shares / np.abs(shares).sum()
    # Not `2 ** size`: with a thousand items that is beyond what a float holds.
    if shares.size == 1 or shares.size <= math.log2(resamples):
        sums = np.zeros(1)
        for share in shares:
            sums = np.concatenate([sums + share, sums - share])
        return min(1.0, 2 * _as_extreme(sums, shares.sum()) / sums.size)
    rng, sizes = np.random.default_rng(seed), np.abs(shares)
    _, first, counts = np.unique(np.round(sizes, 15), return_index=True, return_counts=True)
    drawn = np.zeros(resamples)
    for size, count in zip(sizes[first], counts, strict=True):
        drawn += size * (2.0 * rng.binomial(count, 0.5, resamples) - count)
    return min(1.0, 2 * (_as_extreme(drawn, shares.sum()) + 1) / (resamples + 1))


def _as_extreme(sums: np.ndarray, found: float) -> int:
    """Number of sums that reach the found one, on the side where they are fewer; sums that differ in their
    last bits are one."""
    return int(min(np.count_nonzero(sums >= found - TIE), np.count_nonzero(sums <= found + TIE)))


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Adjust the p values of a family by Holm's step-down method: the i-th smallest of m becomes
    `max_{j <= i} min(1, (m - j + 1) * p_(j))`, so that "adjusted p < alpha" for any of them is wrong with a
    probability of at most alpha (Holm, *A Simple Sequentially Rejective Multiple Test Procedure*, 1979).
    statsmodels' `multipletests` is the same, and needs statsmodels."""
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(values[order] * np.arange(values.size, 0, -1)))
    return adjusted


def verdict(interval: Interval, margin: float, *, p: float, p_within: float) -> Verdict:
    """The word of a comparison (rule: this file's docstring); both p are adjusted for their families."""
    if p < ALPHA and (interval.low > 0 or interval.high < 0):
        return "better" if interval.low > 0 else "worse"
    # A difference that the family cannot bear may still be shown to be small.
    inside = -margin < interval.low and interval.high < margin
    return "equivalent" if inside and p_within < ALPHA else "inconclusive"


def judge(
    family: Mapping[Name, tuple[Sequence[np.ndarray], Sequence[np.ndarray]]],
    *,
    margin: float,
    resamples: int = 5000,
) -> dict[Name, Comparison]:
    """Compare pairs of policies on the same items, and judge them together as one family.

    Args:
        family: Name -> scores of the policy and of its baseline, higher is better: one array per stratum
            (task), one number per item, points of 100, the items of both in the same order, which changes no
            result.
        margin: Largest difference that does not matter, in points, > 0, stated before the run.
        resamples: Of the sign-flip tests; more where the family is so large that fewer could not pass.

    Raises:
        ValueError: If scores do not pair up, or are no points of 100.

    Examples:
        >>> right, wrong = [np.full(40, 100.0)], [np.zeros(40)]
        >>> judge({"a": (right, wrong)}, margin=2.0)["a"].verdict
        'better'
    """
    enough = max(resamples, math.ceil(4 * len(family) / ALPHA))
    differences = [_differences(*pair) for pair in family.values()]
    intervals = map(paired_interval, differences)
    flips = holm([sign_flip(one, resamples=enough) for one in differences]).tolist()
    bounds = holm([p_within(one, margin) for one in differences]).tolist()
    return {
        name: Comparison(interval, p, within, len(family), verdict(interval, margin, p=p, p_within=within))
        for name, interval, p, within in zip(family, intervals, flips, bounds, strict=True)
    }


def _differences(policy: Sequence[np.ndarray], baseline: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Differences per stratum, sorted, so that no sum depends on the order of the items."""
    sizes = [[stratum.size for stratum in side] for side in (policy, baseline)]
    if sizes[0] != sizes[1] or 0 in (sizes[0] or [0]):
        raise ValueError(f"Paired scores need the same items on both sides, got {sizes[0]} and {sizes[1]}.")
    highest = float(np.abs(np.concatenate([*policy, *baseline])).max())
    if not highest <= WORST * (1 + 1e-9):
        raise ValueError(f"Scores are points of {WORST:g}, got {highest:g}.")
    # Equal scores that were computed in two ways may differ in their last bit.
    pairs = zip(policy, baseline, strict=True)
    return [np.sort(np.where(np.abs(a - b) <= ROUNDING * highest, 0.0, a - b)) for a, b in pairs]
