"""The smallest difference that could be shown, against the noncentral t and against quadrature."""

import math

import numpy as np
import pytest
from scipy import stats

from retain.eval.stats.power import smallest_difference
from tests.refused import refused


def test_the_known_size_for_a_medium_effect():
    # Cohen's table: d = 0.5, two-sided 0.05, power 0.8 needs 34 pairs.
    assert smallest_difference(34, sd=1.0) <= 0.5 < smallest_difference(33, sd=1.0)


def power_by_quadrature(n: int, effect: float, alpha: float) -> float:
    """|t| > q if and only if |Z + sqrt(n) * effect| > q * sqrt(chi2 / df): over 2,000 quantiles of chi2. No
    noncentral t takes part."""
    quantile, shift = stats.t.isf(alpha / 2, n - 1), effect * math.sqrt(n)
    chi2 = stats.chi2.ppf((np.arange(2000) + 0.5) / 2000, n - 1)
    bound = quantile * np.sqrt(chi2 / (n - 1))
    return float(np.mean(stats.norm.sf(bound - shift) + stats.norm.cdf(-bound - shift)))


@pytest.mark.parametrize("family", [1, 20, 216, 2000])
def test_the_smallest_difference_is_found_at_the_alpha_of_any_family(family):
    """statsmodels' solver fails, or is wrong without a word, at many of these."""
    alpha = 0.05 / family
    sizes = [*range(8, 60), *range(60, 400, 17)]
    found = [smallest_difference(n, sd=1.0, alpha=alpha) for n in sizes]
    assert all(type(one) is float for one in found)
    powers = [power_by_quadrature(n, one, alpha) for n, one in zip(sizes, found, strict=True)]
    assert powers == pytest.approx([0.8] * len(sizes), abs=1e-4)
    assert found == sorted(found, reverse=True)  # more items never show less
    # In the unit of the spread; two items show next to nothing.
    assert smallest_difference(100, sd=20.0) == pytest.approx(20 * smallest_difference(100, sd=1.0))
    assert [smallest_difference(n, sd=1.0, alpha=0.05 / 2000) > 40 for n in (2, 8)] == [True, False]


def test_what_they_refuse():
    said = r"sd must be positive, got 0.0; power must lie in \(0, 1\)"
    refused(said, smallest_difference, 9, sd=0.0, power=80.0)
    refused("num_items must be at least 2, got 1", smallest_difference, 1, sd=1.0)
    refused("a power of 0.05 is had without any difference", smallest_difference, 10, sd=1.0, power=0.05)
