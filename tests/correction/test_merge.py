"""Merging, entry by entry against loops; and what must not depend on how it is computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.correction import merge as module
from retain.correction.merge import Merge, merge
from tests.close import assert_close


def naive(keys, values, exists, keep, threshold, weight):
    """As the docstring says, in float64."""
    made, weights = [], []
    for row in range(len(keys)):
        kept = [i for i in range(keys.shape[1]) if keep[row, i] and exists[row, i]]
        sums = {i: weight[row, i] * values[row, i].double() for i in kept}
        total = {i: float(weight[row, i]) for i in kept}
        for e in range(keys.shape[1]):
            if not exists[row, e] or e in kept or not kept:
                continue
            cosines = [
                float(torch.cosine_similarity(keys[row, e].double(), keys[row, i].double(), dim=0))
                for i in kept
            ]
            best = max(cosines)
            if best >= threshold:
                to = kept[cosines.index(best)]
                sums[to] = sums[to] + weight[row, e] * values[row, e].double()
                total[to] += float(weight[row, e])
        made += [sums[i] / total[i] for i in kept]
        weights += [total[i] for i in kept]
    shape = (0, values.shape[2])
    return torch.stack(made) if made else torch.zeros(shape), torch.tensor(weights)


def case(seed, R=5, T=23, D=4, V=3):
    """Rows that hold and keep different numbers, one of them none and one all."""
    draw = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(R, T, D, generator=draw), torch.randn(R, T, V, generator=draw)
    exists = torch.rand(R, T, generator=draw) < 0.9
    keep = torch.rand(R, T, generator=draw) < torch.rand(R, 1, generator=draw) * 0.6
    keep[0], keep[1] = False, True
    weight = torch.randint(1, 5, (R, T), generator=draw).float()
    return keys, values, exists, keep, weight


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([-1.0, 0.3, 0.8]), st.booleans())
def test_it_is_what_the_formula_says(seed, threshold, weighted):
    keys, values, exists, keep, weight = case(seed)
    weight = weight if weighted else torch.ones_like(weight)
    got = merge(keys, values, exists, keep, threshold, weight if weighted else None)
    wanted, weights = naive(keys, values, exists, keep, threshold, weight)
    assert_close(got.values_NV, wanted.float())
    assert torch.equal(got.weight_N, weights.float())


@pytest.mark.parametrize("cosines", [1, 200, 1 << 24])
@pytest.mark.parametrize("kept", [1, 3, 1024])
def test_blocks_change_nothing(monkeypatch, cosines, kept):
    keys, values, exists, keep, weight = case(3)
    wanted = merge(keys, values, exists, keep, 0.5, weight)
    monkeypatch.setattr(module, "COSINES", cosines)
    monkeypatch.setattr(module, "KEPT", kept)
    got = merge(keys, values, exists, keep, 0.5, weight)
    assert_close(got.values_NV, wanted.values_NV)
    assert torch.equal(got.weight_N, wanted.weight_N)


def test_nothing_counts_twice():
    """Two evictions one after the other hold as much as what came, as long as everything is merged."""
    keys, values, exists, _, _ = case(5)
    keep = torch.zeros_like(exists)
    keep[:, ::3] = exists[:, ::3]
    first = merge(keys, values, exists, keep, -1.0)
    some = keep.any(-1)
    assert float(first.weight_N.sum()) == int(exists[some].sum())
    mean = (first.values_NV * first.weight_N[:, None]).sum(0)
    assert_close(mean, values[exists & some[:, None]].sum(0))
    dense, weight = values.clone(), torch.ones_like(exists).float()
    dense[keep], weight[keep] = first.values_NV, first.weight_N
    again = keep.clone()
    again[:, ::2] = False
    left = again.any(-1)
    second = merge(keys, dense, keep, again, -1.0, weight)
    assert float(second.weight_N.sum()) == int(exists[left].sum())
    assert_close((second.values_NV * second.weight_N[:, None]).sum(0), values[exists & left[:, None]].sum(0))


def test_what_nothing_goes_to_stays_to_the_bit():
    keys, values, exists, keep, _ = case(7)
    values = values.bfloat16()
    got = merge(keys, values, exists, keep, 1.0)
    assert torch.equal(got.values_NV, values[keep & exists]) and bool((got.weight_N == 1).all())


def test_what_is_no_entry_may_be_anything():
    keys, values, exists, keep, _ = case(9)
    wanted = merge(keys, values, exists, keep, 0.2)
    keys, values = keys.clone(), values.clone()
    keys[~exists], values[~exists] = torch.nan, torch.inf
    got = merge(keys, values, exists, keep, 0.2)
    assert torch.equal(got.values_NV, wanted.values_NV) and torch.equal(got.weight_N, wanted.weight_N)


@pytest.mark.parametrize("threshold", [-1.01, 1.5, float("nan")])
def test_a_threshold_is_a_cosine(threshold):
    with pytest.raises(ValueError, match="threshold"):
        Merge(threshold=threshold)
