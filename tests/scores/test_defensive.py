import itertools
from functools import cache

import pytest

from retain.scores import defensive
from tests.naive import (
    SHAPED,
    assert_heads_close,
    mean,
    naive_attention,
    naive_norm,
    naive_pool,
    naive_scores,
    random_evidence,
    shaped_evidence,
)


def _naive(evidence, window, *, pool, pool_size, norm, value_norm_place, aggregate):
    attention, G = naive_attention(evidence)[:, :, -window:], evidence.group
    H, T = evidence.num_heads, evidence.num_seen
    split, over = T - window, max if aggregate == "max" else mean

    @cache
    def size(b, h, i):
        return mean([naive_norm(evidence, b, q, i) for q in range(h * G, h * G + G)])

    def divisor(b, h, i, before):
        return {
            "raw": lambda: 1.0,
            "head_share": lambda: sum(size(b, k, i) for k in range(H)),
            "token_sum": lambda: sum(size(b, h, k) for k in before) or 1.0,
        }[norm]()

    @cache
    def worst(b, h):
        """Risk of each entry before the floor."""
        exists = [i for i in range(T) if evidence.valid_BT[b, i]]
        before, paid = [i for i in exists if i < split], {i: [] for i in exists}
        for q, j in itertools.product(range(h * G, h * G + G), range(window)):
            row = attention[b, q, j]
            pooled = naive_pool(row, pool, pool_size, split)
            for part in (before, [i for i in exists if i >= split]):
                mass, left = sum(float(row[i]) for i in part), sum(float(pooled[i]) for i in part)
                for i in part:
                    inside = naive_norm(evidence, b, q, i) / divisor(b, h, i, before)
                    share = float(pooled[i]) * (mass / left if left else 0.0)
                    paid[i].append(share * inside if value_norm_place == "inside" else share)
        return {i: over(numbers) for i, numbers in paid.items()}, before

    def value(b, h, i):
        risk, before = worst(b, h)
        lifted = max(risk[i], sum(risk[k] for k in before) / max(1, len(before)))
        return lifted if value_norm_place == "inside" else lifted * size(b, h, i) / divisor(b, h, i, before)

    first = naive_scores(evidence, lambda b, h, i: attention[b, h * G : h * G + G, :, i].mean().item())
    return naive_scores(evidence, value), first


@pytest.mark.parametrize("aggregate", ["max", "mean"])
@pytest.mark.parametrize("value_norm_place", ["after_floor", "inside"])
@pytest.mark.parametrize("norm", ["raw", "head_share", "token_sum"])
@pytest.mark.parametrize(("pool", "pool_size"), [(None, 3), ("avg", 5), ("max", 3)])
@pytest.mark.parametrize(("shape", "layer"), SHAPED)
def test_defensive_is_its_formula(shape, layer, norm, pool, pool_size, value_norm_place, aggregate):
    evidence, window = shaped_evidence(shape, layer)
    settings = {"norm": norm, "value_norm_place": value_norm_place, "aggregate": aggregate}
    settings |= {"pool": pool, "pool_size": pool_size}
    score = defensive(evidence, window=window, **settings)
    values, first = _naive(evidence, window, **settings)
    assert (score.unit, score.window) == ("risk" if norm == "raw" else "mass", window)
    assert_heads_close(score.values_BHT, values)
    assert_heads_close(score.first_BHT, first)


def test_the_defaults_are_the_released_order_with_the_raw_norm():
    evidence, window = shaped_evidence("group4")
    settings = {"pool": "avg", "norm": "raw", "value_norm_place": "after_floor", "aggregate": "max"}
    values, _ = _naive(evidence, window, pool_size=5, **settings)
    assert_heads_close(defensive(evidence, window=window).values_BHT, values)


def test_a_window_over_everything_has_no_floor():
    score = defensive(random_evidence(pads=(0,)), window=14)
    assert score.values_BHT.isfinite().all()
