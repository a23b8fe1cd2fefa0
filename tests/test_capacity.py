"""The price of an eviction: read along a cascade, inverted, and against plain loops."""

import math
import re
from dataclasses import replace

import pytest
import torch

from retain.budget.allocation import Allocation
from retain.budget.capacity import (
    FINEST,
    Capacity,
    CapacityMeter,
    Guard,
    capacity_of,
    enlarge_to_limit,
    enlarged,
    needed,
    rounded_up,
    stored_limit,
)
from retain.budget.cascade import Cascade, keep_sets
from retain.budget.priority_sampling import Draw
from retain.budget.shares import Split
from retain.budget.statement import Budget
from retain.policy import candidates_of, plan_of, shape_of
from retain.presets import Policy
from retain.protection import Protection
from retain.scores import Score
from retain.two_stage import FirstStage
from tests.evictions import make_evidence
from tests.refused import refused

FEW = Protection(sinks=1, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=2)
SPLITS = {
    "head": {"scope": "head"},
    "layer": {"scope": "layer"},
    "model": {"scope": "model"},
    "lifted": {"scope": "model", "floor": "mean"},
    "entropy": {"scope": "layer", "allocation": Allocation(layers="entropy")},
    "pyramid": {"scope": "head", "allocation": Allocation(layers="pyramid", beta=2.0)},
    "normalised": {"scope": "model", "allocation": Allocation(normalise="head")},
    "drawn": {"scope": "model", "draw": Draw(0.2)},
    "drawn in layers": {"scope": "layer", "draw": Draw(0.2)},
}


def made(split: str, ratio: float, *, seed: int = 0, pads: tuple[int, ...] = (0, 7), adverse: bool = False):
    """Shares and candidates of random risks over three layers, heavy-tailed as risks are. What is drawn is
    drawn at random, or, adverse, the smallest risks first."""
    policy = Policy("own", learned=True, protection=FEW, **SPLITS[split])
    layers = make_evidence(seed, 2, 40, pads)
    draw = torch.Generator().manual_seed(seed)
    valid_BT = layers[0].valid_BT
    plan = plan_of(policy, Budget(keep_ratio=ratio), valid_BT, [shape_of(layer) for layer in layers])
    candidates = []
    for place, layer in enumerate(layers):
        risk_BHT = torch.randn(layer.keys_BHTD.shape[:3], generator=draw).mul(1.5).exp() * (1 + place)
        score_BHT = risk_BHT.masked_fill(~valid_BT[:, None], float("-inf"))
        lots_BHT = torch.rand(risk_BHT.shape, generator=torch.Generator().manual_seed(place))
        key_BHT = (1 / risk_BHT if adverse else risk_BHT / lots_BHT).masked_fill(
            ~valid_BT[:, None], float("-inf")
        )
        candidates.append(candidates_of(plan, Score(score_BHT, "risk", draw_BHT=key_BHT)))
    return plan.shares, candidates


def naive(candidates, keeps, limit: float):
    """Price, lost share and kept entries by three loops."""
    answer = []
    for b in range(len(keeps[0])):
        price, lost, total, kept, entries = 0.0, 0.0, 0.0, 0, 0
        for layer, keep_BHT in zip(candidates, keeps, strict=True):
            for risk_T, keep_T in zip(layer.score_BHT[b].tolist(), keep_BHT[b].tolist(), strict=True):
                for risk, keep in zip(risk_T, keep_T, strict=True):
                    if risk == -math.inf:
                        continue
                    entries, total = entries + 1, total + risk
                    if keep:
                        kept += 1
                    else:
                        price, lost = max(price, risk), lost + risk
        answer.append((price, lost / total, kept, entries, price > limit))
    return answer


@pytest.mark.parametrize("split", SPLITS)
def test_price_and_loss_are_those_of_plain_loops(split):
    shares, candidates = made(split, 0.3)
    keeps = keep_sets(shares, candidates)
    got = capacity_of(shares, candidates, keeps, 3.0)
    for b, (price, lost, kept, entries, short) in enumerate(naive(candidates, keeps, 3.0)):
        assert got.price_B[b] == pytest.approx(price, rel=1e-6)
        assert got.lost_B[b] == pytest.approx(lost, rel=1e-6)
        assert (got.kept_B[b], got.entries_B[b], got.short_B[b]) == (kept, entries, short)


@pytest.mark.parametrize("split", SPLITS)
def test_a_cascade_that_is_read_along_says_what_one_decision_says(split):
    shares, candidates = made(split, 0.25, seed=3)
    cascade, gauge = Cascade(shares), CapacityMeter(2.0, shares.split, follows=shares.split.crosses_layers)
    for layer in candidates:
        gauge.add(layer, *cascade.add(layer))
    along = gauge.read()
    at_once = capacity_of(shares, candidates, keep_sets(shares, candidates), 2.0)
    assert along.price_B == pytest.approx(at_once.price_B) and along.lost_B == pytest.approx(at_once.lost_B)
    for name in ("kept_B", "entries_B", "need_B"):
        assert getattr(along, name) == getattr(at_once, name)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("limit", [1.0, 4.0, 12.0])
def test_what_can_be_afforded_is_the_least_budget_that_keeps_all_above_the_limit(split, limit):
    shares, candidates = made(split, 0.2, seed=5)
    stated = capacity_of(shares, candidates, keep_sets(shares, candidates), limit)
    own, keeps, got = enlarge_to_limit(shares, candidates, limit)
    assert not any(got.short_B) and got.raised == any(stated.short_B)
    for one, two in zip(keep_sets(own, candidates), keeps, strict=True):
        assert torch.equal(one, two)
    for b, short in enumerate(stated.short_B):
        if not short:  # the others are left as they were stated
            assert own.totals.stated_B[b] == shares.totals.stated_B[b]
            continue
        assert stated.need_B[b] <= stated.entries_B[b] and got.kept_B[b] > stated.kept_B[b]
        if split in ("head", "layer", "model"):
            assert own.totals.stated_B[b] == stated.need_B[b]
            heads = 1 if split == "model" else sum(shares.totals.heads_L)
            less = list(own.totals.stated_B)
            less[b] -= heads
        elif split in ("lifted", "drawn"):
            # What heads lift above the limit competes with what lies above it, and a draw may find some of
            # that: enough, and perhaps more.
            assert own.totals.stated_B[b] == stated.need_B[b]
            continue
        else:
            # Found by halving: so much less is too little, or less than was stated.
            less = list(own.totals.stated_B)
            less[b] -= 2 * stated.entries_B[b] // FINEST + sum(shares.totals.heads_L)
            less[b] = max(less[b], shares.totals.stated_B[b])
        fewer = enlarged(shares, less)
        assert capacity_of(fewer, candidates, keep_sets(fewer, candidates), limit).short_B[b]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
def test_where_a_share_is_drawn_what_is_needed_is_the_least_that_does_whatever_is_drawn(share, monkeypatch):
    monkeypatch.setitem(SPLITS, "drawn", {"scope": "model", "draw": Draw(share)})
    shares, candidates = made("drawn", 0.2, seed=5, pads=(0,), adverse=True)
    for limit in (2.0, 4.0, 12.0):
        stated = capacity_of(shares, candidates, keep_sets(shares, candidates), limit)
        (need,), (entries,) = stated.need_B, stated.entries_B
        for total, short in ((need, False), (need + 1, False), (need - 1, True)):
            if total < entries:
                own = enlarged(shares, [total])
                got = capacity_of(own, candidates, keep_sets(own, candidates), limit)
                assert got.short_B == [short] and got.pressure_B[0] == need / total


def test_what_is_needed_by_hand():
    sure_LH, above_LH = [[1, 1], [0, 4]], [[2, 0], [0, 3]]  # a head that holds nothing counts for one
    usual = Allocation()
    assert needed(sure_LH, above_LH, Split("model", usual)) == (3 + 1 + 1 + 7, True)
    assert needed(sure_LH, above_LH, Split("layer", usual)) == (4 * 4, True)
    assert needed(sure_LH, above_LH, Split("head", usual)) == (7 * 4, True)
    assert needed(sure_LH, above_LH, Split("layer", Allocation(layers="entropy"))) == (12, False)
    assert needed(sure_LH, above_LH, Split("head", replace(usual, layers="pyramid"))) == (12, False)
    # A first stage takes places by other numbers, so that many may not do.
    for by in ("budget", "mass"):
        for scope, count in {"model": 12, "layer": 16, "head": 28}.items():
            assert needed(sure_LH, above_LH, Split(scope, usual, FirstStage(by))) == (count, False)
    # Of seven, one is drawn and six go by score; of what is sure nothing is drawn.
    sure_LH, above_LH, drawn = [[3, 1], [1, 1]], [[0, 0], [0, 6]], Draw(0.2)
    assert needed(sure_LH, above_LH, Split("model", usual, draw=drawn)) == (6 + 7, True)
    assert needed(sure_LH, [[0, 0], [0, 0]], Split("model", usual, draw=drawn)) == (6, True)
    assert needed(sure_LH, above_LH, Split("model", usual, draw=Draw(1.0))) == (12, False)
    assert not needed(sure_LH, above_LH, Split("layer", usual, draw=drawn))[1]


def test_rows_that_were_not_decided_on_lost_nothing():
    one = Capacity(2.0, (3.0,), (0.5,), (9,), (6,), (20,))
    both = one.placed([1], [10, 20])
    assert both.price_B == (0.0, 3.0) and both.kept_B == (10, 6) and both.entries_B == (10, 20)
    assert both.short_B == [False, True] and both.worst == 1
    assert both.select_batch([1]) == one
    assert one.pressure_B == [1.5] and one.ratio_B == [0.45]
    # A keep_ratio is one of what was seen, of which some may have gone before.
    later = replace(one, seen_B=(90,))
    assert later.ratio_B == [0.1] and later.placed([1], [10, 20], [50, 90]).seen_B == (50, 90)
    assert later.placed([1], [10, 20], [50, 90]).select_batch([1]) == later


def test_it_says_what_would_do():
    one = Capacity(2.0, (3.0,), (0.25,), (9,), (6,), (20,))
    assert re.search(r"keeps 6 of 20 entries.*went is 3, limit 2 \(25.0% .*About 9 .*about 0.45\)", str(one))
    assert "At least 9" in str(replace(one, enough=False))
    assert str(replace(one, limit=3.0)).startswith("within what can be afforded")
    assert str(replace(one, raised=True)).startswith("budget enlarged to 6 of 20")
    assert "sequence 1 (of 1 such) keeps 6" in str(one.placed([1], [10, 20]))
    later = replace(one, seen_B=(90,))
    assert re.search(r"keeps 6 of 20 entries.*About 9 entries would do \(keep_ratio about 0.1\)", str(later))
    assert rounded_up(0.1001) == 0.101 and rounded_up(0.2) == 0.2 and rounded_up(1.2) == 1.0


def test_in_a_batch_it_advises_what_is_enough_for_all_that_are_short():
    # The first pays more, the second needs more, and the third needs most but is not short.
    batch = Capacity(2.0, (9.0, 3.0, 1.0), (0.5, 0.2, 0.1), (30, 60, 99), (20, 20, 99), (100, 100, 100))
    assert (batch.worst, batch.fullest) == (0, 1) and batch.select_batch([0]).fullest == 0
    said = r"sequence 0 \(of 2 such\) keeps 20.*is 9, limit 2.*Sequence 1 needs about 60 .*about 0.6\)"
    assert re.search(said, str(batch))


class Stored:
    def __init__(self, record):
        self.metadata = {"calibration": {"capacity": record}}


def test_the_limit_that_gates_were_stored_with():
    assert stored_limit(None) is None and stored_limit(Stored(None)) is None
    assert stored_limit(Stored({"limit": 12})) == 12.0
    for record in ({"limit": 0}, {"limit": True}, {"limit": float("inf")}, {}, [3]):
        refused("wanted a limit above 0", stored_limit, Stored(record))


def test_wrong_guards_are_refused():
    refused("did you mean 'warn'", Guard, "wran")
    for limit in (-1.0, 0.0, math.inf, math.nan):
        refused(f"above 0 and finite; got {limit}", Guard, "warn", limit)
    shares, candidates = made("model", 0.3)
    refused("a threshold states no budget", enlarge_to_limit, replace(shares, threshold=1.0), candidates, 2.0)
