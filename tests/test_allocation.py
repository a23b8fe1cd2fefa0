"""Whole entries by weight, and how a budget is spread over heads; over layers: tests/test_cascade.py."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.allocation import allocate_uniform
from retain.budget.joint import allocate_joint, make_bids
from retain.budget.largest_remainder import largest_remainder
from retain.budget.statement import Budget
from retain.policy import decide_layers
from retain.scores.lava import entropy_weight
from tests.evictions import held_scores, kind, made_scores, make_evidence, stock_of
from tests.refused import refused


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_shares_sum_exactly_fit_and_stay_within_one_of_their_quota(data):
    weights = data.draw(st.lists(st.fractions(0, 5, max_denominator=7), min_size=1, max_size=6))
    capacity = data.draw(st.lists(st.integers(0, 20), min_size=len(weights), max_size=len(weights)))
    total = data.draw(st.integers(0, sum(capacity)))
    shares = largest_remainder(total, weights, capacity)
    assert sum(shares) == total
    assert all(0 <= share <= limit for share, limit in zip(shares, capacity, strict=True))
    if sum(weights):
        free = largest_remainder(total, weights)
        assert sum(free) == total
        for share, weight in zip(free, weights, strict=True):
            assert abs(share - total * weight / sum(weights)) < 1


def test_remainders_go_to_the_largest_then_the_lowest_index():
    assert largest_remainder(10, [Fraction(1)] * 3) == [4, 3, 3]
    assert largest_remainder(10, [Fraction(1), Fraction(3), Fraction(3)]) == [2, 4, 4]
    assert largest_remainder(9, [Fraction(1)] * 3, [1, 9, 9]) == [1, 4, 4]
    assert largest_remainder(5, [Fraction(1), Fraction(0)], [3, 9]) == [3, 2]
    refused(
        "9 entries do not fit in capacities .4, 4., which hold 8",
        largest_remainder,
        9,
        [Fraction(1)] * 2,
        [4, 4],
    )


def naive_classes(weights, total, least, capacity):
    """DuoAttention, entry by entry: to the retrieval head that holds least, of equal ones the first; then to
    the others."""
    held = [min(least, each) for each in capacity]
    for _ in range(total - sum(held)):
        for retrieval in (True, False):
            able = [i for i, each in enumerate(weights) if bool(each) is retrieval and held[i] < capacity[i]]
            if able:
                held[min(able, key=lambda i: (held[i], i))] += 1
                break
    return held


# Heads of a layer.


def test_uniform_budgets_of_heads_that_hold_unlike_numbers():
    """Entry by entry, to the head that has least, of equal ones the first, as long as it holds more."""
    cases = [
        (total, each) for each in itertools.product(range(6), repeat=3) for total in range(sum(each) + 1)
    ]
    naive = [naive_classes([1, 1, 1], total, 0, capacity) for total, capacity in cases]
    totals, capacities = zip(*cases, strict=True)
    assert allocate_uniform(totals, torch.tensor(capacities)).tolist() == naive


def compete(score, protected, total, least=1):
    """Budgets of the heads of one layer that compete."""
    bids, _ = make_bids(score, score > float("-inf"), protected, [least] * len(score))
    return allocate_joint([bids], total)[0][0].tolist()


def test_no_head_is_emptied_by_a_greedy_neighbour_and_no_budget_goes_beyond_what_exists():
    score = torch.stack([torch.full((1, 10), 9.0), torch.full((1, 10), 0.1)], dim=1)
    nothing = torch.zeros_like(score, dtype=torch.bool)
    assert compete(score, nothing, [8]) == [[7, 1]]
    assert compete(score, nothing, [8], least=3) == [[5, 3]]
    assert compete(score, nothing, [90]) == [[10, 10]]
    said = "sequence 0 has a budget of 10 entries.*10 fewer than .* guaranteed"
    refused(said, compete, score, ~nothing, [10])
    refused("is NaN", compete, score * float("nan"), nothing, [10])


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6))
def test_entropy_is_its_formula(seed):
    score = torch.rand(2, 3, 20, generator=torch.Generator().manual_seed(seed))
    competes = torch.rand(score.shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.7
    got = entropy_weight(score, competes)
    for b in range(2):
        free = [float(x) for x in score[b][competes[b]]]
        naive = -sum(x / sum(free) * math.log(x / sum(free)) for x in free if x)
        assert got[b].item() == pytest.approx(naive, abs=1e-9)
    assert entropy_weight(torch.zeros(1, 1, 3), torch.ones(1, 1, 3, dtype=torch.bool)).tolist() == [0.0]
    below = torch.tensor([[[1.0, 2.0, -3.0]], [[1.0, 2.0, 0.0]]])
    assert len(set(entropy_weight(below, torch.ones_like(below).bool()).tolist())) == 1


# By weights, in a policy.


def test_heads_that_hold_less_than_their_share_leave_it_to_the_others(heads_file):
    """A later moment: the sum stays what was stated, as long as there is so much."""
    layers, policy = make_evidence(5, 1, 40, (0,)), kind("weights", heads_file)
    held = [(torch.arange(40) % 4 == 0).expand(1, 2, 40), *[torch.ones(1, 2, 40, dtype=torch.bool)] * 2]
    layers = [replace(layer, held_BHT=each) for layer, each in zip(layers, held, strict=True)]
    scores = held_scores(layers, made_scores(layers, 5, ties=False))
    for ratio, whole in ((0.3, False), (0.5, False), (0.9, True)):
        once = decide_layers(policy, layers, Budget(keep_ratio=ratio), scores=scores, stock=stock_of(layers))
        counts = [one.keep_BHT.sum(-1).tolist()[0] for one in once]
        assert sum(map(sum, counts)) == min(3 * int(ratio * 80 + 0.5), 180)
        assert (counts == [[10, 10], [40, 40], [40, 40]]) == whole
        # The first head of the first layer would get 21 of the 72, and holds ten: it keeps them all.
        assert counts[0][0] == 10
