import pytest

from retain.scores import observed_risk
from tests.naive import (
    SHAPED,
    assert_heads_close,
    naive_attention,
    naive_norm,
    naive_pool,
    naive_scores,
    random_evidence,
    shaped_evidence,
)


def _naive(evidence, window, pool=None, pool_size=5):
    attention, G = naive_attention(evidence)[:, :, -window:], evidence.group
    pooled = [
        [
            [naive_pool(row, pool, pool_size, evidence.num_seen - window).tolist() for row in head]
            for head in heads
        ]
        for heads in attention
    ]

    def number(b, h, i):
        heads = range(h * G, h * G + G)
        return max(naive_norm(evidence, b, q, i) * max(row[i] for row in pooled[b][q]) for q in heads)

    return naive_scores(evidence, number)


@pytest.mark.parametrize(("shape", "layer"), SHAPED)
@pytest.mark.parametrize(("pool", "pool_size"), [(None, 5), ("avg", 5), ("max", 3)])
def test_observed_risk_is_its_formula(shape, layer, pool, pool_size):
    evidence, window = shaped_evidence(shape, layer)
    score = observed_risk(evidence, window=window, pool=pool, pool_size=pool_size)
    assert (score.unit, score.window) == ("risk", window)
    assert_heads_close(score.values_BHT, _naive(evidence, window, pool, pool_size))


def test_the_norm_is_inside_the_maximum():
    """A head that attends less but writes more decides; a mean norm outside the maximum would not let it."""
    evidence = random_evidence(pads=(0,), num_heads=1)
    evidence.output_weight_QDE[1] *= 100
    assert_heads_close(observed_risk(evidence, window=6).values_BHT, _naive(evidence, 6))
