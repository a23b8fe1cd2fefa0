import pytest
import torch

from retain.scores import defensive
from tests.naive import (
    SHAPED,
    assert_heads_close,
    naive_attention,
    naive_norm,
    naive_pool,
    random_evidence,
    shaped_evidence,
)


def _naive(evidence, window, *, pool, pool_size, norm, value_norm_place, aggregate):
    attention = naive_attention(evidence)[:, :, -window:]
    (B, H, T), G = evidence.keys_BHTD.shape[:3], evidence.group
    split = T - window
    values = torch.full((B, H, T), float("-inf"), dtype=torch.float64)
    first = values.clone()
    for b in range(B):
        exists = [i for i in range(T) if evidence.valid_BT[b, i]]
        before = [i for i in exists if i < split]
        size_q = {(q, i): naive_norm(evidence, b, q, i) for q in range(H * G) for i in exists}
        size_h = {
            (h, i): sum(size_q[q, i] for q in range(h * G, h * G + G)) / G for h in range(H) for i in exists
        }
        for h in range(H):
            heads = range(h * G, h * G + G)
            divisor = {
                i: {
                    "raw": 1.0,
                    "head_share": sum(size_h[k, i] for k in range(H)),
                    "token_sum": sum(size_h[h, k] for k in before) or 1.0,
                }[norm]
                for i in exists
            }
            paid = {i: [] for i in exists}
            for q in heads:
                for j in range(window):
                    row = attention[b, q, j]
                    pooled = naive_pool(row, pool, pool_size, split)
                    for part in (before, [i for i in exists if i >= split]):
                        mass = sum(float(row[i]) for i in part)
                        pooled_mass = sum(float(pooled[i]) for i in part)
                        for i in part:
                            inside = size_q[q, i] / divisor[i] if value_norm_place == "inside" else 1.0
                            kept = mass / pooled_mass if pooled_mass else 0.0
                            paid[i].append(float(pooled[i]) * kept * inside)
            worst = {i: max(x) if aggregate == "max" else sum(x) / len(x) for i, x in paid.items()}
            floor = sum(worst[i] for i in before) / max(1, len(before))
            for i in exists:
                after = size_h[h, i] / divisor[i] if value_norm_place == "after_floor" else 1.0
                values[b, h, i] = max(worst[i], floor) * after
                first[b, h, i] = sum(float(attention[b, q, j, i]) for q in heads for j in range(window)) / (
                    G * window
                )
    return values, first


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
