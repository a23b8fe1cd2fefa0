"""Computes the interval of a paired difference.

Both policies answered the same items, so the unit is the difference per item. A task is a stratum, and the
estimate is the *macro* mean, the mean over tasks of each task's mean difference. Every interval is
conditional on the seeds at hand. A stratum of one item says nothing about its spread: such a comparison has
no interval ("undefined", from -inf to +inf), unless the policies agree on every item.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

Method = Literal["t", "constant", "undefined"]

LEVEL = 0.95  # coverage of every interval
# A stratum's spread is at least that of its items and so many more of the spread that all strata share.
BORROWED = 3.0


@dataclass(frozen=True)
class Interval:
    """A macro mean with its interval, in the unit of the numbers.

    Attributes:
        estimate: Mean over strata of each stratum's mean.
        low, high: Ends. Equal to `estimate` where every number is 0; infinite where there is no interval.
        method: "t", "constant" (nothing varies) or "undefined" (a stratum of one item).
        num_nonzero: Items whose number is not 0, on which the two policies differ.
    """

    estimate: float
    low: float
    high: float
    method: Method
    num_nonzero: int

    def __str__(self) -> str:
        """Both ends with their signs, "[+0.3, +1.2]", or "no interval"."""
        return "no interval" if self.method == "undefined" else f"[{self.low:+.1f}, {self.high:+.1f}]"


def macro_mean(strata: Sequence[np.ndarray]) -> float:
    """Mean over strata of each stratum's mean: `(1/K) * sum_k mean_i d_ki`."""
    return float(sum(np.mean(stratum) for stratum in strata) / len(strata))


def standard_error(scores: Sequence[np.ndarray]) -> float:
    """Standard error of a macro mean, `sqrt(sum_k var_k / n_k) / K`; inf where a stratum holds one item, of
    whose spread nothing is known."""
    variance = sum(np.var(s, ddof=1) / s.size if s.size > 1 else math.inf for s in scores)
    return float(np.sqrt(variance)) / len(scores)


def paired_interval(strata: Sequence[np.ndarray]) -> Interval:
    """95 % interval of the macro mean of paired differences, stratified: Student's t, widened where the
    differences are skewed.

    With K strata of n_k items, mean m, its standard error, t the quantile at the degrees of freedom of Welch
    and Satterthwaite, `(sum_k v_k)^2 / sum_k(v_k^2 / (n_k - 1))`, and g the skewness of m:

        low  = m - error * max(t, h(t))          h(x) = 3 / g * ((1 + g * (x - g / 6))^(1/3) - 1)
        high = m + error * max(t, -h(-t))

    h is the interval of Hall, *On the Removal of Skewness by Transformation* (1992): where a few large
    differences lie on one side t ends too early on that side, and the wider of the two is taken at each end.
    `v_k = var_k / n_k`, and no var_k counts for less than with `BORROWED` items more of the spread that all
    strata have in common: four equal items do not show that a task has no spread. Bootstrap intervals cover
    less than they say where most differences are 0; `tests/eval/test_interval.py` measures this one.

    Where nothing varies within any stratum, but something differs, the rule of three holds on either side: a
    share `min(1, -log(0.025) / (K * min_k n_k))` of the items may differ from those that were seen by at most
    the largest of these, so that two equal differences d leave everything from 0 to 2 d open.

    Args:
        strata: One array per stratum (task), one number per item: score of the policy minus score of the
            baseline.

    Returns:
        The estimate with its interval: from -inf to +inf, "undefined", where a stratum holds one item and
        the policies differ anywhere.

    Examples:
        >>> paired_interval([np.ones(4), -np.ones(2)]).estimate  # macro, not 2/6
        0.0
    """
    estimate, sizes = macro_mean(strata), [stratum.size for stratum in strata]
    num_nonzero = sum(int(np.count_nonzero(stratum)) for stratum in strata)

    def interval(low: float, high: float, method: Method) -> Interval:
        return Interval(estimate, float(low), float(high), method, num_nonzero)

    if num_nonzero and min(sizes) == 1:
        return interval(-math.inf, math.inf, "undefined")
    if all(np.ptp(stratum) == 0.0 for stratum in strata):
        unseen = min(1.0, -math.log((1 - LEVEL) / 2) / (len(sizes) * min(sizes)))
        half = unseen * max(float(np.abs(stratum).max()) for stratum in strata)
        return interval(estimate - half, estimate + half, "constant")
    return interval(*_t_ends(strata), "t")


def _t_ends(strata: Sequence[np.ndarray]) -> tuple[float, float]:
    """Ends of `paired_interval`; each stratum has two items or more, and one of them varies."""
    sizes = np.array([stratum.size for stratum in strata], dtype=np.float64)
    spread = np.array([stratum.var(ddof=1) for stratum in strata])
    pooled = ((sizes - 1) * spread).sum() / (sizes - 1).sum()
    moderated = ((sizes - 1) * spread + BORROWED * pooled) / (sizes - 1 + BORROWED)
    variances = np.maximum(spread, moderated) / sizes
    error = math.sqrt(variances.sum()) / len(strata)
    freedom = variances.sum() ** 2 / (variances**2 / (sizes - 1)).sum()
    quantile = float(special.stdtrit(freedom, (1 + LEVEL) / 2))
    third = sum(float(((s - s.mean()) ** 3).mean()) / s.size**2 for s in strata) / len(strata) ** 3
    skew, estimate = third / error**3, macro_mean(strata)

    def untwisted(t: float) -> float:
        """Where t + skew / 3 t^2 + skew^2 / 27 t^3 + skew / 6 is the given one."""
        if abs(skew) < 1e-9:
            return t
        return 3 / skew * (float(np.cbrt(1 + skew * (t - skew / 6))) - 1)

    low = estimate - error * max(quantile, untwisted(quantile))
    return low, estimate + error * max(quantile, -untwisted(-quantile))
