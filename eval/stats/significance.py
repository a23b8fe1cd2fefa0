"""Computes the interval of a paired difference, and its verdict.

Both policies answered the same items, so the unit is the difference per item. A task is a stratum and
the estimate is the *macro* mean, the mean over tasks of each task's mean difference: a task with more items
does not count for more. Within a task the items vary; every (seed, item) pair is one cluster, since each
model seed has items of its own. Seeds do not: three are too few to say anything about the seeds that were
never trained, so every interval is conditional on the seeds at hand, and the report prints the spread over
them beside it.

A stratum of one cluster says nothing about its own spread, and with it neither does the macro mean: such a
comparison has no interval ("undefined", from -inf to +inf) and is inconclusive, unless the policies agree on
every item. "Not significant" is never printed as "equal" (`verdict`): equality has to be shown against a
stated margin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from retain.process.extras import deferred

with deferred("eval", "scipy", what="a comparison's statistics"):
    from scipy import special

Verdict = Literal["better", "worse", "equivalent", "inconclusive", "identical", "unjudged"]
Method = Literal["t", "constant", "undefined"]

# A stratum's spread is at least that of its items and so many more of the spread that all strata share.
BORROWED = 3.0


@dataclass(frozen=True)
class Interval:
    """A macro-mean difference with its paired interval, in the unit of the differences.

    Attributes:
        estimate: Mean over strata of the stratum's mean difference.
        low, high: Ends. Equal to `estimate` where the policies agree on every item; infinite without one.
        level: Coverage, 0.95 for a 95 % interval.
        method: "t", "constant" (nothing varies) or "undefined" (a stratum of one cluster).
        num_items: Clusters over all strata.
        num_nonzero: Clusters on which the two policies differ.
    """

    estimate: float
    low: float
    high: float
    level: float
    method: Method
    num_items: int
    num_nonzero: int

    @property
    def identical(self) -> bool:
        """True when the policies agree on every single item."""
        return self.num_nonzero == 0

    @property
    def undefined(self) -> bool:
        """True where the estimate has no interval."""
        return self.method == "undefined"

    def spelled(self, decimals: int = 1) -> str:
        """Both ends with their signs, "[+0.3, +1.2]", or "no interval"."""
        if self.undefined:
            return "no interval"
        return f"[{self.low:+.{decimals}f}, {self.high:+.{decimals}f}]"


def macro_mean(*strata: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean over strata of each stratum's mean: `(1/K) * sum_k mean_i d_ki`."""
    return np.asarray(sum(np.mean(stratum, axis=axis) for stratum in strata) / len(strata))


def checked_strata(differences: Sequence[np.ndarray], name: str) -> list[np.ndarray]:
    """Strata in float64, each one-dimensional, not empty and finite.

    Raises:
        ValueError: One is not, or there is none; it names `name`, the function that was called.
    """
    strata = [np.asarray(stratum, dtype=np.float64) for stratum in differences]
    if not strata or any(stratum.ndim != 1 or stratum.size == 0 for stratum in strata):
        raise ValueError(
            f"{name} needs at least one stratum, each one-dimensional with at least one number; got shapes "
            f"{[stratum.shape for stratum in strata]}. Pass one array of per-item numbers per task."
        )
    bad = [place for place, stratum in enumerate(strata) if not np.isfinite(stratum).all()]
    if bad:
        raise ValueError(
            f"{name} needs finite numbers, and the strata at positions {bad} hold a nan or an infinity. "
            "Count a crashed or empty answer as 0 and list it as a null."
        )
    return strata


def checked_margin(margin: float) -> float:
    """The margin of equivalence.

    Raises:
        ValueError: It is not above 0.
    """
    if not margin > 0:
        raise ValueError(
            f"The margin of equivalence must be positive, got {margin}; 2 points (0.02 of F1) is usual."
        )
    return margin


def welch(strata: Sequence[np.ndarray], variances: np.ndarray) -> tuple[float, float]:
    """Standard error of a macro mean, `sqrt(sum_k v_k) / K`, and the degrees of freedom of Welch and
    Satterthwaite, `(sum_k v_k)^2 / sum_k(v_k^2 / (n_k - 1))`.

    Args:
        strata: Of two clusters or more each.
        variances: v_k, the variance of each stratum's mean, `[K]`.
    """
    freedom = np.array([stratum.size - 1 for stratum in strata])
    df = variances.sum() ** 2 / (variances**2 / freedom).sum()
    return math.sqrt(variances.sum()) / len(strata), float(df)


def standard_error(scores: Sequence[np.ndarray]) -> float:
    """Standard error of a macro mean, `sqrt(sum_k var_k / n_k) / K`; inf where a stratum holds one cluster,
    of whose spread nothing is known."""
    strata = [np.asarray(stratum, dtype=np.float64) for stratum in scores]
    variance = sum(np.var(s, ddof=1) / s.size if s.size > 1 else math.inf for s in strata)
    return float(np.sqrt(variance)) / len(strata)


def paired_interval(differences: Sequence[np.ndarray], *, level: float = 0.95) -> Interval:
    """Interval of the macro mean of paired differences, stratified: Student's t, widened where the
    differences are skewed.

    With K strata of n_k clusters, mean m, its standard error, t the quantile at Welch's degrees of freedom
    (`welch`), and g the skewness of m:

        low  = m - error * max(t, h(t))          h(x) = 3 / g * ((1 + g * (x - g / 6))^(1/3) - 1)
        high = m + error * max(t, -h(-t))

    h is the interval of Hall, *On the Removal of Skewness by Transformation* (1992): where a few large
    differences lie on one side t ends too early on that side, and the wider of the two is taken at each end.
    `v_k = var_k / n_k`, and no var_k counts for less than with `BORROWED` items more of the spread that all
    strata have in common: four equal items do not show that a task has no spread. Bootstrap intervals (BCa,
    percentile) cover less than they say where most differences are 0, strata are small or clusters are few;
    `tests/eval/test_significance.py` measures this one.

    Where nothing varies within any stratum, but something differs, the rule of three holds on either side: at
    most `_unseen_share` of the items are of another kind, and differ from those that were seen by at most the
    largest of these, so that two equal differences d leave everything from 0 to 2 d open.

    Args:
        differences: One array per stratum (task), one number per cluster: score of the policy minus score of
            the baseline on the same (seed, item).
        level: Coverage of the interval, in (0, 1).

    Returns:
        The estimate with its interval: from -inf to +inf, "undefined", where a stratum holds one cluster and
        the policies differ anywhere.

    Raises:
        ValueError: If there is no stratum, an empty one, or one with a nan.

    Examples:
        >>> paired_interval([np.zeros(8), np.zeros(5)]).identical
        True
        >>> paired_interval([np.ones(4), -np.ones(2)]).estimate  # macro, not 2/6
        0.0
    """
    strata = checked_strata(differences, "paired_interval")
    estimate = float(macro_mean(*strata))
    sizes = [stratum.size for stratum in strata]
    num_nonzero = sum(int(np.count_nonzero(stratum)) for stratum in strata)

    def interval(low: float, high: float, taken: Method) -> Interval:
        return Interval(estimate, float(low), float(high), level, taken, sum(sizes), num_nonzero)

    if num_nonzero and min(sizes) == 1:
        return interval(-math.inf, math.inf, "undefined")
    if all(np.ptp(stratum) == 0.0 for stratum in strata):
        half = _unseen_share(sizes, level) * max(float(np.abs(stratum).max()) for stratum in strata)
        return interval(estimate - half, estimate + half, "constant")
    return interval(*_t_ends(strata, level), "t")


def verdict(interval: Interval, margin: float) -> Verdict:
    """Summarise an interval in one word.

    - identical: the two agree on every item, so there is nothing to test;
    - better / worse: the interval excludes 0 (also when the difference is smaller than the margin);
    - equivalent: it does not, and lies strictly inside (-margin, +margin);
    - inconclusive: everything else.

    Args:
        interval: Of policy minus baseline.
        margin: Largest difference that does not matter, in the interval's unit, > 0.
    """
    checked_margin(margin)
    if interval.identical:
        return "identical"
    if interval.low > 0:
        return "better"
    if interval.high < 0:
        return "worse"
    return "equivalent" if -margin < interval.low and interval.high < margin else "inconclusive"


def _unseen_share(sizes: Sequence[int], level: float) -> float:
    """The share of items, in the macro mean of K strata of these sizes, that may well be unlike all that were
    seen: `min(1, -log((1 - level) / 2) / (K * min_k n_k))`, the rule of three on either side."""
    return min(1.0, -math.log((1 - level) / 2) / (len(sizes) * min(sizes)))


def _t_ends(strata: Sequence[np.ndarray], level: float) -> tuple[float, float]:
    """Ends of `paired_interval`; each stratum has two clusters or more, and one of them varies."""
    sizes = np.array([stratum.size for stratum in strata], dtype=np.float64)
    own = np.array([stratum.var(ddof=1) for stratum in strata])
    pooled = ((sizes - 1) * own).sum() / (sizes - 1).sum()
    moderated = ((sizes - 1) * own + BORROWED * pooled) / (sizes - 1 + BORROWED)
    estimate = float(macro_mean(*strata))
    error, df = welch(strata, np.maximum(own, moderated) / sizes)
    quantile = float(special.stdtrit(df, (1 + level) / 2))
    third = sum(float(((s - s.mean()) ** 3).mean()) / s.size**2 for s in strata) / len(strata) ** 3
    skew = third / error**3

    def untwisted(t: float) -> float:
        """Where t + skew / 3 t^2 + skew^2 / 27 t^3 + skew / 6 is the given one."""
        if abs(skew) < 1e-9:
            return t
        return 3 / skew * (float(np.cbrt(1 + skew * (t - skew / 6))) - 1)

    low = estimate - error * max(quantile, untwisted(quantile))
    return low, estimate + error * max(quantile, -untwisted(-quantile))
