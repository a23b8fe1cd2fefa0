import pytest
import torch

from retain.scores import defensive
from retain.scores.window import pool_entries
from tests.close import assert_close
from tests.naive import naive_attention, naive_norm, random_evidence

WINDOW, T, G = 6, 14, 2


def _naive(evidence, pool, norm):
    attention = naive_attention(evidence)[:, :, -WINDOW:]
    split = T - WINDOW
    naive = torch.full((2, 2, T), float("-inf"), dtype=torch.float64)
    for b in range(2):
        exists = [i for i in range(T) if evidence.valid_BT[b, i]]
        before = [i for i in exists if i < split]
        norms = {
            (h, i): sum(naive_norm(evidence, b, q, i) for q in range(h * G, h * G + G)) / G
            for h in range(2)
            for i in exists
        }
        for h in range(2):
            worst = dict.fromkeys(exists, 0.0)
            for q in range(h * G, h * G + G):
                for j in range(WINDOW):
                    row = attention[b, q, j]
                    pooled = pool_entries(row, pool, 3, window=WINDOW)
                    for part in (before, [i for i in exists if i >= split]):
                        mass = sum(float(row[i]) for i in part)
                        pooled_mass = sum(float(pooled[i]) for i in part)
                        for i in part:
                            worst[i] = max(worst[i], float(pooled[i]) * mass / pooled_mass)
            floor = sum(worst[i] for i in before) / len(before)
            for i in exists:
                weight = {
                    "raw": norms[h, i],
                    "head_share": norms[h, i] / (norms[0, i] + norms[1, i]),
                    "token_sum": norms[h, i] / sum(norms[h, k] for k in before),
                }[norm]
                naive[b, h, i] = max(worst[i], floor) * weight
    return naive


@pytest.mark.parametrize("norm", ["raw", "head_share", "token_sum"])
@pytest.mark.parametrize("pool", [None, "avg", "max"])
def test_defensive_is_its_formula(norm, pool):
    evidence = random_evidence()
    score = defensive(evidence, window=WINDOW, pool=pool, pool_size=3, norm=norm)
    assert score.unit == ("risk" if norm == "raw" else "mass")
    assert_close(score.values_BHT, _naive(evidence, pool, norm))


def test_a_window_over_everything_has_no_floor():
    score = defensive(random_evidence(pads=(0,)), window=T)
    assert score.values_BHT.isfinite().all()


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="norm is 'raw', 'head_share' or 'token_sum'; got 'l2'"):
        defensive(random_evidence(), window=6, norm="l2")
