from dataclasses import replace

import pytest
import torch

from retain.scores import h2o, vatp
from tests.naive import (
    SHAPED,
    assert_heads_close,
    naive_attention,
    naive_pooled,
    naive_running_mass,
    naive_scores,
    naive_value,
    random_evidence,
    shaped_evidence,
)
from tests.scores.test_h2o import counted


@pytest.mark.parametrize(("shape", "layer"), SHAPED)
@pytest.mark.parametrize("pool", [None, "max", "avg"])
@pytest.mark.parametrize("order", [{}, {"order": "group_first"}])
def test_vatp_of_a_window_is_its_formula(shape, layer, pool, order):
    evidence, window = shaped_evidence(shape, layer)
    score = vatp(evidence, window=window, pool=pool, pool_size=3, **order)
    assert (score.unit, score.window) == ("mass", window)
    mass = naive_pooled(evidence, window, pool, 3, **{"order": "pool_first", **order})
    naive = naive_scores(evidence, lambda b, h, i: float(mass[b, h, i]) * naive_value(evidence, b, h, i))
    assert_heads_close(score.values_BHT, naive)


@pytest.mark.parametrize(("shape", "layer"), SHAPED)
def test_vatp_of_all_queries_is_its_formula_counted_or_made(shape, layer):
    evidence, _ = shaped_evidence(shape, layer, num_queries=None)
    attention, G = naive_attention(evidence), evidence.group
    naive = naive_scores(
        evidence,
        lambda b, h, i: naive_running_mass(attention, b, h, i, G) * naive_value(evidence, b, h, i),
    )
    score = vatp(evidence, attention="running", chunk=5)
    assert score.window == 0
    assert_heads_close(score.values_BHT, naive)
    assert_heads_close(vatp(counted(evidence), attention="running").values_BHT, naive)


def test_values_of_one_size_leave_attention_alone():
    evidence = random_evidence(pads=(0, 0))
    evidence = replace(evidence, values_BHTD=torch.full_like(evidence.values_BHTD, -1 / 3))
    assert_heads_close(vatp(evidence, attention="running").values_BHT, h2o(evidence).values_BHT.double())
