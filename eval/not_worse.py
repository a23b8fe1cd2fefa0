"""Paired differences and a margin in; whether a policy is shown to be not worse by that margin out, for one
comparison and for a family of them.

Not worse means that the lower end of the paired 95 % interval of the macro-mean difference lies above
-margin. Seen as a test, that end is above -margin exactly where the one-sided test of "the mean difference is
-margin or less" rejects at 2.5 %, and it is this test whose p values Holm's method adjusts.

The one decision taken here is what is said where few items were lost, or none. A t test knows the spread only
from what it has seen, and policies that agree on almost every item show almost none: it then says nothing, or
all too much. What n items without a loss do show is known exactly (the "rule of three"), so that is used
there; and where some were lost, t is believed no further than the spread that a loss of the whole margin
would have: one more lost item never speaks for a policy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from retain.eval.paired_tests import equivalence, holm
from retain.eval.significance import macro_mean, standard_error
from retain.extras import deferred

with deferred("eval", "scipy", what="a comparison's statistics"):
    from scipy import optimize, stats

# One side of a 95 % interval.
ONE_SIDED = 0.025
# The most that one item can lose, in points.
WORST = 100.0
# No p is said to be smaller.
SMALLEST = 1e-290


@dataclass(frozen=True)
class Spread:
    """What the spread would be if the margin were lost: of each stratum what was seen, and what would be.

    Attributes:
        variances: Of the differences of each stratum, as seen.
        won, lost: Share of each stratum's items above and below 0.
        sizes: Clusters of each stratum.
    """

    variances: np.ndarray
    won: np.ndarray
    lost: np.ndarray
    sizes: np.ndarray

    @property
    def half_step(self) -> float:
        """Half of what one item more or less does to the mean."""
        return WORST / 2 / (self.sizes.size * float(self.sizes.min()))

    def error(self, margin: float) -> float:
        """Standard error of the macro mean at a true difference of -margin, `not_worse` has its formula."""
        lost = np.clip(np.maximum(self.lost, self.won + margin / WORST), 0.0, 1.0)
        own = WORST**2 * (self.won + lost - (lost - self.won) ** 2)
        return math.sqrt(float((np.maximum(self.variances, own) / self.sizes).sum())) / self.sizes.size

    def p(self, estimate: float, margin: float) -> float:
        """One-sided, of `difference <= -margin`."""
        return float(stats.norm.sf((estimate + margin - self.half_step) / self.error(margin)))

    def end(self, estimate: float, alpha: float) -> float:
        """The -margin at which `p` is alpha."""
        if alpha >= 1:
            return math.inf
        z = float(stats.norm.isf(alpha))
        middle = self.half_step - estimate
        most = math.sqrt(float((np.maximum(self.variances, WORST**2) / self.sizes).sum())) / self.sizes.size
        # p falls with the margin: below `middle` it is above a half, and no spread is larger than `most`.
        low, high = sorted((middle, middle + 1.001 * z * most))
        if low == high:
            return -middle
        return -float(
            optimize.brentq(lambda own: estimate + own - self.half_step - z * self.error(own), low, high)
        )


@dataclass(frozen=True)
class NotWorse:
    """The test of one macro-mean difference against -margin.

    Attributes:
        p: One-sided, of `difference <= -margin`; 1 where there is no spread to judge by.
        margin: As stated, in the unit of the differences.
        method: "t", where items were lost, or "no item lost".
        estimate: Macro mean of the differences.
        error: Its standard error.
        df: Degrees of freedom of t; 0 where there is no spread to judge by.
        loss: Of "no item lost", what the rule of three is in units of: `WORST / (K * min_k n_k)`.
        spread: Of "t", what it is believed no further than; None: t alone.
        tied: Of "t", the test of the same items with those that were lost as ties.
    """

    p: float
    margin: float
    method: Literal["t", "no item lost"]
    estimate: float
    error: float
    df: float
    loss: float = math.nan
    spread: Spread | None = None
    tied: "NotWorse | None" = None

    def end(self, alpha: float) -> float:
        """Lower end of the one-sided interval at level `1 - alpha`: above -margin exactly where `p < alpha`.

        Args:
            alpha: In (0, 1].
        """
        if self.method == "t":
            ends = [_t_end(self.estimate, self.error, self.df, alpha)]
            ends += [] if self.spread is None else [self.spread.end(self.estimate, alpha)]
            return min(ends + ([] if self.tied is None else [self.tied.end(alpha)]))
        return _lossless_end(self.estimate, self.error, self.df, self.loss, alpha)


def _t_end(estimate: float, error: float, df: float, alpha: float) -> float:
    return -math.inf if df == 0 else estimate - float(stats.t.isf(alpha, df)) * error


def _lossless_end(estimate: float, error: float, df: float, loss: float, alpha: float) -> float:
    if estimate == 0:
        return loss * math.log(alpha)
    # Wins ignored; or half of alpha for losses that were not seen, half for wins that were seen by luck.
    with_wins = loss * math.log(alpha / 2) + max(0.0, _t_end(estimate, error, df, alpha / 2))
    return max(loss * math.log(alpha), with_wins)


def not_worse(differences: Sequence[np.ndarray], margin: float) -> NotWorse:
    """Test that a macro-mean difference lies above -margin.

    Where any item was lost, p is the largest of three, and the end the lowest of theirs. One is what would be
    said if the lost items had been ties, as below. One is the lower of the two tests of TOST
    (`retain.eval.paired_tests.equivalence`), `t = (m + margin) / se`, `p = P(T_df >= t)`, with the end
    `m - t_{1-alpha} * se`. The third knows what the margin says of the spread: with w_k and l_k the shares of
    stratum k that were won and lost, v_k the variance seen, a true loss of the margin needs a share of `l0_k`
    lost, and has at least the spread of so many steps of `WORST` points (the variance under the hypothesis,
    as a score test takes it):

        l0_k = max(l_k, w_k + margin / WORST)
        v0_k = max(v_k, WORST^2 * (w_k + l0_k - (l0_k - w_k)^2))
        p_0  = P(Z >= (m + margin - WORST / (2 K min_k n_k)) / (sqrt(sum_k v0_k / n_k) / K))

    (half a step of the mean for its being discrete). Where many items differ, p is that of t or close to it;
    scores between 0 and 1 have smaller steps than these, and p_0 is then too large, never too small.

    Where none was (every difference is 0 or more), with K strata of n_k clusters, q_k the probability that an
    item of stratum k is lost, and at most `WORST` points to lose: losses take at most
    `x = WORST * mean_k q_k` off the mean, and none is seen with a probability of at most

        prod_k (1 - q_k)^(n_k) <= exp(-min_k n_k * sum_k q_k) = exp(-x / loss)
        loss = WORST / (K * min_k n_k)

    So at level `1 - alpha` they take off no more than `-loss * log(alpha)`; at K = 1 and alpha = 0.05 that is
    the rule of three: no loss among n bounds its rate by 3 / n (Hanley and Lippman-Hand, *If Nothing Goes
    Wrong, Is Everything All Right?*, 1983). The lower end is

        loss * log(alpha)                                              where all agree on every item
        loss * log(alpha / 2) + max(0, m - t_{1-alpha/2} * se)         where some were won, if that is higher

    (what is not lost is 0 or more, and m estimates it: Bonferroni over the two; which of the two ends is
    above -margin without wins follows from the number of items alone, so that neither costs the other), and
    p is the alpha at which the end is -margin.

    Args:
        differences: One array per stratum (task), one number per cluster, in points of 100: policy minus
            baseline.
        margin: Largest loss that would not matter, in points, > 0, stated before the run.

    Raises:
        ValueError: If there is no stratum, an empty one, a nan, or the margin is not positive.
    """
    made = equivalence(differences, margin)
    strata = [np.asarray(stratum, dtype=np.float64) for stratum in differences]
    estimate, df = float(macro_mean(*strata)), made.df
    error = standard_error(strata) if df else math.inf
    if any((stratum < 0).any() for stratum in strata):
        if not df:
            return NotWorse(made.p_lower, margin, "t", estimate, error, df)
        spread = Spread(
            np.array([stratum.var(ddof=1) if stratum.size > 1 else 0.0 for stratum in strata]),
            np.array([(stratum > 0).mean() for stratum in strata]),
            np.array([(stratum < 0).mean() for stratum in strata]),
            np.array([stratum.size for stratum in strata], dtype=np.float64),
        )
        tied = not_worse([np.maximum(stratum, 0.0) for stratum in strata], margin)
        p = max(made.p_lower, spread.p(estimate, margin), tied.p)
        return NotWorse(p, margin, "t", estimate, error, df, spread=spread, tied=tied)
    loss = WORST / (len(strata) * min(stratum.size for stratum in strata))
    p = math.exp(-margin / loss)
    if estimate > 0:
        p = _crossing(lambda alpha: _lossless_end(estimate, error, df, loss, alpha) + margin)
    return NotWorse(p, margin, "no item lost", estimate, error, df, loss)


def _crossing(above: Callable[[float], float]) -> float:
    """The alpha at which a rising function is 0, between the smallest alpha that floats tell apart and 1."""
    if above(1.0) <= 0:
        return 1.0
    if above(SMALLEST) >= 0:
        return SMALLEST
    log_alpha = optimize.brentq(lambda x: above(math.exp(x)), math.log(SMALLEST), 0.0)
    return math.exp(float(log_alpha))


@dataclass(frozen=True)
class Step:
    """One comparison within its family.

    Attributes:
        p: Holm-adjusted; below alpha exactly where `end` is above -margin.
        alpha: The level at which Holm's method stood when it came to this comparison.
        end: The lower end at that level.
    """

    p: float
    alpha: float
    end: float


def step_down(family: Sequence[NotWorse], alpha: float = ONE_SIDED) -> list[Step]:
    """Adjust a family of one-sided tests by Holm's method, and the lower ends with them.

    With m tests ordered by p, the i-th is tested at `alpha / (m - i + 1)`, until one, the j-th, does not
    pass: all later ones stay at its level, `alpha / (m - j + 1)`. A test's adjusted lower end is that of its
    own level, so that end and adjusted p never disagree (Holm, *A Simple Sequentially Rejective Multiple Test
    Procedure*, 1979). Ends of the comparisons that pass are not simultaneous bounds beyond "above -margin".

    Args:
        family: All tests that were declared.
        alpha: One-sided level of the family.

    Returns:
        One step for each test, in the order given.
    """
    if not family:
        return []
    adjusted = holm([one.p for one in family])
    levels = np.empty(len(family))
    level, stopped = alpha / len(family), False
    for rank, place in enumerate(np.argsort([one.p for one in family], kind="stable")):
        if not stopped:
            level = alpha / (len(family) - rank)
            stopped = not family[place].p < level
        levels[place] = level
    return [
        Step(float(p), float(own), one.end(float(own)))
        for one, p, own in zip(family, adjusted, levels, strict=True)
    ]
