import math
from dataclasses import replace

import pytest
import torch

from retain.scores import cake
from tests.close import assert_close
from tests.naive import (
    LAYERS,
    SHAPES,
    alone,
    assert_heads_close,
    naive_attention,
    naive_pooled,
    random_evidence,
    shaped_evidence,
    special_layer,
)


def _variance(numbers):
    mean = sum(numbers) / len(numbers)
    return sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)


def _naive(evidence, window, *, gamma=200.0, pool="avg", pool_size=5, order="pool_first"):
    def mean_and_variance(paid):
        return sum(paid) / window + gamma * _variance(paid)

    return naive_pooled(evidence, window, pool, pool_size, order, mean_and_variance)


def _naive_weight(evidence, window, *, tau1=1.6, tau2=0.6, variance="query"):
    attention = naive_attention(evidence)[:, :, -window:]
    B, Q, _, T = attention.shape
    weight = torch.zeros(B, dtype=torch.float64)
    for b in range(B):
        before = [i for i in range(T - window) if evidence.valid_BT[b, i]]
        dispersion = shift = 0.0
        for i in before:
            for q in range(Q):
                for j in range(window):
                    a = float(attention[b, q, j, i])
                    dispersion -= a * math.log(a + 1e-10)
            rows = [[float(attention[b, q, j, i]) for j in range(window)] for q in range(Q)]
            if variance == "query":
                shift += sum(_variance(row) for row in rows)
            else:
                shift += _variance([sum(row) / window for row in rows])
        weight[b] = dispersion ** (1 / tau1) * shift ** (1 / tau2)
    return weight


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize(("pool", "pool_size"), [("avg", 5), ("max", 7), (None, 5)])
@pytest.mark.parametrize("gamma", [0.0, 200.0])
@pytest.mark.parametrize("order", ["pool_first", "group_first"])
def test_cake_is_its_formula(shape, pool, pool_size, gamma, order):
    evidence, window = shaped_evidence(shape)
    settings = {"gamma": gamma, "pool": pool, "pool_size": pool_size, "order": order}
    score = cake(evidence, window=window, **settings)
    assert (score.unit, score.window) == ("mass", window)
    # The variance is a difference of numbers of the size of the mean: it rounds a few times over.
    assert_heads_close(score.values_BHT, _naive(evidence, window, **settings), ops=4)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("variance", ["query", "head"])
def test_cake_in_special_layers(layer, variance):
    evidence, window = shaped_evidence("group4")
    evidence = special_layer(evidence, layer)
    score = cake(evidence, window=window, variance=variance)
    assert_heads_close(score.values_BHT, _naive(evidence, window), ops=4)
    naive = _naive_weight(evidence, window, variance=variance)
    for b in range(3):
        assert_close(score.layer_weight_B[b], naive[b], dtype=torch.float32, ops=4)


def test_pool_and_group_in_either_order_differ_for_max_and_only_for_max():
    evidence = random_evidence()
    for pool, alike in (("avg", True), ("max", False)):
        first, second = (
            cake(evidence, window=6, pool=pool, order=order).values_BHT
            for order in ("pool_first", "group_first")
        )
        assert torch.allclose(first, second, rtol=1e-5) is alike
    assert torch.equal(
        cake(evidence, window=6).values_BHT, cake(evidence, window=6, order="pool_first").values_BHT
    )


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("variance", ["query", "head"])
@pytest.mark.parametrize("taus", [{}, {"tau1": 1.0, "tau2": 2.0}])
def test_the_layers_preference_is_its_formula(shape, variance, taus):
    evidence, window = shaped_evidence(shape)
    weight = cake(evidence, window=window, variance=variance, **taus).layer_weight_B
    naive = _naive_weight(evidence, window, variance=variance, **taus)
    assert weight.dtype == torch.float64
    for b in range(len(naive)):  # one at a time: their sizes differ
        assert_close(weight[b], naive[b], dtype=torch.float32, ops=4)


def test_the_epsilon_of_the_logarithm_is_that_of_the_released_code():
    """Where attention is no larger than some 1e-9, it decides; in float64 nothing else is as large."""
    evidence = random_evidence(pads=(0, 3), num_tokens=15, num_queries=5, sharp=0.5, dtype=torch.float64)
    keys, queries = evidence.keys_BHTD.clone(), evidence.queries_BQSD.clone()
    queries[..., 0], keys[..., 0] = 1 / evidence.scaling, 0.0
    keys[:, :, :10, 0] = -20.0
    evidence = replace(evidence, keys_BHTD=keys, queries_BQSD=queries)
    paid = naive_attention(evidence)[..., :10]
    assert 0 < float(paid.max()) < 1e-8
    weight = cake(evidence, window=5).layer_weight_B
    naive = _naive_weight(evidence, 5)
    for b in range(2):
        assert_close(weight[b], naive[b], ops=100)


def test_a_sequence_that_is_all_window_prefers_nothing():
    evidence, window = shaped_evidence("wide")
    weight = cake(evidence, window=window).layer_weight_B
    assert (weight > 0).tolist() == [True, True, False]
    assert float(weight[2]) == 0.0


@pytest.mark.parametrize("variance", ["query", "head"])
def test_the_preference_is_of_a_sequence_alone(variance):
    evidence = random_evidence(pads=(0, 5, 2), num_tokens=19)
    weight = cake(evidence, window=6, variance=variance).layer_weight_B
    for b in range(3):
        single = cake(alone(evidence, b), window=6, variance=variance).layer_weight_B
        assert_close(weight[b : b + 1], single, dtype=torch.float32, ops=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_on_one_entry_is_not_spread_and_does_not_shift(dtype):
    """In float64 the logarithm of 1 + 1e-10 is above zero, and the dispersion would be below."""
    evidence = random_evidence(pads=(0,), dtype=dtype)
    keys = torch.zeros_like(evidence.keys_BHTD)
    keys[:, :, 2] = 1e4
    evidence = replace(evidence, keys_BHTD=keys, queries_BQSD=torch.ones_like(evidence.queries_BQSD))
    assert cake(evidence, window=6).layer_weight_B.tolist() == [0.0]


def test_bad_settings_are_refused():
    evidence = random_evidence(num_heads=1, group=1)
    with pytest.raises(ValueError, match="variance is 'query' or 'head'; got 'heads'"):
        cake(evidence, window=6, variance="heads")
    with pytest.raises(ValueError, match="cake order is 'pool_first' or 'group_first'; got 'last'"):
        cake(evidence, window=6, order="last")
    with pytest.raises(ValueError, match="at least 2 queries; got window=1"):
        cake(evidence, window=1)
    with pytest.raises(ValueError, match=r"temperatures are positive; got tau1=0, tau2=0.6"):
        cake(evidence, window=6, tau1=0)
    with pytest.raises(ValueError, match="needs at least 2 query heads; got 1: pass variance='query'"):
        cake(evidence, window=6, variance="head")
