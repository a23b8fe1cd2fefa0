import math
from dataclasses import replace

import pytest
import torch

from retain.scores import cake
from tests.close import assert_close
from tests.naive import (
    SHAPED,
    assert_heads_close,
    mean,
    naive_attention,
    naive_pooled,
    random_evidence,
    shaped_evidence,
)


def _variance(numbers):
    return sum((x - mean(numbers)) ** 2 for x in numbers) / (len(numbers) - 1)


def _naive_weight(evidence, window, *, tau1=1.6, tau2=0.6, variance="query"):
    attention = naive_attention(evidence)[:, :, -window:].tolist()
    weight = torch.zeros(len(attention), dtype=torch.float64)
    for b, heads in enumerate(attention):
        dispersion = shift = 0.0
        for i in range(evidence.num_seen - window):
            if evidence.valid_BT[b, i]:
                rows = [[paid[i] for paid in head] for head in heads]
                dispersion -= sum(a * math.log(a + 1e-10) for row in rows for a in row)
                one_each = variance == "query"
                shift += sum(map(_variance, rows)) if one_each else _variance([mean(row) for row in rows])
        weight[b] = dispersion ** (1 / tau1) * shift ** (1 / tau2)
    return weight


@pytest.mark.parametrize(("shape", "layer"), SHAPED)
@pytest.mark.parametrize(("pool", "pool_size"), [("avg", 5), ("max", 7), (None, 5)])
@pytest.mark.parametrize("gamma", [{"gamma": 0.0}, {}])
@pytest.mark.parametrize("order", [{}, {"order": "group_first"}])
def test_cake_is_its_formula(shape, layer, pool, pool_size, gamma, order):
    evidence, window = shaped_evidence(shape, layer)
    score = cake(evidence, window=window, pool=pool, pool_size=pool_size, **gamma, **order)
    assert (score.unit, score.window) == ("mass", window)
    weight = gamma.get("gamma", 200.0)
    naive = naive_pooled(
        *(evidence, window, pool, pool_size, order.get("order", "pool_first")),
        of=lambda paid: mean(paid) + weight * _variance(paid),
    )
    # The variance is a difference of numbers of the size of the mean: it rounds a few times over.
    assert_heads_close(score.values_BHT, naive, ops=4)


@pytest.mark.parametrize(("shape", "layer"), SHAPED)
@pytest.mark.parametrize("variance", ["query", "head"])
@pytest.mark.parametrize("taus", [{}, {"tau1": 1.0, "tau2": 2.0}])
def test_the_layers_preference_is_its_formula(shape, layer, variance, taus):
    """One at a time, since their sizes differ; a sequence that is all window prefers nothing."""
    evidence, window = shaped_evidence(shape, layer)
    weight = cake(evidence, window=window, variance=variance, **taus).layer_weight_B
    assert weight.dtype == torch.float64
    for own, naive in zip(weight, _naive_weight(evidence, window, variance=variance, **taus), strict=True):
        assert_close(own, naive, dtype=torch.float32, ops=4)
    if shape == "wide":
        assert (weight > 0).tolist() == [True, True, False] and float(weight[2]) == 0.0


def test_the_epsilon_of_the_logarithm_is_that_of_the_released_code():
    """Where attention is no larger than some 1e-9, it decides; in float64 nothing else is as large."""
    evidence = random_evidence(pads=(0, 3), num_tokens=15, num_queries=5, sharp=0.5, dtype=torch.float64)
    keys, queries = evidence.keys_BHTD.clone(), evidence.queries_BQSD.clone()
    queries[..., 0], keys[..., 0] = 1 / evidence.scaling, 0.0
    keys[:, :, :10, 0] = -20.0
    evidence = replace(evidence, keys_BHTD=keys, queries_BQSD=queries)
    paid = naive_attention(evidence)[..., :10]
    assert 0 < float(paid.max()) < 1e-8
    weights = zip(cake(evidence, window=5).layer_weight_B, _naive_weight(evidence, 5), strict=True)
    for own, naive in weights:
        assert_close(own, naive, ops=100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_on_one_entry_is_not_spread_and_does_not_shift(dtype):
    """In float64 the logarithm of 1 + 1e-10 is above zero, and the dispersion would be below."""
    evidence = random_evidence(pads=(0,), dtype=dtype)
    keys = torch.zeros_like(evidence.keys_BHTD)
    keys[:, :, 2] = 1e4
    evidence = replace(evidence, keys_BHTD=keys, queries_BQSD=torch.ones_like(evidence.queries_BQSD))
    assert cake(evidence, window=6).layer_weight_B.tolist() == [0.0]
