from dataclasses import replace

import pytest
import torch

from retain.budget.statement import Budget
from retain.fusion import FUSIONS, IN_RISK, floor, fuse
from retain.policy import decide_layers
from retain.presets import Policy, load_policy
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


def _prior_of(observed: list[float], learned: list[float], i: int) -> float:
    """The head's mean of what was observed, dealt out as the gate says."""
    exists = [k for k in range(len(observed)) if observed[k] > float("-inf")]
    mean_observed = sum(observed[k] for k in exists) / len(exists)
    mean_learned = sum(learned[k] for k in exists) / len(exists)
    return max(observed[i], learned[i] * mean_observed / mean_learned)


def _vetoed(learned: list[float], i: int, w: float) -> bool:
    exists = [k for k in range(len(learned)) if learned[k] > float("-inf")]
    return i in sorted(exists, key=lambda k: (learned[k], k))[: round(w * len(exists))]


@pytest.mark.parametrize("how", sorted(FUSIONS))
@pytest.mark.parametrize("weight", [0.5, torch.tensor([0.1, 0.5, 0.9])])
@pytest.mark.parametrize("ties", [(True, False), (False, True)], ids=["observed ties", "learned ties"])
def test_fusions_are_their_formulas(how, weight, ties):
    observed, learned = _score(0, ties=ties[0]), _score(1, ties=ties[1])
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
                        "sum": o + l,
                        "observed": o,
                        "learned": l,
                        "prior": _prior_of(*rows, i),
                        "veto": min(o, l) if _vetoed(rows[1], i, w) else o,
                        "log_linear": o ** (1 - w) * l**w,
                        "rank_blend": (1 - w) * _share(rows[0], i) + w * _share(rows[1], i),
                    }[how]
    assert_close(fused.values_BHT, naive)
    assert fused.unit == ("rank" if how == "rank_blend" else "risk")


def test_a_prior_that_says_the_same_of_all_is_defensivekvs_floor():
    observed = _score(0)
    wanted = floor(observed, "mean").values_BHT
    for number in (0.25, 1e-30, 0.0):
        same = masked_score(torch.full((2, 3, 9), number), VALID, "risk")
        assert_close(fuse(observed, same, "prior").values_BHT, wanted.double())


def test_a_prior_lifts_by_the_heads_mean_whatever_the_gates_own_scale():
    observed, learned = _score(0), _score(1)
    fused = fuse(observed, learned, "prior").values_BHT
    assert (fused >= observed.values_BHT).all() and (fused > observed.values_BHT).any()
    # Powers of two round nothing away: exactly the same, at either end of what float32 can hold.
    for power in (-100, 5, 100):
        scaled = replace(learned, values_BHT=learned.values_BHT * 2.0**power)
        assert torch.equal(fuse(observed, scaled, "prior").values_BHT, fused)
    # The smallest numbers that there are: one entry of nine gets all of the mean.
    tiny = masked_score(torch.zeros(2, 3, 9), VALID, "risk")
    tiny.values_BHT[:, :, 5] = 1e-45
    mean_0 = observed.values_BHT[0].mean(-1)
    assert_close(fuse(observed, tiny, "prior").values_BHT[0, :, 5], (9 * mean_0).double())
    # Where nothing was observed the prior alone is left, and its mean is the head's mean.
    quiet = observed.values_BHT.clone()
    quiet[:, :, 4:8] = 0.0
    quiet = Score(quiet, "risk")
    alone = fuse(quiet, Score(learned.values_BHT, "risk"), "prior").values_BHT[:, :, 4:8]
    exists = VALID[:, None].expand(2, 3, 9)
    means = [score.masked_fill(~exists, 0.0).sum(-1) for score in (quiet.values_BHT, learned.values_BHT)]
    assert_close(alone, (learned.values_BHT[:, :, 4:8] * (means[0] / means[1])[..., None]).double())
    # A head that was not seen to risk anything has no mean to deal out.
    nothing = masked_score(torch.zeros(2, 3, 9), VALID, "risk")
    assert torch.equal(fuse(nothing, learned, "prior").values_BHT, nothing.values_BHT)


def test_a_veto_takes_back_and_adds_nothing():
    observed, learned = _score(0), _score(1)
    o, smaller = observed.values_BHT, torch.minimum(observed.values_BHT, learned.values_BHT)
    before = o
    for weight in (0.0, 0.2, 0.5, 0.8, 1.0):
        fused = fuse(observed, learned, "veto", weight=weight).values_BHT
        assert ((fused == o) | (fused == smaller)).all()
        assert (fused <= before).all()  # whoever is vetoed stays vetoed as the share grows
        before = fused
    assert torch.equal(fuse(observed, learned, "veto", weight=0.0).values_BHT, o)
    assert torch.equal(before, smaller)
    # Of entries that the gate ranks alike the earlier ones are lower: 4 of 9, and 3 of 6.
    nothing = masked_score(torch.zeros(2, 3, 9), VALID, "risk")
    fused = fuse(observed, nothing, "veto", weight=0.5).values_BHT
    zero = [[row == 0.0 for row in fused[b, 0].tolist()] for b in range(2)]
    assert zero == [[True] * 4 + [False] * 5, [False] * 3 + [True] * 3 + [False] * 3]


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
                Score(own.values_BHT[b, h, there][None, None], "risk") for own in (observed, learned)
            )
            assert_close(fused[b, h, there], fuse(one, other, how).values_BHT[0, 0].double())
    assert torch.equal(observed.values_BHT, given[0]) and torch.equal(learned.values_BHT, given[1])
    # A head that holds nothing.
    empty = Score(torch.full((1, 1, 4), float("-inf")), "risk")
    assert fuse(empty, empty, how).values_BHT.isneginf().all()


@pytest.mark.parametrize("how", sorted(set(FUSIONS) - {"observed", "learned"}))
@pytest.mark.parametrize("side", ["observed", "learned"])
@pytest.mark.parametrize(
    ("scope", "lift"), [("head", "null"), ("layer", "null"), ("model", "null"), ("model", "mean")]
)
def test_what_is_no_number_is_refused_and_not_hidden(how, side, scope, lift):
    layers = make_evidence(0, 2, 12, (0, 2))
    scores = {"observed": learned_scores(layers, 0), "learned": learned_scores(layers, 1)}
    scores[side][1].values_BHT[1, 0, 7] = float("nan")
    fused = fuse(scores["observed"][1], scores["learned"][1], how).values_BHT
    assert fused.isnan().nonzero().tolist() == [[1, 0, 7]]
    lift = "null" if how == "prior" else lift
    policy = load_policy("fused", [f"fusion={how}", f"scope={scope}", f"floor={lift}", "draw=null"])
    policy = replace(policy, protection=replace(policy.protection, sinks=1, recent=1, minimum=0))
    with pytest.raises(ValueError, match="the score of sequence 1, head 0, entry 7 is NaN"):
        decide_layers(policy, layers, Budget(tokens_per_head=6), **scores)


def test_the_floor_is_its_formula():
    score = _score(2)
    lifted = floor(score, "mean").values_BHT
    for b in range(2):
        for h in range(3):
            row = [x for x in score.values_BHT[b, h].tolist() if x > float("-inf")]
            wanted = [max(x, sum(row) / len(row)) for x in row]
            assert lifted[b, h, 9 - len(row) :].tolist() == pytest.approx(wanted, rel=1e-6)
    assert floor(score, None) is score
    refused("floor is 'mean' or None; got 'median'", floor, score, "median")


def test_unlike_units_are_not_fused():
    with pytest.raises(
        ValueError, match="observed score is in 'mass' while the learned one is in 'risk'.*observed_risk"
    ):
        fuse(_score(0, "mass"), _score(1), "max")
    for observed, learned in (("mass", "risk"), ("risk", "rank"), ("rank", "rank")):
        wanted = f"'sum' adds numbers of one unit.*in '{observed}' while .*in '{learned}'.*'rank_blend'"
        refused(wanted, fuse, _score(0, observed), _score(1, learned), "sum")
    for unit in ("risk", "mass"):
        assert fuse(_score(0, unit), _score(1, unit), "sum").unit == unit
    assert set(IN_RISK) == {"log_linear", "prior", "veto"}
    for how in IN_RISK:
        for observed, learned in (("mass", "risk"), ("risk", "rank")):
            wanted = f"'{how}' takes two scores in 'risk'; got '{observed}' and '{learned}'.*'rank_blend'"
            refused(wanted, fuse, _score(0, observed), _score(1, learned), how)
    assert fuse(_score(0, "mass"), _score(1), "rank_blend").unit == "rank"


def test_missing_scores_unknown_fusions_and_other_shapes_are_refused():
    refused(
        "fusion 'max' needs the learned score.*pass gates, or use fusion 'observed'", fuse, _score(0), None
    )
    with pytest.raises(ValueError, match="fusion 'observed' needs the observed score.*use fusion 'learned'"):
        fuse(None, _score(0), "observed")
    refused("unknown fusion 'maxx': did you mean 'max'", fuse, _score(0), _score(1), "maxx")
    other = Score(torch.zeros(2, 3, 8), "risk")
    refused(r"observed scores \[2, 3, 9\] and learned scores \[2, 3, 8\]", fuse, _score(0), other)


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
    refused("these have them for: none", fuse, observed, learned, "log_linear", weight="calibrated")

    with pytest.raises(ValueError, match="weight 'calibrated' for fusion 'veto': no calibration fits one"):
        fuse(observed, learned, "veto", weight="calibrated")


REFUSED = [
    ("observed_risk", {"fusion": "max", "fusion_weight": "calibrated"}, "would not be read by fusion 'max'"),
    (
        "observed_risk",
        {"fusion": "veto", "fusion_weight": "calibrated"},
        "would not be read by fusion 'veto'",
    ),
    ("observed_risk", {"fusion_weight": 1.5}, "expected float .* at most 1 | .*'calibrated'.*, got 1.5"),
    (
        *("observed_risk", {"fusion": "prior", "floor": "mean", "scope": "model"}),
        "'prior' puts the gate in the place of the floor, and floor 'mean'.*take floor null",
    ),
    ("keydiff", {"fusion": "sum"}, "fusion 'sum' adds numbers, and 'keydiff' is in 'rank'.*'risk' or 'mass'"),
    ("lru", {"fusion": "sum"}, "fusion 'sum' adds numbers, and 'lru' is in 'rank'.*'risk' or 'mass'"),
    *(
        ("snapkv", {"fusion": how}, f"'{how}' takes two .* 'snapkv' is in 'mass'.*rank_blend")
        for how in IN_RISK
    ),
]


@pytest.mark.parametrize(("observed", "settings", "message"), REFUSED)
def test_policies_that_cannot_be_meant_are_refused_with_the_next_step(observed, settings, message):
    refused(message, Policy, "own", observed, learned=True, **settings)


def test_the_unit_of_a_fused_policy():
    for name, how, unit in (
        ("snapkv", "sum", "mass"),
        ("observed_risk", "sum", "risk"),
        *(("observed_risk", how, "risk") for how in IN_RISK),
    ):
        assert Policy("own", name, learned=True, fusion=how).unit == unit
    assert load_policy("fused", ["fusion=prior", "floor=null"]).unit == "risk"
