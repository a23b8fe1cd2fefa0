"""How a budget is spread over the heads of a layer; over layers: tests/test_cascade.py."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.allocation import (
    Allocation,
    allocate_joint,
    allocate_uniform,
    entropy_weight,
    make_bids,
    normalised,
    spread_evenly,
)
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
    bids = make_bids(score, score > float("-inf"), protected, [least] * len(score))
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


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_is_left_over_is_spread_evenly(data):
    weights = data.draw(st.lists(st.fractions(0, 5, max_denominator=7), min_size=1, max_size=6))
    size = len(weights)
    least = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    most = [low + data.draw(st.integers(0, 20)) for low in least]
    total = data.draw(st.integers(sum(least), sum(most)))
    shares = spread_evenly(total, weights, least, most)
    assert sum(shares) == total
    assert all(low <= share <= high for low, share, high in zip(least, shares, most, strict=True))


def test_cakes_released_repair_by_hand():
    # 100 by 1:1:8 is 10, 10, 80; the third holds 50: the other 30 are spread evenly.
    assert spread_evenly(100, [*map(Fraction, (1, 1, 8))], [0] * 3, [50] * 3) == [25, 25, 50]
    # By 1:3:8 it is 8, 25, 66: 17 are left over, and the first of the two gets the odd one.
    assert spread_evenly(100, [*map(Fraction, (1, 3, 8))], [0] * 3, [50] * 3) == [17, 33, 50]
    # By 182:49:51 of 141 it is 91, 24, 25: 42 are left over, cut off or by rounding, and spread at once.
    assert spread_evenly(141, [*map(Fraction, (182, 49, 51))], [0] * 3, [50] * 3) == [50, 45, 46]


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


def test_scores_over_their_mean():
    score = torch.tensor([[[1.0, 3.0, float("-inf")], [2.0, 2.0, 8.0]]])
    assert normalised(score, None) is score
    assert normalised(score, "head").tolist() == [[[0.5, 1.5, float("-inf")], [0.5, 0.5, 2.0]]]
    mean = 16 / 5
    assert torch.allclose(normalised(score, "layer")[0, 1], torch.tensor([2.0, 2.0, 8.0]) / mean)


def test_scores_below_zero_are_no_shares():
    score = torch.tensor([[[1.0, -3.0]]])
    for kind in ("head", "layer"):
        refused("normalise divides scores by their mean, and there are scores below", normalised, score, kind)
    with pytest.raises(ValueError, match="'entropy' takes scores for shares of a whole"):
        entropy_weight(score, torch.ones_like(score, dtype=torch.bool))


def test_bad_allocations_are_named_all_at_once():
    with pytest.raises(
        ValueError, match=r"beta: expected float at least 1, got 0.0.*safeguard_share: .* at most 1, got 2.0"
    ):
        Allocation(safeguard_share=2.0, beta=0.0)
