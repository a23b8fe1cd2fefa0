import pytest
import torch

from retain.scores import snapkv
from retain.scores.window import pool_entries
from tests.close import assert_close
from tests.naive import naive_attention, random_evidence


@pytest.mark.parametrize("order", ["pool_first", "group_first"])
@pytest.mark.parametrize(("pool", "pool_size"), [("avg", 5), ("max", 7), (None, 5)])
def test_snapkv_is_its_formula(order, pool, pool_size):
    G, window = 2, 6
    evidence = random_evidence()
    attention = naive_attention(evidence)[:, :, -window:]
    naive = torch.full((2, 2, 14), float("-inf"), dtype=torch.float64)
    for b in range(2):
        for h in range(2):
            rows = [sum(attention[b, q, j] for j in range(window)) / window for q in range(h * G, h * G + G)]
            if order == "pool_first":
                pooled = sum(pool_entries(row, pool, pool_size, window=window) for row in rows) / G
            else:
                pooled = pool_entries(sum(rows) / G, pool, pool_size, window=window)
            for i in range(14):
                if evidence.valid_BT[b, i]:
                    naive[b, h, i] = pooled[i]
    score = snapkv(evidence, window=window, pool=pool, pool_size=pool_size, order=order)
    assert_close(score.values_BHT, naive)


def test_the_orders_differ_for_max_and_only_for_max():
    evidence = random_evidence()
    for pool, alike in (("avg", True), ("max", False)):
        first, second = (
            snapkv(evidence, window=6, pool=pool, order=order).values_BHT
            for order in ("pool_first", "group_first")
        )
        assert torch.allclose(first, second, rtol=1e-5) is alike


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order is 'pool_first' or 'group_first'; got 'last'"):
        snapkv(random_evidence(), window=6, order="last")
