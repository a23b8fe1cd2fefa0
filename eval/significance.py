"""Is one policy better than another? Paired differences in, an interval and a verdict out.

Both policies answered the same items, so what is judged is the difference per item. A task is a stratum and
the estimate is the *macro* mean, the mean over tasks of each task's mean difference: a task with more items
does not count for more. Within a task the items are resampled; every (seed, item) pair is one cluster, since
each model seed has items of its own. Seeds are not resampled: three are too few to say anything about the
seeds that were never trained, so every interval is conditional on the seeds at hand, and the report prints
the spread over them beside it.

A stratum of one cluster says nothing about its own spread, and with it neither does the macro mean: such a
comparison has no interval ("undefined", from -inf to +inf) and is inconclusive, unless the policies agree on
every item.

The one decision taken here is what a verdict means (`verdict`). "Not significant" is never printed as
"equal": equality has to be shown against a stated margin. `eval/paired_tests.py` holds the tests that stand
beside an interval, `eval/paired_result.py` joins both for one comparison and for a family of them.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from retain.extras import deferred

with deferred("eval", "scipy", what="a comparison's statistics"):
    from scipy import stats

Verdict = Literal["better", "worse", "equivalent", "inconclusive", "identical", "unjudged"]
Method = Literal["BCa", "percentile", "constant", "undefined"]


@dataclass(frozen=True)
class Interval:
    """An estimate with its paired bootstrap interval: a macro-mean difference, in the unit of the
    differences, or a ratio of means.

    Attributes:
        estimate: Mean over strata of the stratum's mean difference; of `ratio_interval`, the ratio.
        low: Lower end. Equal to `estimate` when no resample can differ from it; -inf where there is none.
        high: Upper end; inf where there is none.
        level: Coverage, 0.95 for a 95 % interval.
        method: "BCa", "percentile" (asked for, or where BCa is undefined), "constant" (nothing varies) or
            "undefined" (a stratum of one cluster).
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
        """True where a stratum of one cluster leaves the estimate without an interval."""
        return self.method == "undefined"

    def spelled(self, decimals: int = 1) -> str:
        """Both ends with their signs, "[+0.3, +1.2]", or "no interval"."""
        if self.undefined:
            return "no interval"
        return f"[{self.low:+.{decimals}f}, {self.high:+.{decimals}f}]"


def macro_mean(*strata: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean over strata of each stratum's mean: `(1/K) * sum_k mean_i d_ki`."""
    return np.asarray(sum(np.mean(stratum, axis=axis) for stratum in strata) / len(strata))


def _resampled(
    samples: tuple[np.ndarray, ...],
    statistic: Callable[..., np.ndarray],
    *,
    level: float,
    resamples: int,
    seed: int,
    method: str,
) -> tuple[float, float, Method]:
    """scipy's bootstrap interval, and the method that it took: percentile where BCa has no answer."""
    if method not in ("BCa", "percentile"):
        raise ValueError(f"Unknown bootstrap method {method!r}: write 'BCa' or 'percentile'.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # degenerate cases are handled below, by their nan
        result = stats.bootstrap(
            samples,
            statistic,
            n_resamples=resamples,
            confidence_level=level,
            method=method,
            vectorized=True,
            batch=500,
            rng=np.random.default_rng(seed),
        )
    low, high = result.confidence_interval
    if np.isfinite([low, high]).all():
        return float(low), float(high), "BCa" if method == "BCa" else "percentile"
    tails = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(result.bootstrap_distribution, tails)
    return float(low), float(high), "percentile"


def paired_interval(
    differences: Sequence[np.ndarray],
    *,
    level: float = 0.95,
    resamples: int = 5000,
    seed: int = 0,
    method: str = "BCa",
) -> Interval:
    """Bootstrap the macro mean of paired differences, stratified, bias-corrected and accelerated.

    The interval is scipy's BCa (Efron, *Better Bootstrap Confidence Intervals*, 1987). scipy returns nan for
    it when all differences are equal, or when the estimate lies outside all resamples; identical predictions
    do happen between eviction policies, so those cases are told apart here instead of being dropped.

    Args:
        differences: One array per stratum (task), one number per cluster: score of the policy minus score of
            the baseline on the same (seed, item).
        level: Coverage of the interval, in (0, 1).
        resamples: Bootstrap resamples.
        seed: Seed of the resampling; the same seed gives the same interval.
        method: "BCa", or "percentile" for the plain quantiles of the resampled means, which is what most
            papers print.

    Returns:
        The estimate with its interval: from -inf to +inf, "undefined", where a stratum holds one cluster and
        the policies differ anywhere.

    Raises:
        ValueError: If there is no stratum, or an empty one, or the method is neither of the two.

    Example:
        >>> paired_interval([np.zeros(8), np.zeros(5)]).identical
        True
        >>> paired_interval([np.ones(4), -np.ones(2)]).estimate  # macro, not 2/6
        0.0
    """
    strata = [np.asarray(stratum, dtype=np.float64) for stratum in differences]
    if not strata or any(stratum.ndim != 1 or stratum.size == 0 for stratum in strata):
        shapes = [stratum.shape for stratum in strata]
        raise ValueError(
            f"paired_interval needs at least one stratum, each one-dimensional with at least one difference; "
            f"got shapes {shapes}. Pass one array of per-item differences per task."
        )
    estimate = float(macro_mean(*strata))
    num_items = sum(stratum.size for stratum in strata)
    num_nonzero = sum(int(np.count_nonzero(stratum)) for stratum in strata)

    def interval(low: float, high: float, taken: Method) -> Interval:
        return Interval(estimate, float(low), float(high), level, taken, num_items, num_nonzero)

    if num_nonzero and any(stratum.size == 1 for stratum in strata):
        return interval(-math.inf, math.inf, "undefined")
    if all(np.ptp(stratum) == 0.0 for stratum in strata):
        return interval(estimate, estimate, "constant")
    # Constant strata cannot vary under resampling: they shift the mean and are left out of the resampling.
    shift = sum(float(s.mean()) for s in strata if np.ptp(s) == 0.0) / len(strata)
    moving = tuple(stratum for stratum in strata if np.ptp(stratum) > 0.0)
    share = len(moving) / len(strata)
    low, high, taken = _resampled(
        moving, macro_mean, level=level, resamples=resamples, seed=seed, method=method
    )
    return interval(share * low + shift, share * high + shift, taken)


def ratio_interval(
    numerators: Sequence[np.ndarray],
    denominators: Sequence[np.ndarray],
    *,
    level: float = 0.95,
    resamples: int = 5000,
    seed: int = 0,
    method: str = "BCa",
) -> Interval:
    """Bootstrap a ratio of macro means over paired items, such as the share of the full cache's score that a
    policy recovers: `mean_k mean_i a_ki / mean_k mean_i f_ki`.

    It is the ratio of the means and not the mean of the ratios, which items with f = 0 would leave
    undefined. Items are resampled as pairs within their stratum, so the correlation of a and f counts.

    With the sum of each cluster's values as numerators and their number as denominators, the ratio is the
    mean over all values and whole clusters are resampled (`cluster_interval`).

    Args:
        numerators: One array per stratum, one number per cluster: the policy's scores.
        denominators: The same for what it is divided by, in the same order.
        level: Coverage of the interval, in (0, 1).
        resamples: Bootstrap resamples.
        seed: Seed of the resampling.
        method: "BCa" or "percentile".

    Returns:
        The ratio with its interval, "undefined" where a stratum holds one cluster and any pair differs.
        `num_nonzero` counts the pairs whose two numbers differ, so `identical`
        says that the ratio is 1 item by item.

    Raises:
        ValueError: If the strata do not pair up, or the denominator is not above 0 in some resample: a
            ceiling so close to zero discriminates nothing.
    """
    tops = [np.asarray(stratum, dtype=np.float64) for stratum in numerators]
    bottoms = [np.asarray(stratum, dtype=np.float64) for stratum in denominators]
    shapes = [stratum.shape for stratum in tops], [stratum.shape for stratum in bottoms]
    if not tops or shapes[0] != shapes[1] or any(s.ndim != 1 or s.size == 0 for s in tops):
        raise ValueError(
            f"ratio_interval needs numerators and denominators in pairs, one-dimensional and not empty; got "
            f"shapes {shapes[0]} and {shapes[1]}. Pass one array of per-item scores per task, twice."
        )
    bottom = float(macro_mean(*bottoms))
    refusal = "The ratio has no interval: {}. Leave it out where the ceiling is zero (not discriminative)."
    if not bottom > 0:
        raise ValueError(refusal.format(f"the mean denominator is {bottom}, and it must be positive"))
    estimate = float(macro_mean(*tops)) / bottom
    num_items = sum(stratum.size for stratum in tops)
    num_nonzero = sum(int(np.count_nonzero(a != f)) for a, f in zip(tops, bottoms, strict=True))
    if num_nonzero and any(a.size == 1 for a in tops):
        return Interval(estimate, -math.inf, math.inf, level, "undefined", num_items, num_nonzero)
    moves = [np.ptp(a) > 0 or np.ptp(f) > 0 for a, f in zip(tops, bottoms, strict=True)]
    if not any(moves):
        return Interval(estimate, estimate, estimate, level, "constant", num_items, num_nonzero)

    def resampled_mean(scores: list[np.ndarray], picked: Sequence[np.ndarray]) -> np.ndarray:
        drawn = iter(picked)
        parts = [x[next(drawn).astype(np.intp)] if m else x for x, m in zip(scores, moves, strict=True)]
        return np.asarray(sum(part.mean(axis=-1) for part in parts) / len(parts))

    def ratio(*picked: np.ndarray, axis: int = -1) -> np.ndarray:
        # scipy resamples the positions, which keeps the two numbers of an item together.
        below = resampled_mean(bottoms, picked)
        if not np.all(below > 0):
            raise ValueError(refusal.format("in some resamples the denominator is not above zero"))
        return np.asarray(resampled_mean(tops, picked) / below)

    positions = tuple(np.arange(a.size) for a, move in zip(tops, moves, strict=True) if move)
    low, high, taken = _resampled(
        positions, ratio, level=level, resamples=resamples, seed=seed, method=method
    )
    return Interval(estimate, low, high, level, taken, num_items, num_nonzero)


def standard_error(scores: Sequence[np.ndarray]) -> float:
    """Standard error of a macro mean, `sqrt(sum_k var_k / n_k) / K`; inf where a stratum holds one cluster,
    of whose spread nothing is known."""
    strata = [np.asarray(stratum, dtype=np.float64) for stratum in scores]
    variance = sum(np.var(s, ddof=1) / s.size if s.size > 1 else math.inf for s in strata)
    return float(np.sqrt(variance)) / len(strata)


def verdict(interval: Interval, margin: float) -> Verdict:
    """Put an interval into one word.

    - identical: the two agree on every item, so there is nothing to test;
    - better / worse: the interval excludes 0 (also when the difference is smaller than the margin);
    - equivalent: it does not, and lies strictly inside (-margin, +margin);
    - inconclusive: everything else.

    Args:
        interval: Of policy minus baseline.
        margin: Largest difference that would not matter, in the interval's unit, > 0.
    """
    if not margin > 0:
        raise ValueError(f"The margin of equivalence must be positive, got {margin}; 2 points is usual.")
    if interval.identical:
        return "identical"
    if interval.low > 0:
        return "better"
    if interval.high < 0:
        return "worse"
    if -margin < interval.low and interval.high < margin:
        return "equivalent"
    return "inconclusive"
