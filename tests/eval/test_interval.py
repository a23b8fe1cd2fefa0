"""Intervals, against cases that can be worked out by hand, scipy, and a simulation of their coverage."""

import numpy as np
import pytest
from scipy import stats

from retain.eval.stats.interval import paired_interval, standard_error


def test_all_zero_differences_are_identical_not_nan():
    made = paired_interval([np.zeros(20), np.zeros(5)])
    assert (made.estimate, made.low, made.high, made.method) == (0.0, 0.0, 0.0, "constant")
    assert made.num_nonzero == 0


def test_a_small_stratum_borrows_its_spread():
    """Four equal items do not show that a task has no spread; four hundred nearly do."""
    moving = np.tile([0.0, 0.0, 100.0, 100.0, 100.0, 0.0, 0.0, 100.0], 5)
    widths = []
    for constant in (4, 400):
        made = paired_interval([moving, np.full(constant, 10.0)])
        assert made.estimate == 30.0
        widths.append(made.high - made.low)
    alone = paired_interval([moving])
    half = (alone.high - alone.low) / 2
    assert widths[0] > 1.2 * half
    assert half < widths[1] < 1.03 * half


def test_a_stratum_of_one_item_leaves_no_interval():
    many = np.random.default_rng(0).normal(5.0, 1.0, 40)
    for strata in ([many, np.array([60.0])], [many, np.zeros(1)], [np.array([3.0])]):
        made = paired_interval(strata)
        assert made.estimate == pytest.approx(sum(s.mean() for s in strata) / len(strata))
        assert (made.low, made.high, made.method) == (-np.inf, np.inf, "undefined")
        assert str(made) == "no interval"
        assert standard_error(strata) == np.inf
    assert paired_interval([np.zeros(3), np.zeros(1)]).method == "constant"
    assert str(paired_interval([many])).startswith("[+4.")


def test_the_interval_by_hand():
    """Three loops: variances, the spread that is borrowed, Welch's degrees of freedom, Hall's skewness."""
    strata = [np.array([0.0, 0.0, 0.0, 9.0]), np.array([1.0, -1.0, 0.0, 0.0, 2.0, 0.0])]
    pooled, freedom = 0.0, 0
    spreads = []
    for values in strata:
        mean = sum(values) / len(values)
        spreads.append(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
        pooled, freedom = pooled + spreads[-1] * (len(values) - 1), freedom + len(values) - 1
    pooled /= freedom
    variance, below, third = 0.0, 0.0, 0.0
    for spread, values in zip(spreads, strata, strict=True):
        n, mean = len(values), sum(values) / len(values)
        part = max(spread, ((n - 1) * spread + 3 * pooled) / (n + 2)) / n
        variance, below = variance + part, below + part**2 / (n - 1)
        third += sum((x - mean) ** 3 for x in values) / n**3 / 8
    error = np.sqrt(variance) / 2
    g, t = third / error**3, stats.t.ppf(0.975, variance**2 / below)
    made = paired_interval(strata)
    assert made.method == "t" and g > 0.1
    assert made.low == pytest.approx(made.estimate - t * error)
    # The long side: u with g of u = -t, u + g u^2 / 3 + g^2 u^3 / 27 + g / 6 = -t.
    u = (made.estimate - made.high) / error
    assert u < -t
    assert u + g * u**2 / 3 + g**2 * u**3 / 27 + g / 6 == pytest.approx(-t)
    turned = paired_interval([-values for values in strata])
    assert (turned.low, turned.high) == pytest.approx((-made.high, -made.low))
    # One stratum without a skew is Student's.
    plain = stats.ttest_1samp([-2.0, -1.0, 1.0, 2.0], 0).confidence_interval()
    alone = paired_interval([np.array([-2.0, -1.0, 1.0, 2.0])])
    assert (alone.low, alone.high) == pytest.approx((plain.low, plain.high))


@pytest.mark.parametrize(
    ("strata", "half"), [([np.full(2, 5.0)], 5.0), ([np.full(3, -5.0), np.full(4, 2.0)], None)]
)
def test_differences_that_are_all_alike_leave_something_open(strata, half):
    """Two equal differences d: anything from 0 to 2 d. Of a hundred next to nothing is open."""
    made = paired_interval(strata)
    assert (made.method, made.low < made.estimate < made.high) == ("constant", True)
    if half is not None:
        assert made.high - made.estimate == half
    many = paired_interval([np.full(100, 5.0)])
    assert (many.high - many.low) / 2 == pytest.approx(5.0 * -np.log(0.025) / 100)


# Differences that are not ties, and their mean.
KINDS = {
    "normal": (lambda rng, n: rng.normal(0.0, 1.0, n), 0.0),
    "+1": (lambda rng, n: np.ones(n), 1.0),
    "exponential": (lambda rng, n: rng.exponential(1.0, n), 1.0),
}


@pytest.mark.parametrize(
    ("kind", "sizes", "ties"),
    [
        ("normal", (30,), 0.8),
        ("normal", (100,), 0.9),
        ("exponential", (100,), 0.9),
        ("normal", (4, 40, 150), 0.0),
        ("+1", (4, 40, 150), 0.8),
    ],
)
def test_intervals_cover_where_ties_are_many_and_strata_small(kind, sizes, ties):
    rng, (draw, mean), covered = np.random.default_rng(0), KINDS[kind], 0
    for _ in range(250):
        made = paired_interval([np.where(rng.random(n) < ties, 0.0, draw(rng, n)) for n in sizes])
        covered += made.low <= mean * (1 - ties) <= made.high
    assert covered / 250 >= 0.93
