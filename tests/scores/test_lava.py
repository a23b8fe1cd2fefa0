import pytest
import torch

from retain.scores import lava
from tests.naive import (
    LAYERS,
    SHAPES,
    assert_heads_close,
    naive_attention,
    naive_pool,
    naive_value,
    random_evidence,
    shaped_evidence,
    special_layer,
)


def _naive(evidence, window, pool, pool_size, value_max_over):
    attention = naive_attention(evidence)[:, :, -window:]
    (B, H, T), G = evidence.keys_BHTD.shape[:3], evidence.group
    naive = torch.full((B, H, T), float("-inf"), dtype=torch.float64)
    for b in range(B):
        exists = [i for i in range(T) if evidence.valid_BT[b, i]]
        before = [i for i in exists if i < T - window]
        counted = exists if value_max_over == "all" or not before else before
        for h in range(H):
            largest = max(naive_value(evidence, b, h, k) for k in counted)
            for q in range(h * G, h * G + G):
                row = sum(attention[b, q, j] for j in range(window)) / window
                pooled = naive_pool(row, pool, pool_size, T - window)
                for i in exists:
                    naive[b, h, i] = max(float(naive[b, h, i]), largest * float(pooled[i]))
    return naive


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("value_max_over", ["prefix", "all"])
@pytest.mark.parametrize(("pool", "pool_size"), [("avg", 5), ("max", 7), (None, 5)])
def test_lava_is_its_formula(shape, value_max_over, pool, pool_size):
    evidence, window = shaped_evidence(shape)
    settings = {"pool": pool, "pool_size": pool_size, "value_max_over": value_max_over}
    score = lava(evidence, window=window, **settings)
    assert (score.unit, score.window) == ("mass", window)
    assert score.layer_weight_B is None
    assert_heads_close(score.values_BHT, _naive(evidence, window, **settings))


@pytest.mark.parametrize("layer", LAYERS)
def test_lava_in_special_layers(layer):
    evidence, window = shaped_evidence("group4")
    evidence = special_layer(evidence, layer)
    naive = _naive(evidence, window, "max", 7, "prefix")
    assert_heads_close(lava(evidence, window=window).values_BHT, naive)


def test_a_large_value_in_the_window_counts_only_for_all():
    evidence = random_evidence(pads=(0,))
    before = {over: lava(evidence, window=6, value_max_over=over).values_BHT for over in ("prefix", "all")}
    evidence.values_BHTD[:, :, -1] *= 1000
    after = {over: lava(evidence, window=6, value_max_over=over).values_BHT for over in ("prefix", "all")}
    assert torch.equal(before["prefix"], after["prefix"])
    assert (after["all"] > 100 * before["all"]).all()


def test_an_unknown_maximum_is_refused():
    with pytest.raises(ValueError, match="value_max_over is 'prefix' or 'all'; got 'window'"):
        lava(random_evidence(), window=6, value_max_over="window")
