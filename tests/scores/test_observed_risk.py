import pytest
import torch

from retain.scores import observed_risk
from tests.naive import (
    LAYERS,
    SHAPES,
    assert_heads_close,
    naive_attention,
    naive_norm,
    naive_pool,
    random_evidence,
    shaped_evidence,
    special_layer,
)


def _naive(evidence, window, pool=None, pool_size=5):
    attention = naive_attention(evidence)[:, :, -window:]
    (B, H, T), G = evidence.keys_BHTD.shape[:3], evidence.group
    naive = torch.full((B, H, T), float("-inf"), dtype=torch.float64)
    for b in range(B):
        exists = [i for i in range(T) if evidence.valid_BT[b, i]]
        for h in range(H):
            for q in range(h * G, h * G + G):
                norm = {i: naive_norm(evidence, b, q, i) for i in exists}
                for j in range(window):
                    pooled = naive_pool(attention[b, q, j], pool, pool_size, T - window)
                    for i in exists:
                        naive[b, h, i] = max(float(naive[b, h, i]), norm[i] * float(pooled[i]))
    return naive


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize(("pool", "pool_size"), [(None, 5), ("avg", 5), ("max", 3)])
def test_observed_risk_is_its_formula(shape, pool, pool_size):
    evidence, window = shaped_evidence(shape)
    score = observed_risk(evidence, window=window, pool=pool, pool_size=pool_size)
    assert (score.unit, score.window) == ("risk", window)
    assert_heads_close(score.values_BHT, _naive(evidence, window, pool, pool_size))


@pytest.mark.parametrize("layer", LAYERS)
def test_observed_risk_in_special_layers(layer):
    evidence, window = shaped_evidence("group4")
    evidence = special_layer(evidence, layer)
    assert_heads_close(observed_risk(evidence, window=window).values_BHT, _naive(evidence, window))


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
