import pytest

from retain.scores import critical
from tests.naive import (
    SHAPED,
    assert_heads_close,
    mean,
    naive_norm,
    naive_pooled,
    naive_scores,
    shaped_evidence,
)


@pytest.mark.parametrize(("shape", "layer"), SHAPED)
@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize(("pool", "pool_size"), [("avg", 5), ("max", 7), (None, 5)])
@pytest.mark.parametrize("eps", [{}, {"eps": 0.01}])
def test_critical_is_its_formula(shape, layer, norm, pool, pool_size, eps):
    evidence, window = shaped_evidence(shape, layer)
    score = critical(evidence, window=window, pool=pool, pool_size=pool_size, norm=norm, **eps)
    assert score.unit == ("risk" if norm == "l1" else "mass")
    assert score.window == window
    mass, granted = naive_pooled(evidence, window, pool, pool_size, "pool_first"), eps.get("eps", 1e-4)
    G = evidence.group

    def number(b, h, i):
        norms = [naive_norm(evidence, b, q, i, 1 if norm == "l1" else 2) for q in range(h * G, h * G + G)]
        return (float(mass[b, h, i]) + granted) * mean(norms)

    assert_heads_close(score.values_BHT, naive_scores(evidence, number))
    assert_heads_close(score.first_BHT, mass)
