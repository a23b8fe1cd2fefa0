import pytest
import torch

from retain.scores import lava
from tests.naive import (
    SHAPED,
    assert_heads_close,
    naive_pooled,
    naive_scores,
    naive_value,
    random_evidence,
    shaped_evidence,
)


def _naive(evidence, window, pool, pool_size, value_max_over):
    mass = naive_pooled(evidence, window, pool, pool_size, "pool_first", group=max)
    T = evidence.num_seen

    def number(b, h, i):
        exists = [k for k in range(T) if evidence.valid_BT[b, k]]
        before = [k for k in exists if k < T - window]
        counted = exists if value_max_over == "all" or not before else before
        return float(mass[b, h, i]) * max(naive_value(evidence, b, h, k) for k in counted)

    return naive_scores(evidence, number)


@pytest.mark.parametrize(("shape", "layer"), SHAPED)
@pytest.mark.parametrize("value_max_over", ["prefix", "all"])
@pytest.mark.parametrize(("pool", "pool_size"), [("avg", 5), ("max", 7), (None, 5)])
def test_lava_is_its_formula(shape, layer, value_max_over, pool, pool_size):
    evidence, window = shaped_evidence(shape, layer)
    settings = {"pool": pool, "pool_size": pool_size, "value_max_over": value_max_over}
    score = lava(evidence, window=window, **settings)
    assert (score.unit, score.window, score.layer_weight_B) == ("mass", window, None)
    assert_heads_close(score.values_BHT, _naive(evidence, window, **settings))


def test_a_large_value_in_the_window_counts_only_for_all():
    evidence = random_evidence(pads=(0,))
    before = {over: lava(evidence, window=6, value_max_over=over).values_BHT for over in ("prefix", "all")}
    evidence.values_BHTD[:, :, -1] *= 1000
    after = {over: lava(evidence, window=6, value_max_over=over).values_BHT for over in ("prefix", "all")}
    assert torch.equal(before["prefix"], after["prefix"])
    assert (after["all"] > 100 * before["all"]).all()
