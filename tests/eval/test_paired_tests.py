"""Tests of paired differences, against cases worked out by hand and naive versions of their formulas."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.eval.stats.paired_tests import exact_mcnemar, holm, sign_flip, signed_rank
from tests.refused import refused


def test_wilcoxon_with_ties_and_zeros_by_hand():
    # |d| without zeros: 1 1 2 2 3, ranks 1.5 1.5 3.5 3.5 5. The one negative has rank 1.5: W = 1.5. Of the 32
    # sign patterns the empty one and two single ones have a sum of at most 1.5: p = 2 * 3 / 32.
    differences = np.array([0.0, 1.0, -1.0, 2.0, 0.0, 2.0, 3.0])
    dropped = signed_rank(differences)
    assert (dropped.statistic, dropped.p) == (1.5, 0.1875)
    assert (dropped.num_nonzero, dropped.method) == (5, "permutation")


def test_wilcoxon_exactly_by_hand():
    # Ranks 1 2 3 4, negatives {2}: of 16 patterns {} {1} {2} have a sum of at most 2: p = 2 * 3 / 16.
    made = signed_rank(np.array([1.0, -2.0, 3.0, 4.0]))
    assert (made.statistic, made.p, made.method) == (2.0, 0.375, "exact")


def test_the_normal_p_of_wilcoxon_is_the_naive_one():
    """z of W with the variance corrected for ties, no continuity correction."""
    differences = np.random.default_rng(0).integers(-3, 5, 60).astype(float)
    used = [x for x in differences if x != 0]
    ranks = [sum(abs(y) < abs(x) for y in used) + (sum(abs(y) == abs(x) for y in used) + 1) / 2 for x in used]
    positive, n = sum(rank for rank, x in zip(ranks, used, strict=True) if x > 0), len(used)
    ties = [sum(abs(x) == size for x in used) for size in {abs(x) for x in used}]
    variance = n * (n + 1) * (2 * n + 1) / 24 - sum((size**3 - size) / 48 for size in ties)
    wanted = math.erfc(abs(positive - n * (n + 1) / 4) / math.sqrt(variance) / math.sqrt(2))
    made = signed_rank(differences)
    assert made.method == "asymptotic" and made.p == pytest.approx(wanted, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8))
def test_counted_ranks_are_those_of_every_sign_pattern(numbers):
    values = np.array([*numbers, 1.0, 1.0])
    used = [x for x in values if x != 0]
    ranks = [sum(abs(y) < abs(x) for y in used) + (sum(abs(y) == abs(x) for y in used) + 1) / 2 for x in used]
    found = sum(rank for rank, x in zip(ranks, used, strict=True) if x > 0)
    sums = [
        sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign)
        for signs in itertools.product((True, False), repeat=len(ranks))
    ]
    wanted = min(1.0, 2 * min(sum(x <= found for x in sums), sum(x >= found for x in sums)) / len(sums))
    made = signed_rank(values)
    assert (made.statistic, made.p) == pytest.approx((min(found, sum(ranks) - found), wanted))


def test_sign_flips_by_hand():
    # +-3 +-1 +-2: the sum 3 - 1 + 2 = 4 or more is had by 2 of 8 patterns.
    made = sign_flip([np.array([3.0, -1.0, 2.0])])
    assert (made.p, made.exact, made.num_nonzero, made.resamples) == (0.5, True, 3, 8)
    assert made.smallest_p == 0.25
    # Macro mean: 4 counts half of its task of one, 1 and 1 a quarter each: +-2 +-1/4 +-1/4, all positive.
    assert sign_flip([np.array([4.0]), np.array([1.0, 1.0])]).p == 0.25
    # 2 - 1/4 - 1/4 is the least that +2 gives: 4 of 8 patterns reach it, 5 of 8 do not exceed it.
    assert sign_flip([np.array([4.0]), np.array([-1.0, -1.0])]).p == 1.0


def test_patterns_of_one_mean_count_alike_whatever_the_last_bit():
    # -1/2 + 3/10 - 1/10 + 2/10 + 1/10 is nil in tenths, not in their binary sums; nil has p = 1.
    made = sign_flip([np.array([-1.0]), np.array([3.0, 0.0, -1.0, 2.0, 1.0])])
    assert made.p == 1.0


def test_equal_differences_have_no_sign_to_flip():
    made = sign_flip([np.concatenate([np.zeros(500), [1.0, 2.0, 3.0]])])
    assert (made.p, made.exact, made.num_nonzero) == (0.25, True, 3)
    assert sign_flip([np.array([5.0])]).p == 1.0


def test_sign_flips_of_more_items_than_a_float_has_powers_of_two():
    differences = np.where(np.arange(1500) % 3 == 0, -100.0, 100.0)
    found = sign_flip([differences], resamples=199)
    assert not found.exact and found.num_nonzero == 1500 and found.p == 2 / 200


def test_drawn_sign_flips_are_near_the_counted_ones():
    differences = np.random.default_rng(2).normal(0.5, 1, 12)
    counted, drawn = sign_flip([differences]), sign_flip([differences], resamples=4000, seed=1)
    assert (counted.exact, drawn.exact) == (True, False)
    assert drawn.p == pytest.approx(counted.p, abs=4 * math.sqrt(counted.p / 4000))
    assert drawn.smallest_p == pytest.approx(2 / 4001)
    assert sign_flip([np.full(40, 1.0)], resamples=99).p == pytest.approx(0.02)  # never 0


@pytest.mark.parametrize(("right", "wrong"), [(168, 130), (117, 79), (960, 930), (400, 310)])
def test_drawn_patterns_as_extreme_as_the_found_one_are_counted(right, wrong):
    """Ties are common where differences have one size: left out, they take up to a quarter off p."""
    only, other = np.repeat([1.0, 0.0], [right, wrong]), np.repeat([0.0, 1.0], [right, wrong])
    wanted = exact_mcnemar(only, other).p
    # A share that no float holds exactly, in a stratum of three.
    strata = [(only - other) * 100, np.zeros(7), np.zeros(11)]
    found = sign_flip(strata, resamples=200_000).p
    assert found == pytest.approx(wanted, abs=4 * math.sqrt(2 * wanted / 200_000))


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
    assert sign_flip(strata).p == pytest.approx(min(1.0, 2 * min(up, down)))


def test_exact_mcnemar_by_hand():
    # One item for the policy alone, five for the baseline alone: p = 2 * (1 + 6) / 64.
    policy = np.array([1, 0, 0, 0, 0, 0, 1, 1, 0])
    baseline = np.array([0, 1, 1, 1, 1, 1, 1, 1, 0])
    made = exact_mcnemar(policy, baseline)
    assert (made.only_policy, made.only_baseline, made.both, made.neither) == (1, 5, 2, 1)
    assert made.p == pytest.approx(0.21875)
    assert exact_mcnemar(baseline, policy).p == made.p
    assert exact_mcnemar(policy, policy).p == 1.0
    assert exact_mcnemar(np.array([1, 0]), np.array([0, 1])).p == 1.0  # 2 * 3/4, cut at 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=11))
def test_mcnemar_is_the_sign_flip_of_binary_scores(pairs):
    a, b = (np.array([pair[i] for pair in pairs], dtype=float) for i in (0, 1))
    assert exact_mcnemar(a, b).p == pytest.approx(sign_flip([a - b]).p)


def test_holm_by_hand():
    # Ascending: 4 * 0.005, 3 * 0.01, 2 * 0.03, 1 * 0.04 = 0.04 raised to the 0.06 before it.
    made = holm([0.01, 0.04, 0.03, 0.005])
    assert made.tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.9]).tolist() == [1.0, 1.0]


def test_equal_everywhere_is_never_nan():
    nothing = np.zeros(7)
    made = signed_rank(nothing)
    assert (made.statistic, made.p, made.num_nonzero, made.method) == (0.0, 1.0, 0, "identical")
    assert sign_flip([nothing, np.zeros(1)]).p == 1.0
    assert exact_mcnemar(nothing, nothing).p == 1.0


def test_what_they_refuse():
    refused(r"sign_flip needs finite numbers, .* positions \[0\]", sign_flip, [np.array([1.0, np.nan])])
    with pytest.raises(ValueError, match=r"rows of 0 and 1, got shapes \(2,\) and \(2,\), values \[0.0, 0.5"):
        exact_mcnemar(np.array([0.5, 1.0]), np.array([0.0, 1.0]))
    refused(r"all in \[0, 1\]; got \[nan\]", holm, [float("nan")])


def test_they_are_those_of_statsmodels():
    """Whose calls collect garbage; the numbers are the same."""
    from statsmodels.stats.contingency_tables import mcnemar
    from statsmodels.stats.multitest import multipletests

    rng = np.random.default_rng(0)
    values = rng.uniform(size=20) ** 4
    assert holm(values).tolist() == multipletests(values, method="holm")[1].tolist()
    a, b = rng.integers(0, 2, (2, 40))
    counts = [[int(((a == i) & (b == j)).sum()) for j in (1, 0)] for i in (1, 0)]
    assert exact_mcnemar(a, b).p == mcnemar(counts, exact=True).pvalue
