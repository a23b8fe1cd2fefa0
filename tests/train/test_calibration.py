"""Calibration: isotonic fits and thresholds against plain versions, on made-up looks."""

import itertools
import json

import pytest
import torch

from retain.attention.ranking import order_entries
from retain.gates import GateSet
from retain.gates.calibrate import LEAST_RISE, SMALLEST_SLOPE, axis
from retain.gates.decay import DecayGate
from retain.gates.lowrank import LowRankGate
from retain.gates.mlp import LinearGate
from retain.gates.qkv import QKVGate
from retain.train.calibration import fit as calibration
from retain.train.calibration import isotonic
from retain.train.calibration.fit import LayerLook, calibrate_, sampled
from tests.close import assert_close
from tests.refused import refused

H, T, LAYERS = 2, 200, (1, 3)


def fitted(score_HN, target_HN, *, K=16, space="log"):
    """The calibrator of one layer of heads."""
    return isotonic.fit_shared({0: list(score_HN)}, {0: list(target_HN)}, K=K, space=space, unit="risk")[0]


# How heads lie about each other: a factor and a power.
WRONG = {
    (layer, head): (3.0 - 2.0 * number, 0.5 + 0.4 * number)
    for number, (layer, head) in enumerate(itertools.product(LAYERS, range(H)))
}


def gates_of(gate_class=LinearGate, **sizes) -> GateSet:
    return GateSet({layer: gate_class(E=4, H=H, **sizes) for layer in LAYERS})


def looks(count: int = 4, *, seed: int = 0, signed: bool = False, length: int = T):
    """Scores that order each head rightly but for noise, and lie about how heads compare: by factors up to
    e^6, and powers."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        look = {}
        for layer in LAYERS:
            log_risk = torch.randn(H, length, generator=draw) * 1.5 - 2.0
            noise = torch.randn(H, length, generator=draw) * 0.4
            shift, power = (
                torch.tensor([WRONG[layer, head][part] for head in range(H)])[:, None] for part in (0, 1)
            )
            score = (log_risk + noise) * power + shift
            look[layer] = LayerLook(score if signed else score.exp(), log_risk.exp())
        made.append(look)
    return made


def truthful(look, signed: bool):
    """All scores of a document as they were before heads lied, in a row."""
    rows = []
    for layer, head in itertools.product(LAYERS, range(H)):
        shift, power = WRONG[layer, head]
        score = look[layer].score_HN[head]
        rows.append(((score if signed else score.log()) - shift) / power)
    return torch.cat(rows)[None]


def targets_of(look):
    return torch.cat([look[layer].target_HN.flatten() for layer in LAYERS])[None]


@pytest.mark.parametrize("signed", [False, True], ids=["risk", "signed"])
def test_heads_that_lie_about_each_other_are_put_right(signed):
    gates = gates_of(DecayGate, F=3) if signed else gates_of()
    made = looks(6, signed=signed)
    record = calibrate_(gates, made)
    assert gates.unit == "risk" and json.loads(json.dumps(record)) == record
    assert record["documents"] == {"fitted": 3, "reported": 3}
    before, after, honest = 0.0, 0.0, 0.0
    for look in made[1::2]:
        raw = [look[layer].score_HN for layer in LAYERS]
        calibrated = [gates.calibrators[str(layer)](look[layer].score_HN[None])[0] for layer in LAYERS]
        scores = (torch.cat([part.flatten() for part in parts])[None] for parts in (raw, calibrated))
        shares = (kept_shares(row, targets_of(look), (0.2,)) for row in (*scores, truthful(look, signed)))
        before, after, honest = (
            a + float(b) / 3 for a, b in zip((before, after, honest), shares, strict=True)
        )
    assert after > before + 0.05 and after > honest - 0.02
    for layer in LAYERS:
        calibrator = gates.calibrators[str(layer)]
        knots, values = calibrator.knots()
        assert bool((knots.diff(dim=-1) > 0).all()) and bool((values.diff(dim=-1) > 0).all())
        score = made[1][layer].score_HN[None]
        assert torch.equal(order_entries(calibrator(score)), order_entries(score))


def test_what_rises_strictly_is_the_nearest_that_does():
    """Against many tries beside it; a level curve is tilted about its middle, however far its knots lie."""
    draw = torch.Generator().manual_seed(6)
    values, knots = torch.randn(7, generator=draw).double(), torch.rand(7, generator=draw).cumsum(0).double()
    least = [min(SMALLEST_SLOPE * step, LEAST_RISE / 6) for step in knots.diff().tolist()]
    got = isotonic.strictly(values, knots)
    assert all(step > lowest - 1e-12 for step, lowest in zip(got.diff().tolist(), least, strict=True))
    for _ in range(300):
        other = isotonic.rising(
            got + torch.randn(7, generator=draw).double() * 0.2, torch.tensor(least, dtype=torch.float64)
        )
        assert float((other - values).square().sum()) >= float((got - values).square().sum()) - 1e-12
    far = torch.tensor([-104.0, -3.0, -2.0, -1.0], dtype=torch.float64)
    level = isotonic.strictly(torch.full((4,), -5.0, dtype=torch.float64), far)
    assert float(level.diff().min()) > 0 and float((level + 5.0).abs().max()) <= LEAST_RISE / 2 + 1e-12


def naive_kept(score, target, ratio):
    count = max(1, -int(-ratio * len(score) // 1))
    order = sorted(range(len(score)), key=lambda i: (-score[i], -i))
    return sum(target[i] for i in order[:count]) / sum(target)


def kept_shares(score_RT, target_RT, ratios):
    """Share of each row's target that its first entries by score have."""
    rows = list(zip(score_RT.tolist(), target_RT.double().tolist(), strict=True))
    return torch.tensor([[naive_kept(*row, ratio) for row in rows] for ratio in ratios]).double()


@pytest.mark.parametrize("lowest", [None, -30.0, -60.0, 0.0, "many"], ids=str)
def test_a_head_whose_scores_reach_far_down_keeps_its_level(lowest):
    """A score far below, or 0, or one in a hundred that is 0: heads still share a budget as their targets
    are."""
    draw, N = torch.Generator().manual_seed(0), 4000
    target = (torch.randn(3, N, generator=draw) - 5.0).exp()
    score = target * (0.3 * torch.randn(3, N, generator=draw)).exp()
    if lowest == "many":
        score[2, ::100] = 0.0
    elif lowest is not None:
        score[2, 5] = 0.0 if lowest == 0.0 else float(torch.tensor(lowest).exp())
    made = isotonic.fit_shared({0: list(score)}, {0: list(target)}, K=16, space="log", unit="risk")[0](
        score[None]
    )[0]
    levels = made.double().mean(1) / target.double().mean(1)
    assert bool((levels.log().abs() < 0.08).all()), levels
    kept, honest = (
        kept_shares(x.flatten()[None], target.flatten()[None], (0.1,)) for x in (made, score.clone())
    )
    assert float(kept) > float(honest) - 0.01


def test_scores_of_a_mass_that_may_be_negative_keep_their_order():
    """Query-key-value gates regress a mass without a floor: their scores below 0 are no ties."""
    draw = torch.Generator().manual_seed(3)
    gates = GateSet({layer: QKVGate(E=4, H=H, Q=2, D=2, F=3) for layer in LAYERS})
    made = []
    for _ in range(4):
        look = {}
        for layer in LAYERS:
            target = (torch.randn(H, 400, generator=draw) * 1.5 - 5.0).exp().clamp_max(1.0)
            score = 0.8 * target + 0.01 * torch.randn(H, 400, generator=draw) - 0.01
            look[layer] = LayerLook(score, target)
        made.append(look)
    record = calibrate_(gates, made, unit="mass")
    assert float((made[0][1].score_HN < 0).float().mean()) > 0.3
    assert {dims["space"] for dims in record["layers"].values()} == {"asinh"}
    for layer in LAYERS:
        score, target = made[1][layer].score_HN, made[1][layer].target_HN
        both = (score, gates.calibrators[str(layer)](score[None])[0])
        before, after = (kept_shares(row_HN, target, (0.8,)).mean() for row_HN in both)
        assert float(after) == pytest.approx(float(before), abs=2e-3)
    # The family says so, whatever was seen.
    above = [
        {layer: LayerLook(one.score_HN.abs(), one.target_HN) for layer, one in look.items()} for look in made
    ]
    assert calibrate_(gates, above, unit="mass")["layers"]["1"]["space"] == "asinh"
    other = GateSet({layer: LowRankGate(E=4, H=H, Q=2) for layer in LAYERS})
    assert calibrate_(other, above, unit="mass")["layers"]["1"]["space"] == "log"


def test_what_ages_keeps_its_order_where_it_is_kept():
    """Most entries fade at once and some hardly: these lie within a billionth of the others' scores."""
    draw, N = torch.Generator().manual_seed(4), 2000
    good = torch.rand(N, generator=draw) < 0.3
    hardly = (torch.rand(N, generator=draw) * 4.6 - 18.4).exp()
    log_beta = -torch.where(good, hardly, torch.rand(N, generator=draw) + 0.01)
    score = log_beta * (N - 1 - torch.arange(N))
    target = torch.where(good, 1.0, 0.01) * torch.rand(N, generator=draw)
    made = isotonic.fit_shared({0: [score]}, {0: [target]}, K=16, space="asinh", unit="risk")[0](
        score[None, None]
    )[0]
    for count in (20, 100, 400):
        assert torch.equal(order_entries(made)[0, :count], order_entries(score[None])[0, :count])


def test_the_curve_of_one_head_is_the_mean_target_of_entries_with_that_score():
    """With as many bins as there are scores, which are few: it goes through the means."""
    draw = torch.Generator().manual_seed(3)
    level = torch.randint(0, 4, (1, 4000), generator=draw)
    score = torch.tensor([0.1, 0.5, 2.0, 9.0])[level]
    target = torch.rand(1, 4000, generator=draw) * torch.tensor([1.0, 2.0, 3.0, 10.0])[level]
    made = fitted(score, target, K=4)
    means = [float(target[level == number].double().mean()) for number in range(4)]
    got = made(torch.tensor([[[0.1, 9.0]]]))[0, 0]
    assert_close(got, torch.tensor([means[0], means[3]], dtype=torch.float64), ops=1e4)
    knots, _ = made.knots()
    ends = axis(torch.tensor([[0.1, 9.0]]), "log", torch.ones(1))
    assert float((knots[0, [0, -1]] - ends[0]).abs().max()) < 1e-2


def test_heads_without_any_target_and_constant_scores_are_no_trouble():
    made = looks(2, length=40)
    for look in made:
        one = look[1]
        score, target = one.score_HN.clone(), one.target_HN.clone()
        score[0], target[0] = 0.0, 0.0
        target[1] = 0.0
        look[1] = LayerLook(score, target)
    gates = gates_of()
    record = calibrate_(gates, made)
    assert json.dumps(record, allow_nan=False)
    for layer in LAYERS:
        risk = gates.calibrators[str(layer)](torch.tensor([0.0, 1e-30, 1.0, 3e38]).expand(1, H, 4))
        assert bool(risk.isfinite().all()) and bool((risk.diff(dim=-1) > 0).all())


def test_long_documents_are_looked_at_in_an_even_drawn_sample(monkeypatch):
    monkeypatch.setattr(calibration, "MOST_ENTRIES", 64)
    counted = torch.arange(1010) % 100 != 0
    drawn, same, other = sampled(counted, 5), sampled(counted, 5), sampled(counted, 6)
    assert drawn.shape == (64,) and torch.equal(drawn, same) and not torch.equal(drawn, other)
    assert torch.equal(sampled(counted[:60], 5), counted[:60].nonzero()[:, 0])
    entries = counted.nonzero()[:, 0].tolist()
    for number, taken in enumerate(drawn.tolist()):
        # One of each stretch, and only of entries that count.
        assert number * len(entries) // 64 <= entries.index(taken) < (number + 1) * len(entries) // 64
    strides = {after - before for before, after in itertools.pairwise(drawn.tolist())}
    assert len(strides) > 5, "in step with nothing"


def test_the_curve_says_how_much_a_threshold_keeps():
    made = looks(6, seed=9)
    gates = gates_of()
    curve = calibrate_(gates, made)["curve"]
    assert curve["threshold"] == sorted(curve["threshold"], reverse=True)
    half = curve["keep_ratio"].index(0.5)
    shares = []
    for look in made:
        scores = [gates.calibrators[str(layer)](one.score_HN[None]) for layer, one in look.items()]
        whole = torch.cat([score.flatten() for score in scores])
        shares.append(float((whole >= curve["threshold"][half]).double().mean()))
    fitted, reported = shares[0::2], shares[1::2]
    assert sum(fitted) / 3 == pytest.approx(0.5, abs=2e-3)
    assert curve["mean"][half] == pytest.approx(sum(reported) / 3)
    assert curve["spread"][half] == pytest.approx(torch.tensor(reported).std(correction=0).item(), abs=1e-6)
    assert gates.threshold_for(0.5) == curve["threshold"][half]
    assert curve["threshold"][half - 1] > gates.threshold_for(0.49) > curve["threshold"][half]
    refused(r"keep_ratio=0.01, but for 0.02 .. 0.98", gates.threshold_for, 0.01)
    refused(r"but for none: train.*calibration.kind shared", gates_of().threshold_for, 0.5)


def test_another_unit_and_what_cannot_be_fitted():
    gates = GateSet({layer: LowRankGate(E=4, H=H, Q=2) for layer in LAYERS})
    assert gates.unit == "mass"
    calibrate_(gates, looks(2), unit="mass")
    assert gates.unit == "mass"
    calibrate_(gates, looks(2))
    assert gates.unit == "risk"
    refused("one half .* there are 1: hold out two", calibrate_, gates, looks(1))
