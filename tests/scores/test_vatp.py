from dataclasses import replace

import pytest
import torch

from retain.scores import h2o, vatp
from tests.close import assert_close
from tests.naive import (
    SHAPES,
    naive_attention,
    naive_pool,
    naive_running_mass,
    naive_value,
    random_evidence,
    shaped_evidence,
)
from tests.scores.test_h2o import _counted


def _naive(evidence, window, pool=None, pool_size=7):
    """`window` 0: the running sum."""
    attention = naive_attention(evidence)
    (B, H, T), G = evidence.keys_BHTD.shape[:3], evidence.group
    naive = torch.full((B, H, T), float("-inf"), dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            rows = [sum(attention[b, q, -window:]) / max(window, 1) for q in range(h * G, h * G + G)]
            mass = sum(naive_pool(row, pool, pool_size, T - window) for row in rows) / G
            for i in range(T):
                if evidence.valid_BT[b, i]:
                    paid = mass[i] if window else naive_running_mass(attention, b, h, i, G)
                    naive[b, h, i] = paid * naive_value(evidence, b, h, i)
    return naive


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("pool", [None, "max", "avg"])
def test_vatp_of_a_window_is_its_formula(shape, pool):
    evidence, window = shaped_evidence(shape)
    score = vatp(evidence, window=window, pool=pool, pool_size=3)
    assert (score.unit, score.window) == ("mass", window)
    assert_close(score.values_BHT, _naive(evidence, window, pool, 3))


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_vatp_of_all_queries_is_its_formula_counted_or_made(shape):
    evidence, _ = shaped_evidence(shape, num_queries=None)
    naive = _naive(evidence, 0)
    score = vatp(evidence, attention="running", chunk=5)
    assert score.window == 0
    assert_close(score.values_BHT, naive)
    assert_close(vatp(_counted(evidence), attention="running").values_BHT, naive)


def test_values_of_one_size_leave_attention_alone():
    evidence = random_evidence(pads=(0, 0))
    evidence = replace(evidence, values_BHTD=torch.full_like(evidence.values_BHTD, -1 / 3))
    assert_close(vatp(evidence, attention="running").values_BHT, h2o(evidence).values_BHT.double())


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="attention is 'window' or 'running'; got 'mean'"):
        vatp(random_evidence(), attention="mean")
    with pytest.raises(ValueError, match="'running' with pool='max': pass pool=None, or attention='window'"):
        vatp(random_evidence(), attention="running", pool="max")
    with pytest.raises(ValueError, match="vatp sums the attention of every query, .* last 8 of 24"):
        vatp(random_evidence(pads=(0,), num_tokens=24, num_queries=8), attention="running")
