"""Tests paired differences: the statistics and p values beside an interval in a table.

Every function takes differences per cluster, policy minus baseline. The tests do not ask the same question.
The sign-flip test is about the mean difference, which is what the interval shows and what a verdict rests on.
Wilcoxon's is about ranks: it can be significant where the mean difference is nil. McNemar's test and Holm's
are statsmodels' to the last digit, which tests hold; they stand here because its Holm collects garbage in
every call (half a second beside torch).

Differences that are all zero give no NaN. Two policies that answer alike on every item do happen, so each
test then says p = 1 ("nothing to test") under its own name; "identical" is a word of its own and needs no p.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from retain.eval.stats.significance import checked_strata
from retain.process.extras import deferred

with deferred("eval", "scipy", what="a comparison's statistics"):
    from scipy import stats

# Of the sum of all absolute differences: sums that are no further apart are one.
TIE = 1e-10


@dataclass(frozen=True)
class SignedRank:
    """Wilcoxon's signed-rank test.

    Attributes:
        statistic: W, the smaller of the two rank sums.
        p: Two-sided.
        num_nonzero: Pairs that differ.
        method: How p was found: "exact" (no ties, no zeros, at most 50 pairs), "permutation" (all sign
            patterns, at most 13 pairs), "asymptotic" (normal, variance corrected for ties, no continuity
            correction) or "identical" (nothing differs).
    """

    statistic: float
    p: float
    num_nonzero: int
    method: Literal["exact", "permutation", "asymptotic", "identical"]


def signed_rank(differences: np.ndarray) -> SignedRank:
    """Test whether paired differences are symmetric about zero: `W = min(sum of ranks of |d| where d > 0, the
    same where d < 0)`.

    Zeros are dropped before ranking (Wilcoxon, *Individual Comparisons by Ranking Methods*, 1945). Through
    `scipy.stats.wilcoxon`; of few pairs with ties all patterns are counted here, for which scipy takes a
    second.

    Args:
        differences: One per cluster. Strata are pooled by the caller: ranks know no macro mean.

    Returns:
        W, p and how they came about; W = 0 and p = 1 where no pair differs (scipy says nan).

    Examples:
        >>> made = signed_rank(np.array([1.0, -2.0, 3.0, 4.0]))
        >>> made.statistic, made.p, made.method  # 2 * (empty, {1}, {2} of 16 sign patterns)
        (2.0, 0.375, 'exact')
    """
    (values,) = checked_strata([differences], "signed_rank")
    nonzero = values[values != 0]
    count = int(nonzero.size)
    if not count:
        return SignedRank(0.0, 1.0, 0, "identical")
    # scipy's own rule, spelt out: which of the three it took is then known, and the same in every release.
    tied = count < values.size or np.unique(np.abs(nonzero)).size < count
    if values.size <= 13 and tied:
        ranks = np.sign(nonzero) * stats.rankdata(np.abs(nonzero))
        statistic = min(ranks[ranks > 0].sum(), -ranks[ranks < 0].sum())
        return SignedRank(float(statistic), _counted_p(ranks), count, "permutation")
    method: Literal["exact", "asymptotic"] = "exact" if values.size <= 50 and not tied else "asymptotic"
    found = stats.wilcoxon(values, zero_method="wilcox", method=method)
    return SignedRank(float(found.statistic), float(found.pvalue), count, method)


def _counted_p(values: np.ndarray) -> float:
    """Two-sided p of a sum, `2 * min(P(S >= s), P(S <= s))` at most 1, over all patterns of the signs."""
    size, sums = np.abs(values).sum(), np.zeros(1)
    for value in values / size:
        sums = np.concatenate([sums + value, sums - value])
    return min(1.0, 2 * _as_extreme(sums, values.sum() / size) / sums.size)


def _as_extreme(sums: np.ndarray, found: float) -> int:
    """Number of sums that reach the found one, on the side where they are fewer; sums that differ in their
    last bits are one."""
    return int(min(np.count_nonzero(sums >= found - TIE), np.count_nonzero(sums <= found + TIE)))


@dataclass(frozen=True)
class SignFlip:
    """A sign-flip permutation test of the macro-mean difference.

    Attributes:
        p: Two-sided.
        exact: True when all `2 ** num_nonzero` patterns were counted.
        num_nonzero: Clusters that differ; the others have no sign to flip.
        resamples: Patterns counted or drawn.
    """

    p: float
    exact: bool
    num_nonzero: int
    resamples: int

    @property
    def smallest_p(self) -> float:
        """The smallest p that this number of patterns can give."""
        return min(1.0, 2 / self.resamples if self.exact else 2 / (self.resamples + 1))


def sign_flip(differences: Sequence[np.ndarray], *, resamples: int = 9999, seed: int = 0) -> SignFlip:
    """Test whether the macro-mean difference is zero, by flipping the sign of each cluster's difference:
    `p = 2 * min(P(m* >= m), P(m* <= m))`, `m = (1/K) * sum_k mean_i d_ki`.

    It assumes that, were the policies alike, each difference would be as likely to have the other sign.
    All patterns are counted when they are no more than `resamples`; otherwise `resamples` are drawn and
    `(count + 1) / (resamples + 1)` is used. Of the n differences of one size as many are drawn positive as
    heads of n coins, so that no coin is tossed for each (scipy does): right or wrong answers have one size a
    task.

    Args:
        differences: One array per stratum, one number per cluster.
        resamples: Most patterns tried. The smallest p is about 2 / resamples, which a large family must
            be able to afford (`retain.eval.stats.paired_result.adjust` refuses where it cannot).
        seed: Of the drawn patterns.

    Returns:
        The p; 1 where nothing differs.
    """
    strata = checked_strata(differences, "sign_flip")
    # Each difference in its share of the macro mean: their sum is the macro mean, whatever is flipped.
    shares = np.concatenate([stratum / (stratum.size * len(strata)) for stratum in strata])
    shares = shares[shares != 0]
    if not shares.size:
        return SignFlip(1.0, True, 0, 1)
    # Not `2 ** size`: with a thousand items that is beyond what a float holds.
    if shares.size == 1 or shares.size <= math.log2(resamples):
        return SignFlip(_counted_p(shares), True, int(shares.size), 2**shares.size)
    rng, shares = np.random.default_rng(seed), shares / np.abs(shares).sum()
    sizes = np.abs(shares)
    _, first, counts = np.unique(np.round(sizes, 15), return_index=True, return_counts=True)
    drawn = np.zeros(resamples)
    for size, count in zip(sizes[first], counts, strict=True):
        drawn += size * (2.0 * rng.binomial(count, 0.5, resamples) - count)
    p = min(1.0, 2 * (_as_extreme(drawn, shares.sum()) + 1) / (resamples + 1))
    return SignFlip(p, False, int(shares.size), resamples)


@dataclass(frozen=True)
class ExactBinary:
    """Exact McNemar test of two policies whose scores are 0 or 1.

    Attributes:
        only_policy: Items that only the policy gets right.
        only_baseline: Items that only the baseline gets right.
        both: Items that both get right.
        neither: Items that neither gets right.
        p: Two-sided; 1 where the two never disagree.
    """

    only_policy: int
    only_baseline: int
    both: int
    neither: int
    p: float


def exact_mcnemar(policy: np.ndarray, baseline: np.ndarray) -> ExactBinary:
    """Test whether two policies are right equally often: `p = min(1, 2 * P(X <= min(b, c)))`,
    `X ~ Binomial(b + c, 1/2)`, with b and c the items that only one of the two gets right.

    It is the sign-flip test of 0/1 scores, counted exactly at any number of items (McNemar, *Note on the
    Sampling Error of the Difference between Correlated Proportions*, 1947; exact form).

    Args:
        policy: 0 or 1 per cluster (exact match, needle found).
        baseline: The same for the baseline, same order.

    Raises:
        ValueError: If lengths differ or a score is neither 0 nor 1.
    """
    a, b = np.asarray(policy, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not a.size or not np.isin(np.concatenate([a, b]), (0, 1)).all():
        raise ValueError(
            f"McNemar's test needs two equally long rows of 0 and 1, got shapes {a.shape} and {b.shape}, "
            f"values {np.unique(np.concatenate([a.ravel(), b.ravel()]))[:5].tolist()}. Use sign_flip for "
            "scores that are not binary."
        )
    only_policy, only_baseline = int((a > b).sum()), int((a < b).sum())
    both = int((a * b).sum())
    differ = only_policy + only_baseline
    p = min(1.0, float(2 * stats.binom.cdf(min(only_policy, only_baseline), differ, 0.5)))
    return ExactBinary(only_policy, only_baseline, both, a.size - both - differ, p)


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Adjust the p values of a family by Holm's step-down method: the i-th smallest of m becomes
    `max_{j <= i} min(1, (m - j + 1) * p_(j))`, so that "adjusted p < alpha" for any of them is wrong with a
    probability of at most alpha (Holm, *A Simple Sequentially Rejective Multiple Test Procedure*, 1979).

    Args:
        p_values: All p values of the family, as declared before the run.

    Returns:
        Adjusted p values, in the same order.
    """
    values = np.asarray(p_values, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"Holm's method needs at least one p value, all in [0, 1]; got {values.tolist()}.")
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(values[order] * np.arange(values.size, 0, -1)))
    return adjusted
