"""Is one policy better than another? Paired differences in, an interval and a verdict out.

Both policies answered the same items, so what is judged is the difference per item. A task is a stratum and
the estimate is the *macro* mean, the mean over tasks of each task's mean difference: a task with more items
does not count for more. Within a task the items are resampled; every (seed, item) pair is one cluster, since
each model seed has items of its own. Seeds are not resampled: three are too few to say anything about the
seeds that were never trained, so every interval is conditional on the seeds at hand, and the report prints
the spread over them beside it.

The one decision taken here is what a verdict means (`verdict`). "Not significant" is never printed as
"equal": equality has to be shown against a stated margin.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

Verdict = Literal["better", "worse", "equivalent", "inconclusive", "identical"]


@dataclass(frozen=True)
class Interval:
    """A macro-mean difference with its paired bootstrap interval, in the unit of the differences.

    Attributes:
        estimate: Mean over strata of the stratum's mean difference.
        low: Lower end. Equal to `estimate` when no resample can differ from it.
        high: Upper end.
        level: Coverage, 0.95 for a 95 % interval.
        method: "BCa", "percentile" (where BCa is undefined) or "constant" (nothing to resample).
        num_items: Clusters over all strata.
        num_nonzero: Clusters on which the two policies differ.
    """

    estimate: float
    low: float
    high: float
    level: float
    method: Literal["BCa", "percentile", "constant"]
    num_items: int
    num_nonzero: int

    @property
    def identical(self) -> bool:
        """True when the policies agree on every single item."""
        return self.num_nonzero == 0


def macro_mean(*strata: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean over strata of each stratum's mean: `(1/K) * sum_k mean_i d_ki`."""
    return np.asarray(sum(np.mean(stratum, axis=axis) for stratum in strata) / len(strata))


def paired_interval(
    differences: Sequence[np.ndarray], *, level: float = 0.95, resamples: int = 5000, seed: int = 0
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

    Returns:
        The estimate with its interval.

    Raises:
        ValueError: If there is no stratum, or an empty one.

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

    def interval(low: float, high: float, method: Literal["BCa", "percentile", "constant"]) -> Interval:
        return Interval(estimate, float(low), float(high), level, method, num_items, num_nonzero)

    if all(np.ptp(stratum) == 0.0 for stratum in strata):
        return interval(estimate, estimate, "constant")
    # Constant strata cannot vary under resampling: they shift the mean and are left out of the resampling,
    # where a stratum of one item would make scipy refuse.
    shift = sum(float(s.mean()) for s in strata if np.ptp(s) == 0.0) / len(strata)
    moving = tuple(stratum for stratum in strata if np.ptp(stratum) > 0.0)
    share = len(moving) / len(strata)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # degenerate cases are handled below, by their nan
        result = stats.bootstrap(
            moving,
            macro_mean,
            n_resamples=resamples,
            confidence_level=level,
            method="BCa",
            vectorized=True,
            batch=500,
            rng=np.random.default_rng(seed),
        )
    low, high = result.confidence_interval
    if np.isfinite([low, high]).all():
        return interval(share * low + shift, share * high + shift, "BCa")
    tails = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(result.bootstrap_distribution, tails)
    return interval(share * low + shift, share * high + shift, "percentile")


def standard_error(scores: Sequence[np.ndarray]) -> float:
    """Standard error of a macro mean, `sqrt(sum_k var_k / n_k) / K`; 0 where a stratum holds one item."""
    strata = [np.asarray(stratum, dtype=np.float64) for stratum in scores]
    variance = sum(np.var(s, ddof=1) / s.size if s.size > 1 else 0.0 for s in strata)
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
