from dataclasses import replace

import pytest
import torch

from retain.budget.statement import Budget
from retain.fusion import FUSIONS, fuse
from retain.policy import decide_layers
from retain.presets import load_policy
from retain.scores import Score, masked_score
from tests.close import assert_close
from tests.evictions import learned_scores, make_evidence
from tests.refused import refused

VALID = torch.arange(9) >= torch.tensor([[0], [3]])


def _score(seed: int, unit: str = "risk", *, ties: bool = False) -> Score:
    values = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(seed))
    return masked_score((values * 3).floor() if ties else values, VALID, unit)


def _share(row: list[float], i: int) -> float:
    exists = [k for k in range(len(row)) if row[k] > float("-inf")]
    return sum(row[k] < row[i] or (row[k] == row[i] and k < i) for k in exists) / (len(exists) - 1)


@pytest.mark.parametrize("how", sorted(FUSIONS))
@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("ties", [(True, False), (False, True)], ids=["observed ties", "learned ties"])
def test_fusions_are_their_formulas(how, weight, ties):
    observed, learned = _score(0, ties=ties[0]), _score(1, ties=ties[1])
    fused = fuse(observed, learned, how, weight=weight)
    naive = torch.full((2, 3, 9), float("-inf"), dtype=torch.float64)
    for b in range(2):
        for h in range(3):
            rows = observed.values_BHT[b, h].tolist(), learned.values_BHT[b, h].tolist()
            for i in range(9):
                if VALID[b, i]:
                    o, l = rows[0][i], rows[1][i]
                    naive[b, h, i] = {
                        "max": max(o, l),
                        "sum": o + l,
                        "observed": o,
                        "learned": l,
                        "rank_blend": (1 - weight) * _share(rows[0], i) + weight * _share(rows[1], i),
                    }[how]
    assert_close(fused.values_BHT, naive)
    assert fused.unit == ("rank" if how == "rank_blend" else "risk")


@pytest.mark.parametrize("how", sorted(FUSIONS))
def test_a_fusion_reads_what_the_head_holds_and_nothing_else(how):
    """A head's entries get the same numbers alone, without gaps, padding and the other sequences."""
    draw = torch.Generator().manual_seed(3)
    held = (torch.rand(2, 3, 9, generator=draw) < 0.6) & VALID[:, None]
    held[:, :, -1] = True
    held[1, 2, :-1] = False  # a head with one entry
    observed, learned = (
        Score(_score(seed).values_BHT.masked_fill(~held, float("-inf")), "risk") for seed in (0, 1)
    )
    given = [score.values_BHT.clone() for score in (observed, learned)]
    fused = fuse(observed, learned, how).values_BHT
    assert torch.equal(fused.isneginf(), ~held) and not fused.isnan().any()
    for b in range(2):
        for h in range(3):
            there = held[b, h]
            one, other = (
                Score(each.values_BHT[b, h, there][None, None], "risk") for each in (observed, learned)
            )
            assert_close(fused[b, h, there], fuse(one, other, how).values_BHT[0, 0].double())
    assert torch.equal(observed.values_BHT, given[0]) and torch.equal(learned.values_BHT, given[1])
    # A head that holds nothing.
    empty = Score(torch.full((1, 1, 4), float("-inf")), "risk")
    assert fuse(empty, empty, how).values_BHT.isneginf().all()


@pytest.mark.parametrize("how", sorted(set(FUSIONS) - {"observed", "learned"}))
@pytest.mark.parametrize("side", ["observed", "learned"])
@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_what_is_no_number_is_refused_and_not_hidden(how, side, scope):
    layers = make_evidence(0, 2, 12, (0, 2))
    scores = {"observed": learned_scores(layers, 0), "learned": learned_scores(layers, 1)}
    scores[side][1].values_BHT[1, 0, 7] = float("nan")
    fused = fuse(scores["observed"][1], scores["learned"][1], how).values_BHT
    assert fused.isnan().nonzero().tolist() == [[1, 0, 7]]
    policy = load_policy("learned", [f"fusion={how}", f"scope={scope}", "draw=null"])
    policy = replace(policy, protection=replace(policy.protection, sinks=1, recent=1, minimum=0))
    with pytest.raises(ValueError, match="the score of sequence 1, head 0, entry 7 is NaN"):
        decide_layers(policy, layers, Budget(tokens_per_head=6), **scores)


def test_unlike_units_are_not_fused():
    for how, observed, learned in (("max", "mass", "risk"), ("sum", "mass", "risk"), ("sum", "rank", "rank")):
        wanted = f"'{how}' takes numbers of one unit.*in '{observed}' while .*in '{learned}'.*'rank_blend'"
        refused(wanted, fuse, _score(0, observed), _score(1, learned), how)
    assert fuse(_score(0, "mass"), _score(1, "mass"), "sum").unit == "mass"
    assert fuse(_score(0, "mass"), _score(1), "rank_blend").unit == "rank"


def test_missing_scores_and_other_shapes_are_refused():
    said = "fusion 'max' needs the learned score.*pass gates, or use fusion 'observed'"
    refused(said, fuse, _score(0), None)
    said = "fusion 'observed' needs the observed score.*use fusion 'learned'"
    refused(said, fuse, None, _score(0), "observed")
    other = Score(torch.zeros(2, 3, 8), "risk")
    refused(r"observed scores \[2, 3, 9\] and learned scores \[2, 3, 8\]", fuse, _score(0), other)
