"""Intervals and verdicts, against cases that can be worked out by hand."""

import numpy as np
import pytest
from scipy import stats

from retain.eval.significance import Interval, macro_mean, paired_interval, standard_error, verdict


def interval_of(low: float, high: float, *, nonzero: int = 5) -> Interval:
    return Interval((low + high) / 2, low, high, 0.95, "BCa", 10, nonzero)


def test_all_zero_differences_are_identical_not_nan():
    made = paired_interval([np.zeros(20), np.zeros(5)])
    assert (made.estimate, made.low, made.high, made.method) == (0.0, 0.0, 0.0, "constant")
    assert verdict(made, 2.0) == "identical"


def test_differences_that_cancel_are_not_identical():
    made = paired_interval([np.ones(10), -np.ones(3)])
    assert made.estimate == 0.0 and not made.identical
    assert verdict(made, 2.0) == "equivalent"


def test_tasks_count_alike_whatever_their_size():
    # Macro: (1 + 0) / 2, where the mean over all eight items would be 2/8.
    assert paired_interval([np.ones(2), np.zeros(6)]).estimate == 0.5


def test_constant_strata_shift_and_do_not_spread():
    moving = np.array([0.0, 0.0, 100.0, 100.0, 100.0, 0.0, 0.0, 100.0])
    alone = paired_interval([moving], seed=3)
    beside = paired_interval([moving, np.full(4, 10.0)], seed=3)
    assert beside.low == pytest.approx(alone.low / 2 + 5.0)
    assert beside.high == pytest.approx(alone.high / 2 + 5.0)


def test_two_items_by_hand():
    # Resamples of (0, 1): mean 0 in 1/4, 1/2 in 1/2, 1 in 1/4 of them: 95 % runs from 0 to 1.
    made = paired_interval([np.array([0.0, 1.0])])
    assert (made.low, made.high) == (0.0, 1.0)
    assert verdict(made, 0.5) == "inconclusive"


def test_one_stratum_is_scipys_own_bca():
    differences = np.random.default_rng(0).normal(0.3, 1.0, 60)
    made = paired_interval([differences], resamples=2000, seed=5)
    rng = np.random.default_rng(5)
    own = stats.bootstrap((differences,), np.mean, n_resamples=2000, batch=500, rng=rng).confidence_interval
    assert (made.low, made.high, made.method) == (pytest.approx(own.low), pytest.approx(own.high), "BCa")


def test_stratified_width_agrees_with_the_standard_error():
    rng = np.random.default_rng(1)
    strata = [rng.normal(mean, spread, 300) for mean, spread in ((0, 1), (5, 3), (-2, 0.2))]
    made = paired_interval(strata)
    by_hand = np.sqrt(sum(s.var(ddof=1) / 300 for s in strata)) / 3
    assert standard_error(strata) == pytest.approx(by_hand)
    assert (made.high - made.low) / 2 == pytest.approx(1.96 * by_hand, rel=0.06)


def test_the_same_seed_gives_the_same_interval():
    differences = [np.random.default_rng(2).integers(-1, 2, 40).astype(float)]
    assert paired_interval(differences, seed=1) == paired_interval(differences, seed=1)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.1, 0.9, "better"),
        (-9.0, -0.1, "worse"),
        (-1.9, 1.9, "equivalent"),
        (-2.0, 1.0, "inconclusive"),
        (0.0, 1.0, "equivalent"),
        (-1.0, 30.0, "inconclusive"),
    ],
)
def test_verdicts(low, high, word):
    assert verdict(interval_of(low, high), 2.0) == word


def test_zero_interval_of_equal_scores_is_identical():
    assert verdict(interval_of(0.0, 0.0, nonzero=0), 2.0) == "identical"


def test_macro_mean_along_an_axis():
    strata = np.arange(6.0).reshape(2, 3), np.ones((2, 5))
    assert macro_mean(*strata).tolist() == [1.0, 2.5]


def test_what_it_refuses():
    with pytest.raises(ValueError, match="at least one stratum.*got shapes"):
        paired_interval([])
    with pytest.raises(ValueError, match=r"got shapes \[\(0,\)\]"):
        paired_interval([np.zeros(0)])
    with pytest.raises(ValueError, match="margin of equivalence must be positive, got 0"):
        verdict(interval_of(0.0, 1.0), 0.0)
