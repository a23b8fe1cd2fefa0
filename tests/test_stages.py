"""First stages, each against its definition by loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.attention.two_stage import stage_by_budget, stage_by_mass

B, H, T, W = 2, 3, 17, 5
PADS = (0, 4)


def case(seed: int, ties: bool):
    draw = torch.Generator().manual_seed(seed)
    first = torch.rand(B, H, T, generator=draw) ** 4
    first = (first * 4).floor() / 4 if ties else first
    valid = torch.arange(T) >= torch.tensor(PADS)[:, None]
    first = first.masked_fill(~valid[:, None], 0.0)
    first = (first / first.sum(-1, keepdim=True).clamp_min(1e-9)).masked_fill(~valid[:, None], float("-inf"))
    protected = (torch.rand(B, 1, T, generator=draw) < 0.2) & valid[:, None]
    return first, protected.expand(B, H, T)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.integers(-2, 9))
def test_a_share_of_the_mass(seed, ties, share, limit):
    """A negative limit takes nothing, where the released code slices with it and takes almost everything."""
    first, protected = case(seed, ties)
    got = stage_by_mass(first, protected, [limit] * B, share, window=W)
    for b in range(B):
        before = range(PADS[b], T - W)
        for h in range(H):
            row = first[b, h].double().tolist()
            window = sum(row[T - W :])
            line = share * (sum(row[i] for i in before) + window) - window
            mass, chosen = 0.0, []
            for i in sorted(before, key=lambda i, row=row: (row[i], i), reverse=True):
                mass += row[i]
                if abs(mass - line) < 1e-6:  # too near for float32 to settle: whatever came out is right
                    return
                if mass >= line:
                    break
                chosen.append(i)
            free = [i for i in chosen if not protected[b, h, i]][: max(0, limit)]
            assert set(got[b, h].nonzero().flatten().tolist()) == set(free)


@pytest.mark.parametrize(("share", "wanted"), [(1 / 3, 33333), (0.1 + 0.2, 30000), (2 / 3, 66666)])
def test_shares_that_no_one_wrote_do_not_overflow(share, wanted):
    """1/3 as a double is a fraction over 2**54: times a budget of 100,000 it would leave 64 bits."""
    first = torch.rand(1, 1, 120_000)
    got = stage_by_budget(first, torch.zeros_like(first).bool(), torch.tensor([[100_000]]), share)
    assert int(got.sum()) == wanted
