"""Merging, entry by entry against loops; and what must not depend on how it is computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.correction import merge as module
from retain.correction.merge import Merge, merge
from tests.close import assert_close


def target_of(keys, kept, e):
    """Largest cosine of an entry with a kept one that it may go to, and which; None where there is none."""
    found = [(float(torch.cosine_similarity(keys[e].double(), keys[i].double(), dim=0)), i) for i in kept]
    return max(found, key=lambda each: each[0], default=None)


def naive(keys, values, exists, keep, how, weight):
    """As the docstring says, in float64: values, weights."""
    new_values, weights = [], []
    for row in range(len(keys)):
        kept = [i for i in range(keys.shape[1]) if keep[row, i] and exists[row, i]]
        removed = [e for e in range(keys.shape[1]) if exists[row, e] and e not in kept]
        each = [i for i in range(keys.shape[1]) if exists[row, i]]
        taking = [i for i in kept if i in each[: max(0, len(each) - how.recent)]]
        found = {e: target_of(keys[row], taking, e) for e in removed}
        found = {e: each[1] for e, each in found.items() if each is not None and each[0] >= how.threshold}
        for i in kept:
            mine = [i, *(e for e, to in found.items() if to == i)]
            counts = {e: float(weight[row, e]) for e in mine}
            total = sum(counts.values())
            new_values.append(sum(count * values[row, e].double() for e, count in counts.items()) / total)
            weights.append(total)
    return torch.stack(new_values) if weights else torch.zeros(0, values.shape[2]), torch.tensor(weights)


def case(seed, R=5, T=23, D=4, V=3):
    """Rows that hold and keep different numbers, one of them none and one all."""
    draw = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(R, T, D, generator=draw), torch.randn(R, T, V, generator=draw)
    exists = torch.rand(R, T, generator=draw) < 0.9
    keep = torch.rand(R, T, generator=draw) < torch.rand(R, 1, generator=draw) * 0.6
    keep[0], keep[1] = False, True
    weight = torch.randint(1, 5, (R, T), generator=draw).float()
    return keys, values, exists, keep, weight


HOWS = {
    "fixed": Merge(0.3, recent=0),
    "all": Merge(-1.0, recent=0),
    "none like it": Merge(0.999, recent=0),
    "between": Merge(0.0, recent=6),
    "nowhere": Merge(-1.0, recent=30),
}


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.sampled_from([*HOWS.values()]), st.integers(0, 10**6), st.booleans())
def test_it_is_what_the_formula_says(how, seed, again):
    keys, values, exists, keep, weight = case(seed)
    weight = weight if again else torch.ones_like(weight)
    got = merge(keys, values, exists, keep, how, weight if again else None)
    new_values, weights = naive(keys, values, exists, keep, how, weight)
    assert_close(got.values_NV, new_values.float())
    assert_close(got.weight_N, weights.float())


@pytest.mark.parametrize("cosines", [1, 200, 1 << 24])
def test_blocks_change_nothing(monkeypatch, cosines):
    keys, values, exists, keep, weight = case(3)
    wanted = merge(keys, values, exists, keep, Merge(0.5, recent=0), weight)
    monkeypatch.setattr(module, "COSINES", cosines)
    got = merge(keys, values, exists, keep, Merge(0.5, recent=0), weight)
    assert_close(got.values_NV, wanted.values_NV)
    assert torch.equal(got.weight_N, wanted.weight_N)


def test_what_nothing_goes_to_stays_to_the_bit():
    keys, values, exists, keep, _ = case(7)
    values = values.bfloat16()
    got = merge(keys, values, exists, keep, Merge(1.0, recent=0))
    assert torch.equal(got.values_NV, values[keep & exists]) and bool((got.weight_N == 1).all())
