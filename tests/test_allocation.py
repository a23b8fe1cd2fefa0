"""Whole entries by weight, and how a budget is spread over the heads of a layer; over layers:
tests/test_cascade.py."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.allocation import Allocation, allocate_uniform
from retain.budget.joint import allocate_joint, make_bids
from retain.budget.largest_remainder import exact, largest_remainder
from retain.scores.lava import entropy_weight
from tests.refused import refused


def _valid(*lengths: int, width: int = 0) -> torch.Tensor:
    width = width or max(lengths)
    return torch.arange(width) >= width - torch.tensor(lengths)[:, None]


def _score(seed: int, lengths: tuple[int, ...] = (20, 13), heads: int = 3, *, ties: bool = False):
    valid = _valid(*lengths)
    score = torch.rand(len(lengths), heads, valid.shape[1], generator=torch.Generator().manual_seed(seed))
    score = (score * 4).floor() if ties else score
    return score.masked_fill(~valid[:, None], float("-inf")), valid


def _flat(score, protected, total, least=1):
    """Budgets of the heads of one layer that compete."""
    bids, _ = make_bids(score, score > float("-inf"), protected, [least] * len(score))
    return allocate_joint([bids], total.tolist())[0][0]


def test_uniform_budgets_of_heads_that_hold_unlike_numbers():
    """Entry by entry, to the head that has least, of equal ones the first, as long as it holds more."""
    cases = [(total, own) for own in itertools.product(range(6), repeat=3) for total in range(sum(own) + 1)]
    naive = []
    for total, capacity in cases:
        held = [0] * 3
        for _ in range(total):
            able = [h for h, own in enumerate(capacity) if held[h] < own]
            held[min(able, key=lambda h, held=held: (held[h], h))] += 1
        naive.append(held)
    totals, capacities = zip(*cases, strict=True)
    assert allocate_uniform(torch.tensor(totals), torch.tensor(capacities)).tolist() == naive


def test_no_head_is_emptied_by_a_greedy_neighbour_and_no_budget_goes_beyond_what_exists():
    score = torch.stack([torch.full((1, 10), 9.0), torch.full((1, 10), 0.1)], dim=1)
    nothing = torch.zeros_like(score, dtype=torch.bool)
    assert _flat(score, nothing, torch.tensor([8])).tolist() == [[7, 1]]
    assert _flat(score, nothing, torch.tensor([8]), least=3).tolist() == [[5, 3]]
    assert _flat(score, nothing, torch.tensor([90])).tolist() == [[10, 10]]


def test_flat_budgets_that_cannot_be_are_refused():
    score, valid = _score(0)
    protected = valid[:, None].expand_as(score)
    with pytest.raises(
        ValueError, match="sequence 0 has a budget of 50 entries.*10 fewer than .* guaranteed"
    ):
        _flat(score, protected, torch.tensor([50, 39]))
    refused("is NaN", _flat, score * float("nan"), protected, torch.tensor([60, 39]))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6))
def test_entropy_is_its_formula(seed):
    score, valid = _score(seed)
    competes = (valid[:, None] & (torch.rand(score.shape) < 0.7)).contiguous()
    got = entropy_weight(score, competes)
    for b in range(2):
        free = [float(x) for x in score[b][competes[b]]]
        naive = -sum(x / sum(free) * math.log(x / sum(free)) for x in free if x)
        assert got[b].item() == pytest.approx(naive, abs=1e-9)
    assert entropy_weight(torch.zeros(1, 1, 3), torch.ones(1, 1, 3, dtype=torch.bool)).tolist() == [0.0]


def test_scores_below_zero_are_no_shares():
    score = torch.tensor([[[1.0, -3.0]]])
    with pytest.raises(ValueError, match="'entropy' takes scores for shares of a whole"):
        entropy_weight(score, torch.ones_like(score, dtype=torch.bool))


def test_bad_allocations_are_named_all_at_once():
    with pytest.raises(
        ValueError, match=r"beta: expected float at least 1, got 0.0.*safeguard_share: .* at most 1, got 2.0"
    ):
        Allocation(safeguard_share=2.0, beta=0.0)


def test_a_number_is_taken_as_it_was_written():
    assert exact(0.1) == Fraction(1, 10)
    assert exact(0.2) * 100 == 20
    assert exact(Fraction(1, 3)) == Fraction(1, 3)
    assert exact(1e-7) == Fraction(1, 10**7)


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


def test_more_than_fits_is_refused():
    with pytest.raises(ValueError, match="9 entries do not fit in capacities .4, 4., which hold 8"):
        largest_remainder(9, [Fraction(1)] * 2, [4, 4])
