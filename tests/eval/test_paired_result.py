"""One comparison, and a family of them: what the words rest on."""

from dataclasses import replace

import numpy as np
import pytest

from retain.eval.stats.not_worse import within
from retain.eval.stats.paired_result import PairedResult, adjust, compare_paired, supported_verdict
from retain.eval.stats.paired_tests import sign_flip, signed_rank
from retain.eval.stats.significance import Interval, paired_interval
from tests.refused import refused


def compared(differences, **settings) -> PairedResult:
    """A comparison with these differences."""
    return compare_paired(
        [np.asarray(differences, dtype=float) + 5.0],
        [np.full(len(differences), 5.0)],
        **{"margin": 1.0, "worst": 10.0, **settings},
    )


def test_every_part_is_the_one_of_its_own_function():
    rng = np.random.default_rng(0)
    policy, baseline = ([rng.uniform(0, 1, size) for size in (15, 25)] for _ in range(2))
    made = compare_paired(policy, baseline, margin=0.1, seed=4, worst=1.0)
    strata = [np.sort(a - b) for a, b in zip(policy, baseline, strict=True)]
    assert made.interval == paired_interval(strata)
    assert made.sign_flip == sign_flip(strata, seed=4)
    assert made.within_p == within(strata, 0.1, 1.0)
    assert made.signed_rank == signed_rank(np.concatenate(strata))
    assert made.mcnemar is None and (made.test, made.p) == ("sign-flip", made.sign_flip.p)
    assert (made.num_clusters, made.margin) == (40, 0.1)
    # Macro: each task counts alike, policy minus baseline.
    (first, second), (other, another) = policy, baseline
    wanted = (first.mean() - other.mean() + second.mean() - another.mean()) / 2
    assert made.estimate == pytest.approx(wanted)
    assert (made.holm_p, made.holm_within_p, made.family_size) == (None, None, None)


def test_binary_scores_take_the_exact_test_in_any_unit():
    # Ten items: the policy alone is right on 6, the baseline alone on none: p = 2 / 64.
    policy, baseline = np.array([1.0] * 8 + [0.0] * 2), np.array([0.0] * 6 + [1.0] * 2 + [0.0] * 2)
    for unit in (1.0, 100.0):
        made = compare_paired([policy * unit], [baseline * unit], margin=0.02 * unit)
        assert made.mcnemar is not None
        assert (made.test, made.p, made.verdict) == ("mcnemar", 0.03125, "better")
        assert (made.mcnemar.only_policy, made.mcnemar.both, made.mcnemar.neither) == (6, 2, 2)
    halves = ([policy[:5], policy[5:]], [baseline[:5], baseline[5:]])
    assert compare_paired(*halves, margin=0.02).mcnemar is None, "of two tasks it is another test"


def test_rounding_is_no_difference():
    made = compare_paired([np.array([0.1 + 0.2, 0.5])], [np.array([0.3, 0.5])], margin=0.1)
    assert made.verdict == "identical"
    # Small scores are no rounding.
    assert compare_paired([np.array([1e-9, 0.0])], [np.zeros(2)], margin=0.1).interval.num_nonzero == 1


def test_any_order_of_the_rows_gives_the_same_result():
    rng = np.random.default_rng(0)
    for size in (1, 2, 13, 40):
        rows = rng.choice([0.0, 0.3, 1 / 3, 0.9], (2, size))
        one, other = (
            compare_paired([own[0]], [own[1]], margin=0.1, resamples=50)
            for own in (rows, rows[:, rng.permutation(size)])
        )
        assert one == other


def test_the_same_scores_are_identical_and_never_nan():
    rng = np.random.default_rng(0)
    for size, margin in ((1, 0.001), (2, 1.0), (20, 50.0)):
        scores = [rng.uniform(-10, 10, size), rng.uniform(-10, 10, 3)]
        made = compare_paired(scores, scores, margin=margin, resamples=50)
        assert (made.verdict, made.estimate, made.p) == ("identical", 0.0, 1.0) and made.within_p <= 1
        assert (made.interval.low, made.interval.high, made.signed_rank.p) == (0.0, 0.0, 1.0)
        assert adjust({"it": made, "again": made})["it"].verdict == "identical"


def test_a_wider_margin_only_ever_adds_equivalence():
    scores, near = np.random.default_rng(4).uniform(0, 1, (2, 200))
    near = scores + 0.02 * (near - 0.5)
    options = {"resamples": 500, "worst": 1.0}
    words = [compare_paired([scores], [near], margin=m, **options).verdict for m in (0.0005, 0.03, 0.9)]
    assert words == ["inconclusive", "equivalent", "equivalent"]
    # Scaling scores, margin and scale together changes nothing.
    four = compare_paired([scores * 4], [near * 4], margin=0.12, resamples=500, worst=4.0)
    assert four.verdict == "equivalent"
    # On a scale of points these items do not rule out a loss of everything.
    assert compare_paired([scores], [near], margin=0.03, resamples=500).verdict == "inconclusive"


def shown(low: float, high: float, nonzero: int = 9) -> Interval:
    return Interval((low + high) / 2, low, high, 0.95, "t", 30, nonzero)


@pytest.mark.parametrize(
    ("low", "high", "p", "within_p", "word"),
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
        (-3.0, -0.5, 0.01, 0.9, "worse"),
    ],
)
def test_a_word_stands_on_its_interval_and_its_test(low, high, p, within_p, word):
    assert supported_verdict(shown(low, high), 1.0, p=p, within_p=within_p, alpha=0.05) == word


def with_p(p: float, within_p: float = 1.0) -> PairedResult:
    """A comparison whose interval excludes 0 and whose raw p values are these."""
    made = compared(np.linspace(0.5, 3.0, 20))
    return replace(made, p=p, within_p=within_p)


def test_a_family_by_hand():
    # Ascending 0.005 0.01 0.03 0.04, times 4 3 2 1: 0.02 0.03 0.06 and 0.04 raised to 0.06.
    family = {"a": with_p(0.01), "b": with_p(0.04), "c": with_p(0.03), "d": with_p(0.005)}
    made = adjust(family, declared=["d", "c", "b", "a"])
    assert list(made) == ["a", "b", "c", "d"]
    assert [one.holm_p for one in made.values()] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [one.verdict for one in made.values()] == ["better", "inconclusive", "inconclusive", "better"]
    assert {(one.family_size, one.alpha) for one in made.values()} == {(4, 0.05)}
    assert [one.p for one in made.values()] == [0.01, 0.04, 0.03, 0.005]  # raw p stays
    # At another level of the family.
    assert {one.verdict for one in adjust(family, alpha=0.1).values()} == {"better"}


def test_equivalence_is_adjusted_within_its_own_family():
    near = compared(np.tile([-0.3, 0.31], 30))
    family = {i: replace(near, within_p=p) for i, p in enumerate((0.02, 0.03, 0.001))}
    made = adjust(family)
    assert [one.holm_within_p for one in made.values()] == pytest.approx([0.04, 0.04, 0.003])
    assert [one.verdict for one in made.values()] == ["equivalent"] * 3
    family[3] = replace(near, within_p=0.9)
    assert [one.verdict for one in adjust(family).values()] == ["inconclusive"] * 2 + [
        "equivalent",
        "inconclusive",
    ]


def test_identical_comparisons_do_not_help_the_others():
    """They count in the family, and bring no p that would pass it."""
    near = compared(np.tile([-0.3, 0.31], 30))
    near = replace(near, within_p=0.02)
    same = compared([0.0, 0.0, 0.0], worst=100.0)
    assert same.p == 1.0 and same.within_p > 0.9
    assert adjust({"near": near})["near"].verdict == "equivalent"
    made = adjust({"near": near, **{str(i): same for i in range(9)}})
    assert made["near"].holm_within_p == pytest.approx(0.2)
    assert [one.verdict for one in made.values()] == ["inconclusive"] + ["identical"] * 9


def test_a_task_of_one_item_leaves_no_word():
    rng = np.random.default_rng(0)
    many, zeros = rng.normal(10, 1, 40), np.zeros(40)
    gains, nothing = [many, np.array([60.0])], [zeros, np.zeros(1)]
    made = compare_paired(gains, nothing, margin=2.0, resamples=500)
    assert (made.interval.method, made.verdict) == ("undefined", "inconclusive")
    assert compare_paired([many], [zeros], margin=2.0, resamples=500).verdict == "better"
    thirteen = compare_paired([*rng.normal(10, 3, (13, 1))], [*np.zeros((13, 1))], margin=2.0)
    assert (thirteen.p < 0.01, thirteen.verdict) == (True, "inconclusive")
    same = compare_paired(gains, gains, margin=2.0)
    assert (same.interval.method, same.verdict) == ("constant", "identical")


def test_a_family_that_was_not_declared_is_refused():
    one = with_p(0.01)
    with pytest.raises(
        ValueError, match=r"declared but not compared \['b'\], compared but not declared \['c'\]"
    ):
        adjust({"a": one, "c": one}, declared=["a", "b"])
    refused("at least one comparison, got none", adjust, {})
    with pytest.raises(ValueError, match=r"one alpha in \(0, 1\), got \[0.01, 0.05\]: pass alpha"):
        adjust({"a": one, "b": replace(one, alpha=0.01)})


def test_a_family_too_large_for_its_resamples_is_refused():
    clear = compared(np.linspace(0.5, 3, 20), resamples=99)
    assert clear.p == pytest.approx(0.02)
    assert adjust({0: clear, 1: clear})[1].verdict == "better"
    with pytest.raises(
        ValueError, match=r"99 sign flips cannot give a p below 0.02.*a family of 3 .*resamples=240"
    ):
        adjust(dict.fromkeys(range(3), clear))
    # Where it had no effect anyway, nothing is refused.
    dull = compared(np.tile([-0.3, 0.31], 30), resamples=99)
    assert adjust(dict.fromkeys(range(3), dull))[0].family_size == 3
    finer = compared(np.linspace(0.5, 3, 20), resamples=240)
    assert adjust(dict.fromkeys(range(3), finer))[0].verdict == "better"


def test_what_it_refuses():
    two, ones, how = [np.array([1.0, 2.0])], [np.ones(2)], {"margin": 0.1}
    refused("margin of equivalence must be positive, got 0", compare_paired, two, ones, margin=0.0)
    refused("alpha must lie in", compare_paired, two, ones, **how, alpha=1.0)
    lost = [np.array([1.0, 4.0])]
    refused("1.0 where an item lost 3. Pass the width", compare_paired, lost, ones, **how, worst=1.0)
    bad = [np.array([1.0, np.nan])]
    refused(r"finite numbers, and the strata at positions \[0\]", compare_paired, bad, ones, **how)
    refused(r"the same items on both sides, got \[2\] and \[3\]", compare_paired, two, [np.ones(3)], **how)
