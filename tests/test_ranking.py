"""Ranking, and keeping the first: by a budget, and by a threshold."""

import doctest

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.attention import ranking
from retain.attention.ranking import admit, rank_entries, select
from tests.refused import refused


def _case(seed: int, ties: bool):
    """Three sequences, one without entries, of which heads hold different entries; scores and protection."""
    draw = torch.Generator().manual_seed(seed)
    score = torch.randn(3, 2, 11, generator=draw)
    score = score.round() if ties else score
    exists = torch.rand(3, 2, 11, generator=draw) < torch.tensor([0.9, 0.3, 0.0])[:, None, None]
    protected = torch.rand(3, 2, 11, generator=draw) < 0.2  # also where no entry exists
    return score.masked_fill(~exists, float("-inf")), exists, protected


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, float("-inf"), float("inf")]), min_size=1, max_size=12))
def test_ranks_are_their_formula_with_ties_to_the_later_position(row):
    naive = [
        sum(other > mine or (other == mine and k > i) for k, other in enumerate(row))
        for i, mine in enumerate(row)
    ]
    assert rank_entries(torch.tensor([row, row])).tolist() == [naive, naive]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.booleans(), st.data())
def test_selection_is_its_formula_and_nests_as_the_budget_grows(seed, ties, data):
    score, exists, protected = _case(seed, ties)
    protected &= exists
    least, held = protected.sum(-1), exists.sum(-1)
    least = torch.maximum(least, held.clamp_max(1))
    more = torch.tensor(data.draw(st.lists(st.integers(0, 11), min_size=6, max_size=6))).view(3, 2)
    before = torch.zeros_like(exists)
    score[0, :, 0] = float("inf")  # protection is no score: an infinite one pushes nothing protected out
    score = score.masked_fill(~exists, float("-inf"))
    for budget in (least, torch.minimum(least + more, held), held):
        keep = select(score, protected, budget)
        assert torch.equal(keep.sum(-1), budget)
        assert not (before & ~keep).any()
        before = keep
        for b, h, i in exists.nonzero().tolist():
            each, safe = score[b, h].tolist(), protected[b, h].tolist()
            better = sum(
                not safe[k] and (each[k] > each[i] or (each[k] == each[i] and k > i)) for k in range(11)
            )
            assert bool(keep[b, h, i]) is (safe[i] or better < int(budget[b, h]) - sum(safe))
    assert torch.equal(before, exists)


def test_nan_is_refused_by_its_place():
    score, nothing = torch.zeros(2, 2, 3), torch.zeros(2, 2, 3, dtype=torch.bool)
    score[1, 0, 2] = float("nan")
    for keep in (lambda: select(score, nothing, torch.ones(2, 2).long()), lambda: admit(score, nothing, 0.1)):
        refused("the score of sequence 1, head 0, entry 2 is NaN", keep)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(0, 10**6), st.booleans())
def test_admission_is_its_formula_and_nests_as_the_threshold_rises(seed, ties):
    score, exists, protected = _case(seed, ties)
    before, counts = exists, set()
    for threshold in (-9.0, -1.0, -0.5, 0.0, 0.3, 1.0, 9.0):
        keep = admit(score, protected, threshold)
        for b, h in ((b, h) for b in range(3) for h in range(2)):
            each = exists[b, h].nonzero().flatten().tolist()
            wanted = {i for i in each if protected[b, h, i] or float(score[b, h, i]) >= threshold}
            if not wanted and each:
                wanted = {max(each, key=lambda i, b=b, h=h: (float(score[b, h, i]), i))}
            assert set(keep[b, h].nonzero().flatten().tolist()) == wanted
        assert not (keep & ~before).any()
        # A second decision by the same threshold loses nothing more.
        assert torch.equal(admit(score.masked_fill(~keep, float("-inf")), protected, threshold), keep)
        before = keep
        counts.add(int(keep.sum()))
    assert len(counts) > 2


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(ranking) == (0, 2)
