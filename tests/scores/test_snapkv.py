import pytest
import torch

from retain.scores import snapkv
from retain.scores.snapkv import pooled_mass
from tests.close import assert_close
from tests.naive import (
    LAYERS,
    SHAPES,
    assert_heads_close,
    naive_attention,
    naive_pool,
    random_evidence,
    shaped_evidence,
    special_layer,
)


def _naive(evidence, window, pool, pool_size, order, aggregate):
    attention = naive_attention(evidence)[:, :, -window:]
    (B, H, T), G = evidence.keys_BHTD.shape[:3], evidence.group
    naive = torch.full((B, H, T), float("-inf"), dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            rows = []
            for q in range(h * G, h * G + G):
                paid = [[float(attention[b, q, j, i]) for j in range(window)] for i in range(T)]
                row = [sum(x) / window if aggregate == "mean" else max(x) for x in paid]
                rows.append(torch.tensor(row, dtype=torch.float64))
            if order == "pool_first":
                pooled = sum(naive_pool(row, pool, pool_size, T - window) for row in rows) / G
            else:
                pooled = naive_pool(sum(rows) / G, pool, pool_size, T - window)
            for i in range(T):
                if evidence.valid_BT[b, i]:
                    naive[b, h, i] = pooled[i]
    return naive


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("aggregate", ["mean", "max"])
@pytest.mark.parametrize("order", ["pool_first", "group_first"])
@pytest.mark.parametrize(("pool", "pool_size"), [("avg", 5), ("max", 7), (None, 5)])
def test_snapkv_is_its_formula(order, pool, pool_size, aggregate, shape):
    evidence, window = shaped_evidence(shape)
    settings = {"pool": pool, "pool_size": pool_size, "order": order, "aggregate": aggregate}
    score = snapkv(evidence, window=window, **settings)
    assert score.window == window
    assert score.first_BHT is None
    assert_heads_close(score.values_BHT, _naive(evidence, window, **settings))


def test_float64_evidence_is_rounded_once():
    evidence, window = shaped_evidence("group4", dtype=torch.float64)
    naive = _naive(evidence, window, "avg", 5, "pool_first", "mean")
    mass = pooled_mass(evidence, window, "avg", 5, name="snapkv")
    valid = evidence.valid_BT[:, None].expand_as(naive)
    assert_close(mass[valid], naive[valid], ops=10)


@pytest.mark.parametrize("layer", LAYERS)
def test_snapkv_in_special_layers(layer):
    evidence, window = shaped_evidence("group4")
    evidence = special_layer(evidence, layer)
    naive = _naive(evidence, window, "avg", 5, "pool_first", "mean")
    assert_heads_close(snapkv(evidence, window=window).values_BHT, naive)


def test_the_orders_differ_for_max_and_only_for_max():
    evidence = random_evidence()
    for pool, alike in (("avg", True), ("max", False)):
        first, second = (
            snapkv(evidence, window=6, pool=pool, order=order).values_BHT
            for order in ("pool_first", "group_first")
        )
        assert torch.allclose(first, second, rtol=1e-5) is alike


def test_unknown_variants_are_refused():
    with pytest.raises(ValueError, match="snapkv order is 'pool_first' or 'group_first'; got 'last'"):
        snapkv(random_evidence(), window=6, order="last")
    with pytest.raises(ValueError, match="snapkv aggregate is 'mean' or 'max'; got 'sum'"):
        snapkv(random_evidence(), window=6, aggregate="sum")
