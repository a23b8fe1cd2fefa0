"""Tests and verdicts of paired differences, against cases by hand, naive versions, scipy and statsmodels."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from retain.eval.stats.bound import p_within
from retain.eval.stats.interval import Interval, paired_interval
from retain.eval.stats.paired import Comparison, holm, judge, sign_flip, verdict
from tests.refused import refused


def judged(policy, baseline, **settings) -> Comparison:
    """Judges a comparison of one stratum, alone."""
    return judge({"it": ([np.asarray(policy)], [np.asarray(baseline)])}, **{"margin": 1.0, **settings})["it"]


def test_sign_flips_by_hand():
    # +-3 +-1 +-2: the sum 3 - 1 + 2 = 4 or more is had by 2 of 8 patterns.
    assert sign_flip([np.array([3.0, -1.0, 2.0])]) == 0.5
    # Macro mean: 4 counts half of its task of one, 1 and 1 a quarter each: +-2 +-1/4 +-1/4, all positive.
    assert sign_flip([np.array([4.0]), np.array([1.0, 1.0])]) == 0.25
    # 2 - 1/4 - 1/4 is the least that +2 gives: 4 of 8 patterns reach it, 5 of 8 do not exceed it.
    assert sign_flip([np.array([4.0]), np.array([-1.0, -1.0])]) == 1.0


def test_drawn_sign_flips_are_near_the_counted_ones():
    differences = np.random.default_rng(2).normal(0.5, 1, 12)
    counted, drawn = sign_flip([differences]), sign_flip([differences], resamples=4000, seed=1)
    assert counted != drawn == pytest.approx(counted, abs=4 * math.sqrt(counted / 4000))
    theirs = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=False
    )
    assert counted == pytest.approx(theirs.pvalue)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=8), st.integers(1, 3))
def test_counted_sign_flips_are_the_naive_ones(numbers, first):
    strata = [np.array(numbers[:first], dtype=float), np.array([*numbers[first:], 1.0])]
    shares = [x / len(stratum) / 2 for stratum in strata for x in stratum]
    observed = sum(shares)
    sums = [
        sum(s * x for s, x in zip(signs, shares, strict=True))
        for signs in itertools.product((1, -1), repeat=len(shares))
    ]
    up, down = (sum(sign * (x - observed) >= -1e-9 for x in sums) / len(sums) for sign in (1, -1))
    assert sign_flip(strata) == pytest.approx(min(1.0, 2 * min(up, down)))


def test_right_and_wrong_answers_take_mcnemars_exact_test():
    from statsmodels.stats.contingency_tables import mcnemar

    # Ten items: the policy alone is right on 6, the baseline alone on none: p = 2 / 64.
    policy, baseline = np.array([1.0] * 8 + [0.0] * 2), np.array([0.0] * 6 + [1.0] * 2 + [0.0] * 2)
    for unit in (1.0, 100.0):
        made = judged(policy * unit, baseline * unit, margin=0.02 * unit)
        assert (made.holm_p, made.verdict) == (0.03125, "better")
    a, b = np.random.default_rng(0).integers(0, 2, (2, 400))
    counts = [[int(((a == i) & (b == j)).sum()) for j in (1, 0)] for i in (1, 0)]
    assert sign_flip([100.0 * (a - b)]) == pytest.approx(mcnemar(counts, exact=True).pvalue)


def test_holm_by_hand_and_as_statsmodels_has_it():
    from statsmodels.stats.multitest import multipletests

    # Ascending: 4 * 0.005, 3 * 0.01, 2 * 0.03, 1 * 0.04 = 0.04 raised to the 0.06 before it.
    assert holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.9]).tolist() == [1.0, 1.0]
    values = np.random.default_rng(0).uniform(size=20) ** 4
    assert holm([*values]).tolist() == multipletests(values, method="holm")[1].tolist()


def test_every_part_of_a_comparison_is_the_one_of_its_function():
    rng = np.random.default_rng(0)
    policy, baseline = ([rng.uniform(0, 100, size) for size in (15, 25)] for _ in range(2))
    made = judge({"it": (policy, baseline)}, margin=10.0)["it"]
    strata = [np.sort(a - b) for a, b in zip(policy, baseline, strict=True)]
    assert made.interval == paired_interval(strata)
    assert made.holm_p == sign_flip(strata, resamples=5000)
    assert made.holm_p_within == p_within(strata, 10.0)
    # Macro: each task counts alike, policy minus baseline.
    (first, second), (other, another) = policy, baseline
    wanted = (first.mean() - other.mean() + second.mean() - another.mean()) / 2
    assert made.interval.estimate == pytest.approx(wanted)


def test_any_order_of_the_rows_gives_the_same_result():
    rng = np.random.default_rng(0)
    for size in (1, 2, 13, 40):
        rows = rng.choice([0.0, 0.3, 1 / 3, 0.9], (2, size))
        one, other = (
            judged(*side, margin=0.1, resamples=50) for side in (rows, rows[:, rng.permutation(size)])
        )
        assert one == other


def test_rounding_is_no_difference():
    assert judged([0.1 + 0.2, 0.5], [0.3, 0.5]).interval.num_nonzero == 0
    assert judged([1e-9, 0.0], [0.0, 0.0]).interval.num_nonzero == 1  # small scores are no rounding


@pytest.mark.parametrize(
    ("low", "high", "p", "p_within", "word"),
    [
        (0.5, 3.0, 0.01, 0.9, "better"),
        (-3.0, -0.5, 0.01, 0.9, "worse"),
        (0.5, 3.0, 0.06, 0.9, "inconclusive"),  # the interval alone would say better
        (-0.5, 3.0, 0.01, 0.9, "inconclusive"),  # the test alone would
        (0.1, 0.9, 0.01, 0.01, "better"),  # shown, however small
        (0.1, 0.9, 0.06, 0.01, "equivalent"),  # not shown, but shown to be small
        (-0.9, 0.9, 0.50, 0.01, "equivalent"),
        (-0.9, 0.9, 0.50, 0.06, "inconclusive"),
        (-1.1, 0.9, 0.50, 0.01, "inconclusive"),
        (-0.9, 0.9, 0.05, 0.05, "inconclusive"),  # at alpha is not below it
    ],
)
def test_a_word_stands_on_its_interval_and_its_test(low, high, p, p_within, word):
    interval = Interval((low + high) / 2, low, high, "t", 9)
    assert verdict(interval, 1.0, p=p, p_within=p_within) == word


def test_a_family_is_adjusted_together():
    """Six items of one size have p = 2/64; two such comparisons are no longer below 0.05."""
    six, none = (np.array([100.0] * 6 + [0.0] * 30),), (np.zeros(36),)
    sure = (np.array([100.0] * 20 + [0.0] * 16),)
    alone = judge({"six": (six, none)}, margin=2.0)["six"]
    assert (alone.verdict, alone.holm_p, alone.family_size) == ("better", 0.03125, 1)
    made = judge({"six": (six, none), "sure": (sure, none), "turned": (none, six)}, margin=2.0)
    assert [one.verdict for one in made.values()] == ["inconclusive", "better", "inconclusive"]
    assert made["six"].holm_p == made["turned"].holm_p == pytest.approx(0.0625)
    assert {one.family_size for one in made.values()} == {3}


def test_equivalence_is_adjusted_in_another_family():
    near = np.tile([-0.3, 0.31], 90)
    pair = ((near + 50.0,), (np.full(180, 50.0),))
    alone = judge({0: pair}, margin=2.0)[0]
    assert alone.verdict == "equivalent" and 0.025 < alone.holm_p_within < 0.05
    four = judge(dict.fromkeys(range(4), pair), margin=2.0)
    assert {one.verdict for one in four.values()} == {"inconclusive"}
    assert four[0].holm_p_within == pytest.approx(4 * alone.holm_p_within)


def test_what_is_refused():
    two, ones = np.array([1.0, 2.0]), np.ones(2)
    refused("points of 100, got nan", judged, [1.0, np.nan], ones)
    refused("points of 100, got 101", judged, [1.0, 101.0], ones)
    refused(r"the same items on both sides, got \[2\] and \[3\]", judged, two, np.ones(3))
    refused(r"the same items on both sides, got \[0\]", judged, [], [])
