import pytest
import torch

from retain.scores import snapkv
from retain.scores.snapkv import pooled_mass
from tests.close import assert_close
from tests.naive import (
    LAYERS,
    SHAPES,
    assert_heads_close,
    naive_pooled,
    random_evidence,
    shaped_evidence,
    special_layer,
)


def _naive(evidence, window, pool, pool_size, order, aggregate):
    of = max if aggregate == "max" else lambda paid: sum(paid) / window
    return naive_pooled(evidence, window, pool, pool_size, order, of)


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
