"""Calibrators as they are applied: formulas, order, edges of float32."""

import copy
import math

import pytest
import torch

from retain.gates import calibrate
from retain.gates.calibrate import (
    EDGE,
    REACH,
    SMALLEST_SLOPE,
    Remap,
    Scale,
    Shared,
    build_calibrator,
    extended,
    threshold_at,
)
from tests.close import assert_close

H, K = 3, 5
EXTREME = [0.0, 1e-45, 1e-38, 1e-20, 1e-6, 0.5, 1.0, 30.0, 1e10, 1e38, 3.4e38]


def filled(kind: str, space: str, seed: int = 0):
    """With random curves, steep and nearly flat."""
    draw = torch.Generator().manual_seed(seed)
    made = build_calibrator(kind, H=H, K=2 if kind == "scale" else K, space=space)
    made.scale_H.copy_(torch.rand(H, generator=draw) + 0.2)

    def rising(*shape, least=0.3):
        steps = torch.rand(*shape, generator=draw) ** 3 * 4 + least
        return steps.cumsum(-1) - 5.0

    if kind == "remap":
        made.knots_HK.copy_(rising(H, K))
        made.values_HK.copy_(rising(H, K, least=SMALLEST_SLOPE * 5))
    elif kind == "scale":
        made.factor.copy_((torch.randn((), generator=draw) * 3).exp())
    else:
        made.knots_K.copy_(rising(K))
        made.values_K.copy_(rising(K))
        made.mean_H.copy_(torch.randn(H, generator=draw))
        made.spread_H.copy_(torch.rand(H, generator=draw) + 0.3)
        made.offset_H.copy_(torch.randn(H, generator=draw))
        made.gain_H.copy_(torch.rand(H, generator=draw) + 0.3)
    return made


def naive(made, head: int, score: float) -> float:
    """The formula, one number at a time."""
    if made.space == "log":
        x = math.log(max(score, 0.7e-45))
    else:
        x = max(-EDGE, min(EDGE, math.asinh(score / float(made.scale_H[head]))))
    if isinstance(made, Scale):
        shift = math.log(float(made.factor))
        knots = [max(1 - EDGE, 1 - REACH - shift), min(EDGE - 1, REACH - 1 - shift)]
        values = [knot + shift for knot in knots]
    elif isinstance(made, Remap):
        knots, values = made.knots_HK[head].tolist(), made.values_HK[head].tolist()
    else:
        assert isinstance(made, Shared)
        knots = [float(made.mean_H[head]) + float(made.spread_H[head]) * z for z in made.knots_K.tolist()]
        values = [float(made.offset_H[head]) + float(made.gain_H[head]) * v for v in made.values_K.tolist()]
    pieces = range(len(knots) - 1)
    slopes = [(values[k + 1] - values[k]) / (knots[k + 1] - knots[k]) for k in pieces]
    if x < knots[0]:
        most = (REACH + values[0]) / (EDGE + 1 + knots[0])
        return math.exp(values[0] + (x - knots[0]) * min(slopes[0], 1.0, most))
    if x >= knots[-1]:
        most = (REACH - values[-1]) / (EDGE + 1 - knots[-1])
        return math.exp(values[-1] + (x - knots[-1]) * min(slopes[-1], 1.0, most))
    k = max(k for k in pieces if knots[k] <= x)
    return math.exp(values[k] + (x - knots[k]) * slopes[k])


def test_a_scale_is_one_factor_for_the_layer():
    """For what gates give; so heads compete in the layer as they did before, and layers do not."""
    made = filled("scale", "log")
    score = (torch.randn(2, H, 200, generator=torch.Generator().manual_seed(4)) * 5).exp()
    assert_close(made(score), score.double() * float(made.factor), dtype=torch.float32)
    assert torch.equal(made(score).flatten().argsort(), score.flatten().argsort())
    for factor in (1e-30, 1e30):
        made.factor.fill_(factor)
        wanted, inside = score.double().log() + math.log(factor), (score.log() + math.log(factor)).abs() < 79
        assert_close(made(score).log()[inside], wanted[inside], dtype=torch.float32)
        assert 0 < int((~inside).sum()) < inside.numel() and bool(made(score).log().abs().max() < REACH)


KINDS = [("scale", "log")]
KINDS += [(kind, space) for kind in ("remap", "shared") for space in ("log", "asinh")]


@pytest.mark.parametrize(("kind", "space"), KINDS)
def test_formula(kind, space):
    made = filled(kind, space)
    draw = torch.Generator().manual_seed(1)
    score = torch.randn(2, H, 60, generator=draw).mul(4).exp()
    score = score if space == "log" else score * torch.randn(2, H, 60, generator=draw).sign()
    score[0, 0, : len(EXTREME)] = torch.tensor(EXTREME)
    wanted = torch.tensor(
        [[[naive(made, h, float(s)) for s in score[b, h]] for h in range(H)] for b in range(2)],
        dtype=torch.float64,
    )
    got = made(score)
    assert got.dtype == torch.float32
    assert_close(got.log(), wanted.log(), dtype=torch.float32)
    again = build_calibrator(**made.dims())
    assert not list(again.parameters())
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(score), got)


@pytest.mark.parametrize(("kind", "space"), KINDS)
def test_order_inside_a_head_stays_up_to_the_edges_of_float32(kind, space):
    made = filled(kind, space)
    grid = torch.cat([torch.tensor([0.0]), torch.logspace(-37, 38, 4001)])
    if space == "asinh":
        grid = torch.cat([-grid.flip(0)[:-1], grid])
        # Beside zero an asinh is as flat as its argument: scores far below a head's own size are one.
        near = grid.abs() < 1e-3
        grid = grid[~near]
    score = grid.expand(1, H, -1)
    risk = made(score)
    assert bool(risk.isfinite().all()) and bool((risk > 0).all())
    assert bool((risk.diff(dim=-1) > 0).all())  # strictly, for scores that differ by some percent
    draw = torch.Generator().manual_seed(2)
    close = (torch.randn(1, H, 20000, generator=draw) * 2).exp()
    close = close if space == "log" else close - 3.0
    ordered = close.sort(dim=-1).values
    assert bool((made(ordered).diff(dim=-1) >= 0).all())  # and never the other way round
    apart = ordered[..., ::100]
    gap = apart.diff(dim=-1) > 1e-4
    assert bool((made(apart).diff(dim=-1) > 0)[gap].all())


@pytest.mark.parametrize(("kind", "space"), KINDS)
def test_ties_stay_ties_and_what_does_not_exist_stays_away(kind, space):
    made = filled(kind, space)
    score = torch.tensor([[[0.3, 0.3, float("-inf"), 2.0], [1.0, 0.0, 1.0, float("-inf")], [0.1] * 4]])
    risk = made(score)
    assert torch.equal(risk.isneginf(), score.isneginf())
    assert risk[0, 0, 0] == risk[0, 0, 1] < risk[0, 0, 3]
    assert risk[0, 1, 0] == risk[0, 1, 2] > risk[0, 1, 1] > 0
    assert len(risk[0, 2].unique()) == 1


@pytest.mark.parametrize(("kind", "space"), KINDS)
def test_a_curve_is_extended_once_and_again_when_it_is_another(kind, space, monkeypatch):
    made, asked = filled(kind, space), []
    monkeypatch.setattr(calibrate, "extended", lambda *curve: asked.append(1) or extended(*curve))
    score = torch.rand(1, H, 9)
    with torch.inference_mode():
        first = made(score)
    twin = score.clone().requires_grad_()
    made(twin).sum().backward()  # of a curve that was extended in inference mode
    assert len(asked) == 1 and bool((twin.grad > 0).all())
    other = filled(kind, space, seed=3)
    changes = {
        "loaded": lambda: made.load_state_dict(other.state_dict()),
        "written to": lambda: next(iter(made.buffers())).mul_(1.0),
        "moved": lambda: made._apply(torch.clone),
    }
    for number, change in enumerate(changes.values(), start=2):
        change()
        assert torch.equal(made(score), other(score)) and torch.equal(made(score), made(score))
        assert len(asked) == number + 1  # and one of the other
    assert not torch.equal(first, made(score))
    copied = copy.deepcopy(made)
    copied.load_state_dict(filled(kind, space).state_dict())
    assert torch.equal(copied(score), first) and torch.equal(made(score), other(score))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "remaps"}, "kind of calibrator.*did you mean 'remap'"),
        ({"kind": "remap", "K": 1}, "two knots at least, got H=2, K=1"),
        ({"kind": "shared", "space": "linear"}, "space is one of log, asinh .*got 'linear' and 'risk'"),
        ({"kind": "shared", "unit": "rank"}, "unit one of risk, mass; got 'log' and 'rank'"),
        ({"kind": "scale", "K": 2, "space": "asinh"}, "has 2 knots and the space 'log'.*take kind 'remap'"),
        ({"kind": "scale", "K": 5}, "has 2 knots and the space 'log'.*take kind 'remap' or 'shared'"),
    ],
    ids=["kind", "knots", "space", "unit", "scale with a sign", "scale with knots"],
)
def test_what_is_no_calibrator_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        build_calibrator(**{"H": 2, "K": 4, **settings})


def test_thresholds_between_points():
    ratios, thresholds = [0.1, 0.2, 0.4], [8.0, 2.0, 0.5]
    assert [threshold_at(ratios, thresholds, ratio) for ratio in ratios] == thresholds
    assert threshold_at(ratios, thresholds, 0.15) == pytest.approx(4.0)
    assert threshold_at(ratios, thresholds, 0.3) == pytest.approx(1.0)
    assert threshold_at(ratios, [3.0, 1.0, -1.0], 0.25) == pytest.approx(0.5)
    for outside in (0.05, 0.5):
        with pytest.raises(ValueError, match=r"outside of what was calibrated, 0.1 .. 0.4"):
            threshold_at(ratios, thresholds, outside)
