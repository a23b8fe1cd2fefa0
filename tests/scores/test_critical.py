import pytest
import torch

from retain.scores import critical, value_norm_l2
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


def _naive_norm_l2(evidence, b, q, i):
    value, weight = evidence.values_BHTD[b, q // evidence.group, i], evidence.output_weight_QDE[q]
    D, E = weight.shape
    written = [sum(float(value[d]) * float(weight[d, e]) for d in range(D)) for e in range(E)]
    return sum(x * x for x in written) ** 0.5


def _naive(evidence, window, pool, pool_size, eps, norm):
    attention = naive_attention(evidence)[:, :, -window:]
    (B, H, T), G = evidence.keys_BHTD.shape[:3], evidence.group
    norm_of = naive_norm if norm == "l1" else _naive_norm_l2
    values = torch.full((B, H, T), float("-inf"), dtype=torch.float64)
    first = values.clone()
    for b in range(B):
        for h in range(H):
            heads = range(h * G, h * G + G)
            rows = [sum(attention[b, q, j] for j in range(window)) / window for q in heads]
            mass = sum(naive_pool(row, pool, pool_size, T - window) for row in rows) / G
            for i in range(T):
                if evidence.valid_BT[b, i]:
                    first[b, h, i] = mass[i]
                    size = sum(norm_of(evidence, b, q, i) for q in heads) / G
                    values[b, h, i] = (float(mass[i]) + eps) * size
    return values, first


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize(("pool", "pool_size"), [("avg", 5), ("max", 7), (None, 5)])
def test_critical_is_its_formula(shape, norm, pool, pool_size):
    evidence, window = shaped_evidence(shape)
    settings = {"pool": pool, "pool_size": pool_size, "eps": 0.01, "norm": norm}
    score = critical(evidence, window=window, **settings)
    values, first = _naive(evidence, window, **settings)
    assert score.unit == ("risk" if norm == "l1" else "mass")
    assert score.window == window
    assert_heads_close(score.values_BHT, values)
    assert_heads_close(score.first_BHT, first)


@pytest.mark.parametrize("layer", LAYERS)
def test_critical_in_special_layers(layer):
    evidence, window = shaped_evidence("group4")
    evidence = special_layer(evidence, layer)
    score = critical(evidence, window=window)
    values, first = _naive(evidence, window, "avg", 5, 1e-4, "l1")
    assert_heads_close(score.values_BHT, values)
    assert_heads_close(score.first_BHT, first)


def test_what_nobody_attends_to_ranks_by_its_value():
    evidence = random_evidence(pads=(0,), sharp=40.0)
    score = critical(evidence, window=6, pool=None)
    unseen = (score.first_BHT < 1e-9) & (score.first_BHT > float("-inf"))
    assert unseen.sum() > 4
    for b, h, i in unseen.nonzero().tolist():
        size = sum(naive_norm(evidence, b, q, i) for q in (2 * h, 2 * h + 1)) / 2
        assert float(score.values_BHT[b, h, i]) == pytest.approx(1e-4 * size, rel=1e-4)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("floats_at_once", [1, 200, 2**24])
def test_the_l2_norm_is_its_formula_however_it_is_chunked(group, floats_at_once):
    evidence = random_evidence(group=group, num_tokens=7, pads=(0, 0, 2))
    naive = [
        [[_naive_norm_l2(evidence, b, q, i) for i in range(7)] for q in range(2 * group)] for b in range(3)
    ]
    norm = value_norm_l2(evidence.values_BHTD, evidence.output_weight_QDE, floats_at_once=floats_at_once)
    assert_heads_close(norm, torch.tensor(naive, dtype=torch.float64))


def test_the_l2_norm_of_what_the_projection_drops_is_nothing_and_never_nan():
    values = torch.randn(2, 2, 50, 6)
    weight = torch.randn(4, 6, 3)
    weight[:, 3:] = 0.0
    values[..., :3] = 0.0
    assert torch.equal(value_norm_l2(values, weight), torch.zeros(2, 4, 50))
    # A direction that the projection drops, by rows that cancel: rounding makes squares below zero.
    weight[:, 3:] = -weight[:, :3]
    dropped = torch.randn(2, 2, 50, 3).repeat(1, 1, 1, 2)
    assert value_norm_l2(dropped, weight).isfinite().all()


def test_half_precision_is_normed_in_float32():
    evidence = random_evidence(dtype=torch.bfloat16)
    norm = value_norm_l2(evidence.values_BHTD, evidence.output_weight_QDE)
    assert norm.dtype == torch.float32
    assert_heads_close(
        norm, value_norm_l2(evidence.values_BHTD.double(), evidence.output_weight_QDE.double())
    )


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="norm is 'l1' or 'l2'; got 'raw'"):
        critical(random_evidence(), window=6, norm="raw")
    with pytest.raises(ValueError, match=r"at least 0; got -0.1"):
        critical(random_evidence(), window=6, eps=-0.1)
