import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.selection import select


def _case(seed: int, *, ties: bool = False):
    draw = torch.Generator().manual_seed(seed)
    score = torch.rand(2, 3, 15, generator=draw)
    score = (score * 3).floor() if ties else score
    valid = torch.arange(15) >= torch.tensor([[0], [5]])
    protected = (torch.rand(2, 3, 15, generator=draw) < 0.2) & valid[:, None]
    return score.masked_fill(~valid[:, None], float("-inf")), protected


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.booleans(), st.data())
def test_selection_is_its_formula(seed, ties, data):
    score, protected = _case(seed, ties=ties)
    budget = torch.tensor(
        [
            [data.draw(st.integers(max(1, int(protected[b, h].sum())), held)) for h in range(3)]
            for b, held in enumerate((15, 10))
        ]
    )
    keep = select(score, protected, budget)
    assert torch.equal(keep.sum(-1), budget)
    assert not (protected & ~keep).any()
    assert not (keep & (score == float("-inf"))).any()
    for b in range(2):
        for h in range(3):
            own, safe = score[b, h].tolist(), protected[b, h].tolist()
            free = int(budget[b, h]) - sum(safe)
            for i in range(15):
                better = sum(
                    not safe[k] and (own[k] > own[i] or (own[k] == own[i] and k > i)) for k in range(15)
                )
                assert bool(keep[b, h, i]) is (safe[i] or better < free)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.booleans())
def test_kept_sets_nest_as_the_budget_grows(seed, ties):
    score, protected = _case(seed, ties=ties)
    before = protected
    for budget_BH in (protected.sum(-1).clamp_min(1), torch.full((2, 3), 9), torch.full((2, 3), 10)):
        budget_BH = torch.maximum(budget_BH, protected.sum(-1))
        keep = select(score, protected, budget_BH)
        assert not (before & ~keep).any()
        before = keep


def test_ties_go_to_the_later_position():
    score = torch.zeros(1, 1, 6)
    nothing = torch.zeros(1, 1, 6, dtype=torch.bool)
    assert select(score, nothing, torch.tensor([[2]]))[0, 0].tolist() == [False] * 4 + [True] * 2


def test_protection_is_no_score():
    """A protected entry beside an infinite score: both are kept, and neither pushes the other out."""
    score = torch.tensor([[[float("inf"), 0.0, 5.0, 1.0]]])
    protected = torch.tensor([[[False, True, False, False]]])
    assert select(score, protected, torch.tensor([[2]])).tolist() == [[[True, True, False, False]]]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (1, "sequence 0, head 1 has a budget of 1 entries, 2 fewer than the 3 protected.*between 3 and 6"),
        (7, "sequence 0, head 1 has a budget of 7 entries, 1 more than the 6 that exist"),
    ],
)
def test_budgets_that_cannot_be_are_refused(budget, message):
    protected = torch.tensor([[[True] * 3 + [False] * 3] * 2])
    with pytest.raises(ValueError, match=message):
        select(torch.zeros(1, 2, 6), protected, torch.tensor([[4, budget]]))


def test_an_empty_head_and_nan_are_refused():
    nothing = torch.zeros(1, 2, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="head 1 has a budget of 0 entries, and no head may be empty"):
        select(torch.zeros(1, 2, 6), nothing, torch.tensor([[4, 0]]))
    with pytest.raises(ValueError, match="sequence 0, head 0, entry 0 is NaN"):
        select(torch.full((1, 2, 6), float("nan")), nothing, torch.tensor([[4, 4]]))
