import pytest
import torch

from retain.scores import snapkv
from retain.scores.snapkv import pooled_mass
from tests.close import assert_close
from tests.naive import SHAPED, assert_heads_close, mean, naive_pooled, shaped_evidence


@pytest.mark.parametrize(("shape", "layer"), SHAPED)
@pytest.mark.parametrize("aggregate", ["mean", "max"])
@pytest.mark.parametrize("order", ["pool_first", "group_first"])
@pytest.mark.parametrize(("pool", "pool_size"), [("avg", 5), ("max", 7), (None, 5)])
def test_snapkv_is_its_formula(order, pool, pool_size, aggregate, shape, layer):
    evidence, window = shaped_evidence(shape, layer)
    settings = {"pool": pool, "pool_size": pool_size, "order": order, "aggregate": aggregate}
    score = snapkv(evidence, window=window, **settings)
    assert (score.window, score.first_BHT) == (window, None)
    naive = naive_pooled(evidence, window, pool, pool_size, order, max if aggregate == "max" else mean)
    assert_heads_close(score.values_BHT, naive)


def test_float64_evidence_is_rounded_once_by_the_defaults():
    evidence, window = shaped_evidence("group4", dtype=torch.float64)
    naive = naive_pooled(evidence, window, "avg", 5, "pool_first")
    valid = evidence.valid_BT[:, None].expand_as(naive)
    assert_close(pooled_mass(evidence, window, "avg", 5, name="snapkv")[valid], naive[valid], ops=10)
    assert_heads_close(snapkv(evidence, window=window).values_BHT, naive)
