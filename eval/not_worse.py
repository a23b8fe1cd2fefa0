"""Paired differences and a margin in; whether a policy is shown to be not worse by that margin out, for one
comparison and for a family of them.

Not worse means that the lower end of the paired 95 % interval of the macro-mean difference lies above
-margin. Seen as a test, that end is above -margin exactly where the one-sided test of "the mean difference is
-margin or less" rejects at 2.5 %, and it is this test whose p values Holm's method adjusts.

The one decision taken here is what is said where no item was lost. A t test knows the spread only from what
it has seen, and policies that agree on every item show none: it then says nothing, or all too much. What n
items without a loss do show is known exactly (the "rule of three"), so that is what is used there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize, stats

from retain.eval.paired_tests import equivalence, holm
from retain.eval.significance import macro_mean, standard_error

# One side of a 95 % interval.
ONE_SIDED = 0.025
# The most that one item can lose, in points.
WORST = 100.0
# No p is said to be smaller.
SMALLEST = 1e-290


@dataclass(frozen=True)
class NotWorse:
    """The test of one macro-mean difference against -margin.

    Attributes:
        p: One-sided, of `difference <= -margin`; 1 where there is no spread to judge by.
        margin: As stated, in the unit of the differences.
        method: "t", or "no item lost".
        estimate: Macro mean of the differences.
        error: Its standard error.
        df: Degrees of freedom of t; 0 where there is no spread to judge by.
        loss: Of "no item lost", what the rule of three is in units of: `WORST / (K * min_k n_k)`.
    """

    p: float
    margin: float
    method: Literal["t", "no item lost"]
    estimate: float
    error: float
    df: float
    loss: float = math.nan

    def end(self, alpha: float) -> float:
        """Lower end of the one-sided interval at level `1 - alpha`: above -margin exactly where `p < alpha`.

        Args:
            alpha: In (0, 1].
        """
        if self.method == "t":
            return _t_end(self.estimate, self.error, self.df, alpha)
        return _lossless_end(self.estimate, self.error, self.df, self.loss, alpha)


def _t_end(estimate: float, error: float, df: float, alpha: float) -> float:
    return -math.inf if df == 0 else estimate - float(stats.t.isf(alpha, df)) * error


def _lossless_end(estimate: float, error: float, df: float, loss: float, alpha: float) -> float:
    if estimate == 0:
        return loss * math.log(alpha)
    # Half of alpha for losses that were not seen, half for wins that were seen by luck.
    return loss * math.log(alpha / 2) + max(0.0, _t_end(estimate, error, df, alpha / 2))


def not_worse(differences: Sequence[np.ndarray], margin: float) -> NotWorse:
    """Test that a macro-mean difference lies above -margin.

    Where any item was lost it is the lower of the two tests of TOST (`retain.eval.paired_tests.equivalence`),
    `t = (m + margin) / se`, `p = P(T_df >= t)`, and the end is `m - t_{1-alpha} * se`.

    Where none was (every difference is 0 or more), with K strata of n_k clusters, q_k the probability that an
    item of stratum k is lost, and at most `WORST` points to lose: losses take at most
    `x = WORST * mean_k q_k` off the mean, and none is seen with a probability of at most

        prod_k (1 - q_k)^(n_k) <= exp(-min_k n_k * sum_k q_k) = exp(-x / loss)
        loss = WORST / (K * min_k n_k)

    So at level `1 - alpha` they take off no more than `-loss * log(alpha)`; at K = 1 and alpha = 0.05 that is
    the rule of three: no loss among n bounds its rate by 3 / n (Hanley and Lippman-Hand, *If Nothing Goes
    Wrong, Is Everything All Right?*, 1983). The lower end is

        loss * log(alpha)                                              where all agree on every item
        loss * log(alpha / 2) + max(0, m - t_{1-alpha/2} * se)         where some were won

    (what is not lost is 0 or more, and m estimates it: Bonferroni over the two), and p is the alpha at which
    the end is -margin.

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
        return NotWorse(made.p_lower, margin, "t", estimate, error, df)
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
