"""Calibrators as they are applied: formulas, order, edges of float32."""

import math

import pytest
import torch

from retain.gates.calibrate import (
    EDGE,
    REACH,
    SMALLEST_SLOPE,
    Calibrator,
)
from tests.close import assert_close

H, K = 3, 5
EXTREME = [0.0, 1e-45, 1e-38, 1e-20, 1e-6, 0.5, 1.0, 30.0, 1e10, 1e38, 3.4e38]


def filled(space: str, seed: int = 0):
    """With a random curve, steep and nearly flat."""
    draw = torch.Generator().manual_seed(seed)
    made = Calibrator(H=H, K=K, space=space)
    made.scale_H.copy_(torch.rand(H, generator=draw) + 0.2)

    for knots_K, least in ((made.knots_K, 0.3), (made.values_K, SMALLEST_SLOPE * 5)):
        knots_K.copy_((torch.rand(K, generator=draw) ** 3 * 4 + least).cumsum(-1) - 5.0)
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


@pytest.mark.parametrize("space", ["log", "asinh"])
def test_formula(space):
    made = filled(space)
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
    again = Calibrator(**made.dims())
    assert not list(again.parameters())
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(score), got)


@pytest.mark.parametrize("space", ["log", "asinh"])
def test_order_inside_a_head_stays_up_to_the_edges_of_float32(space):
    made = filled(space)
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


@pytest.mark.parametrize("space", ["log", "asinh"])
def test_ties_stay_ties_and_what_does_not_exist_stays_away(space):
    made = filled(space)
    score = torch.tensor([[[0.3, 0.3, float("-inf"), 2.0], [1.0, 0.0, 1.0, float("-inf")], [0.1] * 4]])
    risk = made(score)
    assert torch.equal(risk.isneginf(), score.isneginf())
    assert risk[0, 0, 0] == risk[0, 0, 1] < risk[0, 0, 3]
    assert risk[0, 1, 0] == risk[0, 1, 2] > risk[0, 1, 1] > 0
    assert len(risk[0, 2].unique()) == 1
