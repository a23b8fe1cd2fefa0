from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget import Budget, allocate_flat, allocate_uniform, budget_tokens, layer_budget
from retain.selection import select


def _valid(*lengths: int, width: int = 0) -> torch.Tensor:
    width = width or max(lengths)
    return torch.arange(width) >= width - torch.tensor(lengths)[:, None]


def _score(seed: int, lengths: tuple[int, ...] = (20, 13), heads: int = 3, *, ties: bool = False):
    valid = _valid(*lengths)
    score = torch.rand(len(lengths), heads, valid.shape[1], generator=torch.Generator().manual_seed(seed))
    score = (score * 4).floor() if ties else score
    return score.masked_fill(~valid[:, None], float("-inf")), valid


def test_ratios_are_exact():
    per_head, total = budget_tokens(Budget(keep_ratio=0.2), _valid(100, 33), 2, 1)
    assert total.tolist() == [40, 13]
    assert per_head == [20, Fraction(13, 2)]
    for ratio, length, expected in ((0.2, 100, 20), (0.1, 1000, 100), (0.29, 100, 29), (0.05, 10, 1)):
        assert budget_tokens(Budget(keep_ratio=ratio), _valid(length), 1, 1)[1].item() == expected


def test_tokens_and_bytes_are_capped_at_what_exists():
    assert budget_tokens(Budget(tokens_per_head=30), _valid(100, 20), 4, 1)[1].tolist() == [120, 80]
    assert budget_tokens(Budget(bytes=1000), _valid(100, 5), 4, 16)[1].tolist() == [62, 20]


def test_bytes_are_split_over_layers_in_whole_entries():
    budget = Budget(bytes=1000, scope="layer")
    shares = [layer_budget(budget, layer, 4, 16) for layer in range(4)]
    assert [share.bytes for share in shares] == [16 * 16, 16 * 16, 15 * 16, 15 * 16]
    assert all(share.scope == "layer" for share in shares)
    ratio = Budget(keep_ratio=0.5)
    assert layer_budget(ratio, 1, 4, 16) is ratio
    with pytest.raises(ValueError, match="48 bytes holds 3 entries of 16 bytes, fewer than the 4 layers"):
        layer_budget(Budget(bytes=48), 3, 4, 16)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({}, "stated once.*got none"),
        ({"keep_ratio": 0.5, "bytes": 3}, "got keep_ratio=0.5, bytes=3"),
        ({"keep_ratio": 1.5}, "above 0 and at most 1; got 1.5"),
        ({"keep_ratio": 0.0}, "to remove 80 %, pass keep_ratio=0.2"),
        ({"tokens_per_head": 0}, "tokens_per_head is a whole number of at least 1; got 0"),
    ],
)
def test_bad_budgets_are_refused(stated, message):
    with pytest.raises(ValueError, match=message):
        Budget(**stated)


def test_a_budget_that_would_empty_a_head_is_refused():
    with pytest.raises(ValueError, match="sequence 1 of 5 tokens gets 1 entries for 2 KV heads.*at least 2"):
        budget_tokens(Budget(keep_ratio=0.1), _valid(100, 5), 2, 4)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 5), st.data())
def test_uniform_budgets_sum_exactly_and_differ_by_one_at_most(lengths, heads, data):
    capacity = torch.tensor(lengths)[:, None].expand(-1, heads)
    total = [data.draw(st.integers(0, length * heads)) for length in lengths]
    budget = allocate_uniform(torch.tensor(total), capacity)
    assert budget.sum(-1).tolist() == total
    assert int((budget.amax(-1) - budget.amin(-1)).max()) <= 1


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans(), st.data())
def test_flat_budgets_are_the_joint_top_k(seed, least, ties, data):
    score, valid = _score(seed, ties=ties)
    protected = (valid.cumsum(-1) <= 2)[:, None] & valid[:, None].expand_as(score)
    B, H, T = score.shape
    total = torch.tensor([data.draw(st.integers(H * (2 + least), int(row.sum()) * H)) for row in valid])
    budget = allocate_flat(score, protected, total, least=least)
    assert torch.equal(budget.sum(-1), total)

    # The plain version: guaranteed entries first, then (score, later position, lower head), one by one.
    keep = select(score, protected, budget)
    for b in range(B):
        guaranteed = {(h, i) for h in range(H) for i in range(T) if protected[b, h, i]}
        for h in range(H):
            own = sorted(
                (i for i in range(T) if valid[b, i]),
                key=lambda i, b=b, h=h: (bool(protected[b, h, i]), float(score[b, h, i]), i),
            )
            guaranteed |= {(h, i) for i in own[::-1][:least]}
        rest = [(h, i) for h in range(H) for i in range(T) if valid[b, i] and (h, i) not in guaranteed]
        rest.sort(key=lambda own, b=b: (float(score[b, own[0], own[1]]), own[1], -own[0]), reverse=True)
        wanted = guaranteed | set(rest[: int(total[b]) - len(guaranteed)])
        assert {(h, i) for h, i in keep[b].nonzero().tolist()} == wanted


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.booleans())
def test_joint_top_k_nests_as_the_budget_grows(seed, ties):
    score, valid = _score(seed, ties=ties)
    protected = (valid.cumsum(-1) <= 2)[:, None] & valid[:, None].expand_as(score)
    before = protected
    for step in range(0, 30, 3):
        total = torch.tensor([9 + step, 9 + step])
        keep = select(score, protected, allocate_flat(score, protected, total))
        assert keep.sum((1, 2)).tolist() == total.tolist()
        assert not (before & ~keep).any()
        before = keep


def test_no_head_is_emptied_by_a_greedy_neighbour():
    score = torch.stack([torch.full((1, 10), 9.0), torch.full((1, 10), 0.1)], dim=1)
    nothing = torch.zeros_like(score, dtype=torch.bool)
    assert allocate_flat(score, nothing, torch.tensor([8])).tolist() == [[7, 1]]
    assert allocate_flat(score, nothing, torch.tensor([8]), least=3).tolist() == [[5, 3]]


def test_flat_budgets_that_cannot_be_are_refused():
    score, valid = _score(0)
    protected = valid[:, None].expand_as(score)
    with pytest.raises(
        ValueError, match="sequence 0 has a budget of 50 entries.*10 fewer than .* guaranteed"
    ):
        allocate_flat(score, protected, torch.tensor([50, 39]))
    with pytest.raises(
        ValueError, match="sequence 1 has a budget of 40 entries in this layer, 1 more than exist"
    ):
        allocate_flat(score, protected, torch.tensor([60, 40]))
    with pytest.raises(ValueError, match="no head may be empty: least is at least 1; got 0"):
        allocate_flat(score, protected, torch.tensor([60, 39]), least=0)
    with pytest.raises(ValueError, match="is NaN"):
        allocate_flat(score * float("nan"), protected, torch.tensor([60, 39]))
