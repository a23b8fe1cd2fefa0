"""Tests paired differences: the statistics and p values beside an interval in a table.

Every function takes differences per cluster (policy minus baseline, `eval/stats/clusters.py`) and wraps one
call of scipy or statsmodels; drawn sign flips are our own, since scipy tosses them item by item. The tests do
not ask the same question. The sign-flip test is about the mean difference, which is what the interval shows
and what a verdict rests on. Wilcoxon's is about ranks: it can be significant where the mean difference is
nil. TOST asks whether the mean difference is small; papers print it, and it believes the spread that it sees,
so that "equivalent" rests on `retain.eval.stats.not_worse` and not on it.

Differences that are all zero give no NaN. Two policies that answer alike on every item do happen, so each
test then says p = 1 ("nothing to test") under its own name. TOST does so wherever nothing varies, inside the
margin or not: a spread of zero is no evidence, and a p of 0 would pass every family and leave the other
comparisons of it a smaller one. "identical" is a word of its own and needs no p.
"""

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from retain.eval.stats.significance import macro_mean, standard_error
from retain.process.extras import deferred, require

with deferred("eval", "scipy", what="a comparison's statistics"):
    from scipy import stats

# Of the sum of all absolute differences: drawn sums that are no further apart are one.
TIE = 1e-10


def _strata(differences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Check differences per stratum, in float64 and without NaN."""
    strata = [np.asarray(stratum, dtype=np.float64) for stratum in differences]
    if not strata or any(s.ndim != 1 or s.size == 0 or not np.isfinite(s).all() for s in strata):
        raise ValueError(
            f"A paired test needs at least one stratum, each one-dimensional, not empty and finite; got "
            f"shapes {[s.shape for s in strata]}. Pass one array of differences per task."
        )
    return strata


@dataclass(frozen=True)
class SignedRank:
    """Wilcoxon's signed-rank test.

    Attributes:
        statistic: W, the smaller of the two rank sums.
        p: Two-sided.
        zero_method: What became of zero differences.
        num_nonzero: Pairs that differ.
        method: How p was found: "exact" (no ties, no zeros, at most 50 pairs), "permutation" (all sign
            patterns, at most 13 pairs), "asymptotic" (normal, variance corrected for ties, no continuity
            correction) or "identical" (nothing differs).
    """

    statistic: float
    p: float
    zero_method: str
    num_nonzero: int
    method: Literal["exact", "permutation", "asymptotic", "identical"]


def signed_rank(differences: np.ndarray, *, zero_method: str = "wilcox") -> SignedRank:
    """Test whether paired differences are symmetric about zero: `W = min(sum of ranks of |d| where d > 0, the
    same where d < 0)`.

    Where many pairs are equal the treatment of zeros moves p by orders of magnitude, so it is part of the
    result: "wilcox" (Wilcoxon, *Individual Comparisons by Ranking Methods*, 1945) drops zeros before ranking;
    "pratt" (Pratt, *Remarks on Zeros and Ties in the Wilcoxon Signed Rank Procedures*, 1959) ranks them and
    then drops their ranks. Through `scipy.stats.wilcoxon`.

    Args:
        differences: One per cluster. Strata are pooled by the caller: ranks know no macro mean.
        zero_method: "wilcox" or "pratt".

    Returns:
        W, p and how they came about; W = 0 and p = 1 where no pair differs (scipy says nan).

    Example:
        >>> made = signed_rank(np.array([1.0, -2.0, 3.0, 4.0]))
        >>> made.statistic, made.p, made.method  # 2 * (empty, {1}, {2} of 16 sign patterns)
        (2.0, 0.375, 'exact')
    """
    if zero_method not in ("wilcox", "pratt"):
        raise ValueError(f"Unknown zero method {zero_method!r}: write 'wilcox' or 'pratt'.")
    (values,) = _strata([differences])
    nonzero = values[values != 0]
    if nonzero.size == 0:
        return SignedRank(0.0, 1.0, zero_method, 0, "identical")
    # scipy's own rule, spelt out: which of the three it took is then known, and the same in every release.
    tied = nonzero.size < values.size or np.unique(np.abs(nonzero)).size < nonzero.size
    method: Literal["exact", "permutation", "asymptotic"]
    if values.size <= 50 and not tied:
        method = "exact"
    else:
        method = "permutation" if values.size <= 13 else "asymptotic"
    if method == "permutation":
        statistic, p = _counted_ranks(values if zero_method == "pratt" else nonzero)
        return SignedRank(statistic, p, zero_method, int(nonzero.size), method)
    found = stats.wilcoxon(values, zero_method=zero_method, method=method)
    return SignedRank(float(found.statistic), float(found.pvalue), zero_method, int(nonzero.size), method)


def _counted_ranks(values: np.ndarray) -> tuple[float, float]:
    """W and its two-sided p over all sign patterns, ties and zeros as they are: the ranks of the positive
    ones sum to a number of halves, and the patterns that reach each are counted one rank at a time. scipy
    tries the patterns themselves, a second for twelve pairs."""
    halves = np.round(2 * stats.rankdata(np.abs(values))).astype(int)[values != 0]
    ways = np.ones(1)
    for rank in halves:
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    positive = int(halves[values[values != 0] > 0].sum())
    tails = ways[: positive + 1].sum(), ways[positive:].sum()
    return min(positive, int(halves.sum()) - positive) / 2, float(min(1.0, 2 * min(tails) / ways.sum()))


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
    All patterns are counted, through `scipy.stats.permutation_test(permutation_type="samples")`, when they
    are no more than `resamples`; otherwise `resamples` are drawn and `(count + 1) / (resamples + 1)` is used.

    Args:
        differences: One array per stratum, one number per cluster.
        resamples: Most patterns tried. The smallest p is about 2 / resamples, which a large family must
            be able to afford (`retain.eval.stats.paired_result.adjust` refuses where it cannot).
        seed: Of the drawn patterns.

    Returns:
        The p; 1 where nothing differs.
    """
    strata = _strata(differences)
    # Each difference in its share of the macro mean: their sum is the macro mean, whatever is flipped.
    shares = np.concatenate([stratum / (stratum.size * len(strata)) for stratum in strata])
    shares = shares[shares != 0]
    if shares.size == 0:
        return SignFlip(1.0, True, 0, 1)
    # Not `2 ** size`: with a thousand items that is beyond what a float holds.
    exact = shares.size <= math.log2(resamples)
    if shares.size == 1:  # scipy wants two observations; a single sign is + or -, as likely
        return SignFlip(1.0, True, 1, 2)
    spread = np.abs(shares).sum()

    def flipped_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
        # Patterns with the same mean count as such, whatever the order of their sum did to the last bits.
        return np.asarray(np.round(values.sum(axis=axis) / spread, 12))

    if not exact:
        drawn = _drawn_sums(shares / spread, resamples, np.random.default_rng(seed))
        found = shares.sum() / spread
        tails = [int(np.count_nonzero(drawn >= found - TIE)), int(np.count_nonzero(drawn <= found + TIE))]
        return SignFlip(min(1.0, 2 * (min(tails) + 1) / (resamples + 1)), False, int(shares.size), resamples)
    counted = stats.permutation_test(
        (shares,),
        flipped_mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=1000,
    )
    return SignFlip(float(counted.pvalue), True, int(shares.size), 2**shares.size)


def _drawn_sums(shares: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Sums of shares, of absolute values that sum to 1, whose signs were flipped by coin; `[resamples]`.

    Of the n shares of one size as many come out positive as heads of n coins, so that no coin is tossed for
    each: right or wrong answers have one size a task.
    """
    sizes = np.abs(shares)
    _, first, counts = np.unique(np.round(sizes, 15), return_index=True, return_counts=True)
    sums = np.zeros(resamples)
    for size, count in zip(sizes[first], counts, strict=True):
        sums += size * (2.0 * rng.binomial(count, 0.5, resamples) - count)
    return sums


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
    Sampling Error of the Difference between Correlated Proportions*, 1947; exact form). Through
    `statsmodels.stats.contingency_tables.mcnemar(exact=True)`.

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
    counts = [[int(((a == i) & (b == j)).sum()) for j in (1, 0)] for i in (1, 0)]
    (both, only_policy), (only_baseline, neither) = counts
    p = 1.0
    if only_policy + only_baseline:
        with require("eval", "statsmodels", what="a comparison's statistics"):
            from statsmodels.stats.contingency_tables import mcnemar
        p = min(1.0, float(mcnemar(counts, exact=True).pvalue))
    return ExactBinary(only_policy, only_baseline, both, neither, p)


@dataclass(frozen=True)
class ExactRate:
    """A success rate with Clopper and Pearson's exact interval, and the exact test against a stated rate."""

    rate: float
    low: float
    high: float
    level: float
    p: float


def exact_binomial(successes: int, trials: int, *, expected: float = 0.5, level: float = 0.95) -> ExactRate:
    """A rate of successes, exactly: p of `X ~ Binomial(trials, expected)` being as unlikely as this, and the
    interval of Clopper and Pearson (*The Use of Confidence or Fiducial Limits*, 1934).

    For one policy alone: needles found of needles planted, or a multiple choice against guessing. Through
    `scipy.stats.binomtest`.

    Args:
        successes: Successes, 0 to trials.
        trials: Independent trials, >= 1: clusters, not repeated samples of one problem.
        expected: The rate tested against, in [0, 1]; 0.25 is guessing among four.
        level: Coverage of the interval.
    """
    if not 0 <= successes <= trials or trials < 1 or not 0 <= expected <= 1:
        raise ValueError(
            f"exact_binomial needs 0 <= successes <= trials, trials >= 1 and an expected rate in [0, 1]; got "
            f"{successes} of {trials} against {expected}."
        )
    found = stats.binomtest(successes, trials, expected)
    interval = found.proportion_ci(confidence_level=level, method="exact")
    return ExactRate(
        successes / trials, float(interval.low), float(interval.high), level, float(found.pvalue)
    )


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided t tests of the macro-mean difference against a margin.

    Attributes:
        p: The larger of the two: small says that the difference is inside (-margin, +margin). 1 where there
            is no spread to judge by.
        p_lower: Of `difference <= -margin`: small says "not worse by the margin" (non-inferiority).
        p_upper: Of `difference >= +margin`: small says "not better by the margin".
        margin: As stated, in the unit of the differences.
        df: Degrees of freedom; 0 where there is no spread to judge by.
    """

    p: float
    p_lower: float
    p_upper: float
    margin: float
    df: float


def equivalence(differences: Sequence[np.ndarray], margin: float) -> Equivalence:
    """TOST: show that a mean difference is smaller than a margin in both directions.

    `t_lower = (m + margin) / se`, `t_upper = (m - margin) / se`, `p = max(P(t >= t_lower), P(t <= t_upper))`
    (Schuirmann, *A Comparison of the Two One-Sided Tests Procedure and the Power Approach*, 1987). One
    stratum goes through `statsmodels.stats.weightstats.ttost_paired` and has n - 1 degrees of freedom. For
    the macro mean of several strata, which it does not know, `se = sqrt(sum_k v_k) / K`, `v_k = var_k / n_k`,
    and the degrees of freedom are Welch and Satterthwaite's, `(sum_k v_k)^2 / sum_k(v_k^2 / (n_k - 1))`.

    Args:
        differences: One array per stratum, one number per cluster.
        margin: Largest difference that does not matter, > 0, stated before the run.

    Returns:
        The p of both tests. Non-inferiority is `p_lower` alone. All three are 1 where there is no spread to
        judge by: where nothing varies within any stratum, zeros included, and where any stratum holds a
        single cluster.
    """
    strata = _strata(differences)
    if not margin > 0:
        raise ValueError(f"The margin of equivalence must be positive, got {margin}; 0.02 of F1 is usual.")
    if any(stratum.size == 1 for stratum in strata) or all(np.ptp(stratum) == 0 for stratum in strata):
        return Equivalence(1.0, 1.0, 1.0, margin, 0.0)
    if len(strata) == 1:
        with require("eval", "statsmodels", what="a comparison's statistics"):
            from statsmodels.stats.weightstats import ttost_paired
        (only,) = strata
        p, (_, p_lower, df), (_, p_upper, _) = ttost_paired(only, np.zeros_like(only), -margin, margin)
        return Equivalence(float(p), float(p_lower), float(p_upper), margin, float(df))
    mean, error = float(macro_mean(*strata)), standard_error(strata)
    parts = np.array([np.var(stratum, ddof=1) / stratum.size for stratum in strata])
    freedom = np.array([stratum.size - 1 for stratum in strata])
    df = float(parts.sum() ** 2 / (parts**2 / freedom).sum())
    p_lower = float(stats.t.sf((mean + margin) / error, df))
    p_upper = float(stats.t.cdf((mean - margin) / error, df))
    return Equivalence(max(p_lower, p_upper), p_lower, p_upper, margin, df)


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Adjust the p values of a family by Holm's step-down method: the i-th smallest of m becomes
    `max_{j <= i} min(1, (m - j + 1) * p_(j))`, so that "adjusted p < alpha" for any of them is wrong with a
    probability of at most alpha (Holm, *A Simple Sequentially Rejective Multiple Test Procedure*, 1979).

    Through `statsmodels.stats.multitest.multipletests(method="holm")`, whose default is another method
    (Holm-Sidak, which assumes more).

    Args:
        p_values: All p values of the family, as declared before the run.

    Returns:
        Adjusted p values, in the same order.
    """
    values = np.asarray(p_values, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"Holm's method needs at least one p value, all in [0, 1]; got {values.tolist()}.")
    with require("eval", "statsmodels", what="a comparison's statistics"):
        from statsmodels.stats.multitest import multipletests
    # It collects garbage in every call, half a second where torch is loaded; what is frozen is not searched.
    gc.freeze()
    try:
        return np.asarray(multipletests(values, method="holm")[1])
    finally:
        gc.unfreeze()
