"""Merging, entry by entry against loops; and what must not depend on how it is computed."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.correction import merge as module
from retain.correction.merge import Merge, merge
from tests.close import assert_close


def target_of(keys, exists, kept, e, how):
    """Largest cosine of an entry with a kept one that it may go to, and which; None where there is none."""

    def cosine(i, j):
        return float(torch.cosine_similarity(keys[i].double(), keys[j].double(), dim=0))

    def together(i, j):
        """Whether two entries are in one run."""
        between = [k for k in range(min(i, j), max(i, j) + 1) if exists[k]]
        return all(cosine(k, later) >= how.threshold for k, later in pairwise(between))

    found = [(cosine(e, i), i) for i in kept if how.among == "all" or together(e, i)]
    return max(found, key=lambda own: own[0], default=None)


def naive(keys, values, exists, keep, how, weight, last=None):
    """As the docstring says, in float64: keys, values, weights, thresholds."""
    new_keys, new_values, weights, thresholds = [], [], [], []
    for row in range(len(keys)):
        kept = [i for i in range(keys.shape[1]) if keep[row, i] and exists[row, i]]
        gone = [e for e in range(keys.shape[1]) if exists[row, e] and e not in kept]
        own = [i for i in range(keys.shape[1]) if exists[row, i]]
        taking = [i for i in kept if i in own[: max(0, len(own) - how.recent)]]
        found = {e: target_of(keys[row], exists[row], taking, e, how) for e in gone}
        found = {e: own for e, own in found.items() if own is not None}
        least = how.threshold
        if least == "moving":
            least = float("nan") if last is None else float(last[row])
            if found:
                now = sum(cosine for cosine, _ in found.values()) / len(found)
                least = now if least != least else (least + now) / 2
        if how.among == "all":
            found = {e: own for e, own in found.items() if own[0] >= least}
        thresholds.append(least)
        for i in kept:
            mine = {e: cosine for e, (cosine, to) in found.items() if to == i}
            far = {e: float((keys[row, e].double() - keys[row, i].double()).norm()) for e in mine}
            factor = dict.fromkeys(mine, 1.0)
            if how.weighting == "cosine":
                factor = {e: math.exp(cosine - 1) for e, cosine in mine.items()}
            elif how.weighting == "distance":
                mean = sum(far.values()) / max(1, len(far))
                factor = {e: math.exp(-0.5 * (own / mean) ** 2) for e, own in far.items()}
            counts = {i: float(weight[row, i])} | {e: factor[e] * float(weight[row, e]) for e in mine}
            total = sum(counts.values())
            for made, side in ((new_keys, keys), (new_values, values)):
                made.append(sum(count * side[row, e].double() for e, count in counts.items()) / total)
            weights.append(total)
    shape = (0, values.shape[2])
    new_values = torch.stack(new_values) if weights else torch.zeros(shape)
    new_keys = torch.stack(new_keys) if weights and how.keys else None
    return new_keys, new_values, torch.tensor(weights), thresholds


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
    "d2o": Merge("moving", weighting="cosine", keys=True, recent=0),
    "kvmerger": Merge(0.2, among="run", weighting="distance", keys=True, recent=0),
    "keys": Merge(0.3, keys=True, recent=0),
    "distance": Merge(0.0, weighting="distance", recent=4),
    "between": Merge(0.0, recent=6),
    "nowhere": Merge(-1.0, recent=30),
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10**6), st.booleans())
def test_it_is_what_the_formula_says(how, seed, again):
    keys, values, exists, keep, weight = case(seed)
    weight = weight if again else torch.ones_like(weight)
    last = torch.tensor([0.1, 0.9, torch.nan, -0.4, 0.5]) if again and how.threshold == "moving" else None
    got = merge(keys, values, exists, keep, how, weight if again else None, last)
    new_keys, new_values, weights, thresholds = naive(keys, values, exists, keep, how, weight, last)
    assert_close(got.values_NV, new_values.float())
    assert_close(got.weight_N, weights.float())
    assert (got.keys_ND is None) == (new_keys is None)
    if new_keys is not None:
        assert_close(got.keys_ND, new_keys.float())
    if how.threshold == "moving":
        assert_close(got.threshold_R.nan_to_num(-9), torch.tensor(thresholds).nan_to_num(-9))


@pytest.mark.parametrize("cosines", [1, 200, 1 << 24])
@pytest.mark.parametrize("kept", [1, 3, 1024])
def test_blocks_change_nothing(monkeypatch, cosines, kept):
    keys, values, exists, keep, weight = case(3)
    wanted = merge(keys, values, exists, keep, Merge(0.5, keys=True, recent=0), weight)
    monkeypatch.setattr(module, "COSINES", cosines)
    monkeypatch.setattr(module, "KEPT", kept)
    got = merge(keys, values, exists, keep, Merge(0.5, keys=True, recent=0), weight)
    assert_close(got.values_NV, wanted.values_NV)
    assert torch.equal(got.weight_N, wanted.weight_N)


def test_nothing_counts_twice():
    """Two evictions one after the other hold as much as what came, as long as everything is merged."""
    keys, values, exists, _, _ = case(5)
    keep = torch.zeros_like(exists)
    keep[:, ::3] = exists[:, ::3]
    first = merge(keys, values, exists, keep, Merge(-1.0, recent=0))
    some = keep.any(-1)
    assert float(first.weight_N.sum()) == int(exists[some].sum())
    mean = (first.values_NV * first.weight_N[:, None]).sum(0)
    assert_close(mean, values[exists & some[:, None]].sum(0))
    dense, weight = values.clone(), torch.ones_like(exists).float()
    dense[keep], weight[keep] = first.values_NV, first.weight_N
    again = keep.clone()
    again[:, ::2] = False
    left = again.any(-1)
    second = merge(keys, dense, keep, again, Merge(-1.0, recent=0), weight)
    assert float(second.weight_N.sum()) == int(exists[left].sum())
    assert_close((second.values_NV * second.weight_N[:, None]).sum(0), values[exists & left[:, None]].sum(0))


def test_what_nothing_goes_to_stays_to_the_bit():
    keys, values, exists, keep, _ = case(7)
    values = values.bfloat16()
    got = merge(keys, values, exists, keep, Merge(1.0, recent=0))
    assert torch.equal(got.values_NV, values[keep & exists]) and bool((got.weight_N == 1).all())


def test_what_is_no_entry_may_be_anything():
    keys, values, exists, keep, _ = case(9)
    wanted = merge(keys, values, exists, keep, Merge(0.2, recent=0))
    keys, values = keys.clone(), values.clone()
    keys[~exists], values[~exists] = torch.nan, torch.inf
    got = merge(keys, values, exists, keep, Merge(0.2, recent=0))
    assert torch.equal(got.values_NV, wanted.values_NV) and torch.equal(got.weight_N, wanted.weight_N)


@pytest.mark.parametrize("threshold", [-1.01, 1.5, float("nan")])
def test_a_threshold_is_a_cosine(threshold):
    with pytest.raises(ValueError, match="threshold"):
        Merge(threshold=threshold)


def test_runs_want_a_threshold_that_is_known():
    with pytest.raises(ValueError, match="runs end where"):
        Merge("moving", among="run")
