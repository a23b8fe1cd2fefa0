"""Clusters: what is averaged, what is resampled, and that no order of the rows changes anything."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.eval.stats.clusters import cluster_interval, cluster_pairs, pair_items
from retain.eval.stats.significance import paired_interval
from tests.refused import refused


def test_items_pair_by_key_and_not_by_line():
    keys, a, b = pair_items({("vt", 1): 0.5, ("vt", 0): 1.0}, {("vt", 0): 0.25, ("vt", 1): 0.0})
    assert keys == [("vt", 1), ("vt", 0)]
    assert (a.tolist(), b.tolist()) == ([0.5, 1.0], [0.0, 0.25])


def test_items_without_a_partner_are_named():
    with pytest.raises(ValueError, match=r"got 2 and 1: the baseline lacks 1: \['y'\]. Count a crashed"):
        pair_items({"x": 1.0, "y": 0.0}, {"x": 1.0})
    refused(r"the policy lacks 1: \[3\]", pair_items, {1: 1.0}, {1: 1.0, 3: 0.0})
    refused("got 0 and 0. Count", pair_items, {}, {})


def test_seeds_of_an_item_are_averaged_first():
    # Item x under three seeds: (1 + 0 + 0.5) / 3 - (0 + 0 + 0) / 3 = 0.5; item y under one: 0 - 0.25.
    made = cluster_pairs([1.0, 0.0, 0.0, 0.5], [0.0, 0.25, 0.0, 0.0], clusters=["x", "y", "x", "x"])
    assert (made.num_values, made.num_clusters) == (4, 2)
    (policy,), (baseline,), (differences,) = made.policy, made.baseline, made.differences
    assert differences.tolist() == [-0.25, 0.5]
    assert (policy.tolist(), baseline.tolist()) == ([0.0, 0.5], [0.25, 0.0])


def test_the_label_says_what_is_independent():
    scores, zeros = np.array([1.0, 0.0, 1.0, 1.0]), np.zeros(4)
    items, seeds = ["x", "x", "y", "y"], [0, 1, 0, 1]
    by_item = cluster_pairs(scores, zeros, clusters=items)
    by_both = cluster_pairs(scores, zeros, clusters=list(zip(seeds, items, strict=True)))
    assert by_item.differences[0].tolist() == [0.5, 1.0]
    assert by_both.differences[0].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert cluster_pairs(scores, zeros).num_clusters == 4


def test_a_cluster_does_not_reach_over_two_tasks():
    made = cluster_pairs([1.0, 0.0], [0.0, 0.0], clusters=[7, 7], strata=["vt", "cwe"])
    assert made.strata == ("cwe", "vt")
    assert [one.tolist() for one in made.differences] == [[0.0], [1.0]]


def test_rounding_is_no_difference():
    # 0.1 + 0.2 + 0.3 in two orders, and a value that is 0.3 only up to its last bit.
    made = cluster_pairs([0.1, 0.2, 0.3, 0.1 + 0.2], [0.3, 0.2, 0.1, 0.3], clusters=np.array([0, 0, 0, 1]))
    assert made.differences[0].tolist() == [0.0, 0.0]
    assert cluster_pairs([1e-9], [0.0]).differences[0].tolist() == [1e-9]  # small scores are no rounding


scores = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.2, 1 / 3, 1.0]), st.integers(0, 4), st.sampled_from("uv")),
    min_size=1,
    max_size=20,
)


@settings(max_examples=40, deadline=None)
@given(scores, st.randoms(use_true_random=False))
def test_any_order_of_the_rows_gives_the_same_clusters(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    one, other = (
        cluster_pairs(
            [x for x, *_ in r], [0.1] * len(r), clusters=[c for _, c, _ in r], strata=[s for *_, s in r]
        )
        for r in (rows, shuffled)
    )
    assert one.strata == other.strata
    for mine, theirs in zip(one.differences, other.differences, strict=True):
        assert mine.tolist() == theirs.tolist()


@settings(max_examples=40, deadline=None)
@given(scores)
def test_cluster_means_are_the_naive_ones(rows):
    made = cluster_pairs([x for x, *_ in rows], [0.0] * len(rows), clusters=[c for _, c, _ in rows])
    naive = []
    for label in {c for _, c, _ in rows}:
        own = [x for x, c, _ in rows if c == label]
        naive.append(sum(own) / len(own))
    assert made.differences[0].tolist() == pytest.approx(sorted(naive))


def test_whole_clusters_of_one_size_are_the_averaged_ones():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 4)
    values = rng.normal(0, 1, 48) + np.repeat(rng.normal(0.3, 1, 12), 4)
    whole = cluster_interval(values, labels, resamples=800, seed=3)
    averaged = paired_interval(
        cluster_pairs(values, np.zeros(48), clusters=labels).differences, resamples=800, seed=3
    )
    assert (whole.estimate, whole.low, whole.high) == pytest.approx(
        (averaged.estimate, averaged.low, averaged.high)
    )
    assert (whole.num_items, whole.num_nonzero) == (12, 12)


def test_whole_clusters_weigh_by_their_size():
    # Clusters (1, 1, 1) and (0): the mean over values is 3/4, the mean over clusters 1/2.
    values, labels = [1.0, 1.0, 1.0, 0.0], ["x", "x", "x", "y"]
    assert cluster_interval(values, labels).estimate == 0.75
    assert cluster_pairs(values, [0.0] * 4, clusters=labels).differences[0].mean() == 0.5


def test_a_cluster_that_has_nearly_all_values_leaves_no_interval():
    values, labels = np.arange(63.0) % 5 - 1, [0] * 60 + [1, 2, 3]
    made = cluster_interval(values, labels)
    assert (made.method, made.estimate) == ("undefined", pytest.approx(values.mean()))


def test_repeated_samples_of_one_problem_are_no_new_evidence():
    # 30 problems, 16 samples each, all alike: 480 values know no more than 30.
    solved = np.random.default_rng(1).integers(0, 2, 30).astype(float)
    values, problems = np.repeat(solved, 16), np.repeat(np.arange(30), 16)
    as_problems = cluster_interval(values, problems, seed=1)
    assert (as_problems.low, as_problems.high) == pytest.approx(
        (paired_interval([np.sort(solved)], seed=1).low, paired_interval([np.sort(solved)], seed=1).high)
    )
    as_values = paired_interval([values])
    assert as_problems.high - as_problems.low > 3 * (as_values.high - as_values.low)


def test_what_it_refuses():
    nan = float("nan")
    with pytest.raises(ValueError, match=r"policy holds 1 scores that are not finite, at positions \[1\]"):
        cluster_pairs([1.0, nan], [0.0, 0.0])
    refused("equal lengths, got 2 and 1: use pair_items", cluster_pairs, [1.0, 0.0], [0.0])
    with pytest.raises(ValueError, match="clusters needs one label per value: got 1 labels for 2 values"):
        cluster_pairs([1.0, 0.0], [0.0, 1.0], clusters=["x"])
    refused(r"at least one score, got shape \(0,\)", cluster_interval, [], [])
    # Each nan would be a cluster, or a task, of its own.
    three, labels = [1.0, 0.0, 1.0], np.array([0.0, nan, nan])
    with pytest.raises(ValueError, match=r"clusters holds 2 labels that are nan, at positions \[1, 2\]"):
        cluster_pairs(three, [0.0] * 3, clusters=labels)
    refused("strata holds 1 labels that are nan", cluster_pairs, three, [0.0] * 3, strata=["x", nan, "x"])
    refused("clusters holds 2 labels that are nan", cluster_interval, three, labels)
