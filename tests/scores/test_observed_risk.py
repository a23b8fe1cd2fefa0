import pytest
import torch

from retain.scores import observed_risk
from retain.scores.window import pool_entries
from tests.close import assert_close
from tests.naive import naive_attention, naive_norm, random_evidence


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("pool", [None, "avg", "max"])
def test_observed_risk_is_its_formula(group, pool):
    evidence = random_evidence(group=group)
    attention = pool_entries(naive_attention(evidence)[:, :, -6:], pool, 3, window=6)
    naive = torch.full((2, 2, 14), float("-inf"), dtype=torch.float64)
    for b in range(2):
        for q in range(2 * group):
            for i in range(14):
                if evidence.valid_BT[b, i]:
                    worst = max(float(attention[b, q, j, i]) for j in range(6)) * naive_norm(
                        evidence, b, q, i
                    )
                    naive[b, q // group, i] = max(float(naive[b, q // group, i]), worst)
    assert_close(observed_risk(evidence, window=6, pool=pool, pool_size=3).values_BHT, naive)


def test_the_norm_is_inside_the_maximum():
    """A head that attends less but writes more decides; a mean norm outside the maximum would say "
    "otherwise."""
    evidence = random_evidence(pads=(0,), num_heads=1)
    evidence.output_weight_QDE[1] *= 100
    attention = naive_attention(evidence)[:, :, -6:].amax(2)
    risk = observed_risk(evidence, window=6).values_BHT
    for i in range(14):
        heads = [float(attention[0, q, i]) * naive_norm(evidence, 0, q, i) for q in range(2)]
        assert float(risk[0, 0, i]) == pytest.approx(max(heads), rel=1e-5)
