from dataclasses import replace

import pytest
import torch

from retain.scores import h2o, vatp
from tests.naive import (
    LAYERS,
    SHAPES,
    assert_heads_close,
    naive_attention,
    naive_pool,
    naive_running_mass,
    naive_value,
    random_evidence,
    shaped_evidence,
    special_layer,
)
from tests.scores.test_h2o import _counted


def _naive(evidence, window, pool=None, pool_size=7, order="pool_first"):
    """`window` 0: the running sum."""
    attention = naive_attention(evidence)
    (B, H, T), G = evidence.keys_BHTD.shape[:3], evidence.group
    naive = torch.full((B, H, T), float("-inf"), dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            rows = [sum(attention[b, q, -window:]) / max(window, 1) for q in range(h * G, h * G + G)]
            if order == "group_first":
                rows = [sum(rows) / G] * G
            mass = sum(naive_pool(row, pool, pool_size, T - window) for row in rows) / G
            for i in range(T):
                if evidence.valid_BT[b, i]:
                    paid = mass[i] if window else naive_running_mass(attention, b, h, i, G)
                    naive[b, h, i] = paid * naive_value(evidence, b, h, i)
    return naive


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("pool", [None, "max", "avg"])
@pytest.mark.parametrize("order", ["pool_first", "group_first"])
def test_vatp_of_a_window_is_its_formula(shape, pool, order):
    evidence, window = shaped_evidence(shape)
    score = vatp(evidence, window=window, pool=pool, pool_size=3, order=order)
    assert (score.unit, score.window) == ("mass", window)
    assert_heads_close(score.values_BHT, _naive(evidence, window, pool, 3, order))


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_vatp_of_all_queries_is_its_formula_counted_or_made(shape):
    evidence, _ = shaped_evidence(shape, num_queries=None)
    naive = _naive(evidence, 0)
    score = vatp(evidence, attention="running", chunk=5)
    assert score.window == 0
    assert_heads_close(score.values_BHT, naive)
    assert_heads_close(vatp(_counted(evidence), attention="running").values_BHT, naive)


@pytest.mark.parametrize("layer", LAYERS)
def test_vatp_in_special_layers(layer):
    evidence, window = shaped_evidence("group4")
    evidence = special_layer(evidence, layer)
    assert_heads_close(vatp(evidence, window=window).values_BHT, _naive(evidence, window))
    every = special_layer(shaped_evidence("group4", num_queries=None)[0], layer)
    assert_heads_close(vatp(every, attention="running").values_BHT, _naive(every, 0))


def test_the_orders_differ_for_max_and_the_default_pools_first():
    evidence = random_evidence()
    first, second, default = (
        vatp(evidence, window=6, pool="max", **order).values_BHT
        for order in ({"order": "pool_first"}, {"order": "group_first"}, {})
    )
    assert not torch.allclose(first, second, rtol=1e-5)
    assert torch.equal(first, default)


def test_values_of_one_size_leave_attention_alone():
    evidence = random_evidence(pads=(0, 0))
    evidence = replace(evidence, values_BHTD=torch.full_like(evidence.values_BHTD, -1 / 3))
    assert_heads_close(vatp(evidence, attention="running").values_BHT, h2o(evidence).values_BHT.double())


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="attention is 'window' or 'running'; got 'mean'"):
        vatp(random_evidence(), attention="mean")
    for attention in ("window", "running"):
        with pytest.raises(ValueError, match="vatp order is 'pool_first' or 'group_first'; got 'last'"):
            vatp(random_evidence(), attention=attention, window=6, order="last")
    with pytest.raises(ValueError, match="'running' with pool='max': pass pool=None, or attention='window'"):
        vatp(random_evidence(), attention="running", pool="max")
    with pytest.raises(ValueError, match="vatp sums the attention of every query, .* last 8 of 24"):
        vatp(random_evidence(pads=(0,), num_tokens=24, num_queries=8), attention="running")
