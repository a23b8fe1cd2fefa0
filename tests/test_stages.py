"""First stages, each against its definition by loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.two_stage import FirstStage, stage_by_budget, stage_by_mass

B, H, T, W = 2, 3, 17, 5
PADS = (0, 4)


def _case(seed: int, ties: bool):
    draw = torch.Generator().manual_seed(seed)
    first = torch.rand(B, H, T, generator=draw) ** 4
    first = (first * 4).floor() / 4 if ties else first
    valid = torch.arange(T) >= torch.tensor(PADS)[:, None]
    first = first.masked_fill(~valid[:, None], 0.0)
    first = (first / first.sum(-1, keepdim=True).clamp_min(1e-9)).masked_fill(~valid[:, None], float("-inf"))
    protected = (torch.rand(B, 1, T, generator=draw) < 0.2) & valid[:, None]
    return first, protected.expand(B, H, T)


def _order(row, which):
    """Entries from the highest, ties to the later."""
    return sorted(which, key=lambda i: (float(row[i]), i), reverse=True)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.data())
def test_a_share_of_the_budget(seed, ties, share, data):
    first, protected = _case(seed, ties)
    budget = torch.tensor([[data.draw(st.integers(6, 13)) for _ in range(H)] for _ in range(B)])
    got = stage_by_budget(first, protected, budget, share)
    for b in range(B):
        for h in range(H):
            exists = range(PADS[b], T)
            order = sorted(
                exists,
                key=lambda i, b=b, h=h: (bool(protected[b, h, i]), float(first[b, h, i]), i),
                reverse=True,
            )
            count = int(share * int(budget[b, h]) + 1e-9)
            both = (got | protected)[b, h].nonzero().flatten().tolist()
            sure = {i for i in range(T) if protected[b, h, i]}
            assert set(both) == sure | set(order[:count])
            assert int(got[b, h].sum()) == count


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.integers(-2, 9),
)
def test_a_share_of_the_mass(seed, ties, share, limit):
    first, protected = _case(seed, ties)
    got = stage_by_mass(first, protected, [limit] * B, share, window=W)
    split = T - W
    for b in range(B):
        before = range(PADS[b], split)
        for h in range(H):
            row = first[b, h].double()
            inside = sum(float(row[i]) for i in before)
            window = sum(float(row[i]) for i in range(split, T))
            line = share * (inside + window) - window
            mass, chosen = 0.0, []
            for i in _order(row, before):
                mass += float(row[i])
                if mass >= line - 1e-6:
                    # Too near the line for float32 to settle: whatever came out is right.
                    if abs(mass - line) < 1e-6:
                        return
                    break
                chosen.append(i)
            free = [i for i in chosen if not protected[b, h, i]][: max(0, limit)]
            assert set(got[b, h].nonzero().flatten().tolist()) == set(free)


def test_a_window_that_holds_nearly_all_attention_leaves_nothing_for_the_stage():
    first = torch.full((1, 1, 20), 0.005)
    first[..., 15:] = (1 - 15 * 0.005) / 5
    nothing = torch.zeros(1, 1, 20, dtype=torch.bool)
    assert stage_by_mass(first, nothing, [20], 0.9, window=5).sum() == 0


def test_a_negative_limit_takes_nothing():
    """The released code slices with it and so marks almost every entry."""
    first, protected = _case(0, False)
    assert not stage_by_mass(first, protected, [-18, -1], 0.9, window=W).any()


def test_settings_are_checked():
    with pytest.raises(ValueError, match="first_stage: share: .* at most 1, got 1.5"):
        FirstStage("budget", 1.5)


@pytest.mark.parametrize(("share", "wanted"), [(1 / 3, 33333), (0.1 + 0.2, 30000), (2 / 3, 66666)])
def test_shares_that_no_one_wrote_do_not_overflow(share, wanted):
    """1/3 as a double is a fraction over 2**54: times a budget of 100,000 it would leave 64 bits."""
    first = torch.rand(1, 1, 120_000)
    nothing = torch.zeros(1, 1, 120_000, dtype=torch.bool)
    got = stage_by_budget(first, nothing, torch.tensor([[100_000]]), share)
    assert int(got.sum()) == wanted
