from dataclasses import replace

import pytest
import torch

from retain.fusion import FUSIONS, floor, fuse
from retain.presets import Policy
from retain.scores import Score, masked_score
from tests.close import assert_close

VALID = torch.arange(9) >= torch.tensor([[0], [3]])


def _score(seed: int, unit: str = "risk", *, ties: bool = False) -> Score:
    values = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(seed))
    return masked_score((values * 3).floor() if ties else values, VALID, unit)


def _share(row: list[float], i: int) -> float:
    exists = [k for k in range(len(row)) if row[k] > float("-inf")]
    return sum(row[k] < row[i] or (row[k] == row[i] and k < i) for k in exists) / (len(exists) - 1)


@pytest.mark.parametrize("how", sorted(FUSIONS))
@pytest.mark.parametrize("weight", [0.5, torch.tensor([0.1, 0.5, 0.9])])
def test_fusions_are_their_formulas(how, weight):
    observed, learned = _score(0, ties=True), _score(1)
    fused = fuse(observed, learned, how, weight=weight)
    naive = torch.full((2, 3, 9), float("-inf"), dtype=torch.float64)
    for b in range(2):
        for h in range(3):
            w = float(weight) if isinstance(weight, float) else float(weight[h])
            rows = observed.values_BHT[b, h].tolist(), learned.values_BHT[b, h].tolist()
            for i in range(9):
                if VALID[b, i]:
                    o, l = rows[0][i], rows[1][i]
                    naive[b, h, i] = {
                        "max": max(o, l),
                        "observed": o,
                        "learned": l,
                        "log_linear": o ** (1 - w) * l**w,
                        "rank_blend": (1 - w) * _share(rows[0], i) + w * _share(rows[1], i),
                    }[how]
    assert_close(fused.values_BHT, naive)
    assert fused.unit == ("rank" if how == "rank_blend" else "risk")


def test_max_keeps_what_either_side_fears_for():
    observed, learned = _score(0), _score(1)
    fused = fuse(observed, learned).values_BHT
    assert (fused >= observed.values_BHT).all() and (fused >= learned.values_BHT).all()


def test_the_floor_is_its_formula():
    score = _score(2)
    lifted = floor(score, "mean").values_BHT
    for b in range(2):
        for h in range(3):
            row = [x for x in score.values_BHT[b, h].tolist() if x > float("-inf")]
            wanted = [max(x, sum(row) / len(row)) for x in row]
            assert lifted[b, h, 9 - len(row) :].tolist() == pytest.approx(wanted, rel=1e-6)
    assert floor(score, None) is score
    with pytest.raises(ValueError, match="floor is 'mean' or None; got 'median'"):
        floor(score, "median")


def test_unlike_units_are_not_fused():
    with pytest.raises(
        ValueError, match="observed score is in 'mass' while the learned one is in 'risk'.*observed_risk"
    ):
        fuse(_score(0, "mass"), _score(1), "max")
    with pytest.raises(ValueError, match="'log_linear' takes two scores in 'risk'; got 'mass' and 'risk'"):
        fuse(_score(0, "mass"), _score(1), "log_linear")
    assert fuse(_score(0, "mass"), _score(1), "rank_blend").unit == "rank"


def test_missing_scores_unknown_fusions_and_other_shapes_are_refused():
    with pytest.raises(
        ValueError, match="fusion 'max' needs the learned score.*pass gates, or use fusion 'observed'"
    ):
        fuse(_score(0), None)
    with pytest.raises(ValueError, match="fusion 'observed' needs the observed score.*use fusion 'learned'"):
        fuse(None, _score(0), "observed")
    with pytest.raises(ValueError, match="unknown fusion 'maxx': did you mean 'max'"):
        fuse(_score(0), _score(1), "maxx")
    other = Score(torch.zeros(2, 3, 8), "risk")
    with pytest.raises(ValueError, match=r"observed scores \[2, 3, 9\] and learned scores \[2, 3, 8\]"):
        fuse(_score(0), other)


def test_calibrated_weights_are_those_that_the_gate_brings():
    observed, learned = _score(0), _score(1)
    weight = torch.tensor([0.1, 0.5, 0.9])
    for how in ("log_linear", "rank_blend"):
        bringing = replace(learned, fusion_weights={how: weight})
        fused = fuse(observed, bringing, how, weight="calibrated")
        assert torch.equal(fused.values_BHT, fuse(observed, learned, how, weight=weight).values_BHT)
        other = "rank_blend" if how == "log_linear" else "log_linear"
        with pytest.raises(
            ValueError, match=f"for fusion '{other}'.*these have them for: {how}.; train them"
        ):
            fuse(observed, bringing, other, weight="calibrated")
        with pytest.raises(ValueError, match="weight 'fitted'.*a number in 0..1, or 'calibrated'"):
            fuse(observed, bringing, how, weight="fitted")
    with pytest.raises(ValueError, match="these have them for: none"):
        fuse(observed, learned, "log_linear", weight="calibrated")


def test_weights_that_nobody_reads_are_refused_with_the_policy():
    with pytest.raises(ValueError, match="'calibrated' would not be read by fusion 'max': take 'log_linear'"):
        Policy("own", "observed_risk", learned=True, fusion="max", fusion_weight="calibrated")
    with pytest.raises(ValueError, match="lies in 0..1 or is 'calibrated', got 1.5"):
        Policy("own", "observed_risk", learned=True, fusion="log_linear", fusion_weight=1.5)
