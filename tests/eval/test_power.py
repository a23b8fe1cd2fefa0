"""How many items: closed forms by hand, and the exact ones against a simulation and against each other."""

import math

import numpy as np
import pytest
from scipy import stats

from retain.eval.stats.not_worse import within
from retain.eval.stats.power import (
    equivalence_power,
    items_for_equivalence,
    smallest_difference,
    verdict_power,
)
from retain.eval.stats.significance import paired_interval
from tests.refused import refused


@pytest.mark.parametrize(("printed_sd", "items"), [(0.127, 348), (0.166, 589), (0.217, 1009)])
def test_items_of_the_protection_study(printed_sd, items):
    """TOST at a margin of 0.02, power 0.8, true difference 0: the figures of evaluation.md, section 7.

    A spread printed as 0.127 may be anything from 0.1265 to 0.1275, which is 343 to 349 items: the figures
    were made from spreads of more digits. 1,009 is what 0.217 itself gives; the other two lie in the range.
    """
    ends = [items_for_equivalence(printed_sd + half, 0.02, method="normal") for half in (-5e-4, 5e-4)]
    assert ends[0] <= items <= ends[1]
    middle = items_for_equivalence(printed_sd, 0.02, method="normal")
    assert middle == {348: 346, 589: 590, 1009: 1009}[items]
    assert items_for_equivalence(printed_sd, 0.02, method="t") - middle in (1, 2)


def test_the_closed_form_by_hand():
    # z of 0.95 and 0.9: 1.644854 and 1.281552. (2.926405 * 5)^2 = 214.1.
    assert items_for_equivalence(1.0, 0.2, method="normal") == 215
    assert items_for_equivalence(100.0, 20.0, method="normal") == 215  # any unit
    assert items_for_equivalence(1.0, 100.0, method="normal") == 2


@pytest.mark.parametrize(("n", "margin", "true_difference"), [(20, 0.8, 0.0), (20, 0.8, 0.3), (5, 1.6, 0.0)])
def test_equivalence_power_against_a_simulation(n, margin, true_difference):
    draws = 20_000
    samples = np.random.default_rng(0).normal(true_difference, 1.0, (draws, n))
    error, mean = samples.std(axis=1, ddof=1) / math.sqrt(n), samples.mean(axis=1)
    quantile = stats.t.ppf(0.95, n - 1)
    share = np.mean(((mean + margin) / error > quantile) & ((mean - margin) / error < -quantile))
    made = equivalence_power(n, sd=1.0, margin=margin, true_difference=true_difference)
    assert made == pytest.approx(share, abs=4 * 0.5 / math.sqrt(draws))


def test_the_smallest_number_that_has_the_power():
    for true_difference in (0.0, 0.1):
        n = items_for_equivalence(1.0, 0.4, true_difference=true_difference, method="t")
        powers = [
            equivalence_power(k, sd=1.0, margin=0.4, true_difference=true_difference) for k in (n - 1, n)
        ]
        assert powers[0] < 0.8 <= powers[1]
    assert items_for_equivalence(1.0, 0.4, true_difference=0.1) > items_for_equivalence(1.0, 0.4)
    assert equivalence_power(4, sd=10.0, margin=0.1) == 0.0


@pytest.mark.parametrize(("sd", "margin", "worst"), [(20.0, 2.0, 100.0), (0.1, 0.02, 1.0)])
def test_the_number_that_the_verdict_needs_has_the_power(sd, margin, worst):
    """Drawn: TOST's own number, which leaves out the 95 % interval and unseen losses, has it less often."""
    rng = np.random.default_rng(1)
    shares = []
    for method in ("verdict", "t"):
        n = items_for_equivalence(sd, margin, method=method, worst=worst)
        found = 0
        for _ in range(200):
            # In steps of an eighth of their spread: as good as normal, and quickly weighed.
            differences = np.round(rng.normal(0, 8, n)).clip(-8 * worst / sd, 8 * worst / sd) * (sd / 8)
            interval = paired_interval([differences])
            if -margin < interval.low and interval.high < margin:
                found += within([differences], margin, worst) < 0.05
        shares.append(found / 200)
    assert 0.72 < shares[0] < 0.90
    assert shares[1] < 0.74
    assert verdict_power(n, sd=sd, margin=margin, worst=worst) == pytest.approx(shares[1], abs=0.12)


def naive_power(n: int, effect: float, alpha: float = 0.05) -> float:
    """Two-sided paired t test, from the noncentral t itself."""
    quantile, shift = stats.t.ppf(1 - alpha / 2, n - 1), effect * math.sqrt(n)
    return float(stats.nct.sf(quantile, n - 1, shift) + stats.nct.cdf(-quantile, n - 1, shift))


def test_the_known_size_for_a_medium_effect():
    # Cohen's table: d = 0.5, two-sided 0.05, power 0.8 needs 34 pairs.
    assert smallest_difference(34, sd=1.0) <= 0.5 < smallest_difference(33, sd=1.0)


def test_far_from_the_margin_the_power_is_one_and_not_nan():
    # scipy's noncentral t is nan for some of these shifts.
    for margin in (2.0, 10.0, 25.0, 40.0, 1000.0):
        powers = [equivalence_power(n, sd=1.0, margin=margin) for n in (5, 20, 50, 500)]
        assert powers == sorted(powers) and powers[1:] == pytest.approx([1.0] * 3, abs=1e-6)
    assert items_for_equivalence(1.0, 1000.0, method="t") <= 3
    assert equivalence_power(4, sd=1.0, margin=30.0) == pytest.approx(1.0)  # nan in scipy 1.17


def test_the_smallest_difference_is_the_inverse():
    for n in (10, 162, 481):
        least = smallest_difference(n, sd=0.2)
        assert naive_power(n, least / 0.2) == pytest.approx(0.8, abs=1e-6)
    assert smallest_difference(481, sd=20.0) == pytest.approx(100 * smallest_difference(481, sd=0.2))
    assert smallest_difference(162, sd=0.2, alpha=0.05 / 6) > smallest_difference(162, sd=0.2)


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


def test_two_items_show_next_to_nothing():
    assert [smallest_difference(n, sd=1.0, alpha=0.05 / 2000) > 40 for n in (2, 3, 8)] == [True, True, False]


def test_what_they_refuse():
    with pytest.raises(ValueError, match=r"sd must be positive, got 0.0; margin must be positive, got -1.0"):
        items_for_equivalence(0.0, -1.0)
    refused(r"power must lie in \(0, 1\), got 80.0", smallest_difference, 9, sd=1.0, power=80.0)
    with pytest.raises(ValueError, match="true difference of 0.03 to be inside a margin of 0.02"):
        items_for_equivalence(1.0, 0.02, true_difference=0.03)
    with pytest.raises(ValueError, match="closed form is for a true difference of 0"):
        items_for_equivalence(1.0, 0.02, true_difference=0.01, method="normal")
    refused("Unknown method 'z'", items_for_equivalence, 1.0, 0.02, method="z")
    refused("num_items must be at least 2, got 1", smallest_difference, 1, sd=1.0)
    refused("a power of 0.05 is had without any difference", smallest_difference, 10, sd=1.0, power=0.05)
