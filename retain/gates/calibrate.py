"""Calibrates gates: one strictly increasing curve from the gate's score to risk, placed for each KV head.

Scores become risk (or the mass of the targets), in the same order inside each head and comparable across
heads and layers, so that gates of any family can be fused with observed risk and share a budget. The curve is
piecewise linear: log-risk against the logarithm of the score (its asinh for signed scores). It extends
beyond its outermost knots towards the ends of float32. Scores closer than float32 resolves after the curve
become ties, and are never reordered (`SMALLEST_SLOPE`). `train/calibration/fit.py` fits the curve;
`GateSet.score` applies them.

Calibration only moves entries between heads, so it sets heads' shares of a joint budget. KVzip+ regressions
such as KVzap (arXiv 2601.07891) are only nearly comparable across heads; DBTrimKV (arXiv 2605.09649) ties the
last projection of its gates for the same end.
"""

from typing import Any

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor, nn

from retain.process.registry import check_choice

# How the artifact names the one kind of calibrator that there is.
KIND = "shared"
# A curve's values lie in exp(-REACH) .. exp(REACH), well inside of float32.
REACH = 80.0
# Bound of every float32 score on a curve's axis: |log s| < 104, |asinh(s)| < 90.
EDGE = 104.0
# The smallest slope of a fitted curve, log-risk against the axis. float32 has steps of 1e-7: scores that
# differ by more than about 1e-7 / slope of themselves stay apart (on an asinh axis: of its unit).
SMALLEST_SLOPE = 0.05
# The most that this slope may raise a level curve by, in all. An exact 0 lies a hundred units of the axis
# below other scores; a slope held over that gap would be a rise by e^5, for no entry's sake.
LEAST_RISE = 0.1
# The steepest slope of a curve beyond its knots: in proportion to the score.
STEEPEST_BEYOND = 1.0


class Calibrator(nn.Module):
    """Calibration of one layer's scores: one curve for all heads of all layers, and four numbers a head:

        log r = offset_h + gain_h * curve((x - mean_h) / spread_h)

    with x the score on the axis, `mean_h` and `spread_h` those of the head's scores there, and `gain_h > 0`.
    Every layer holds the same curve.

    Args:
        K: knots of the curve.
        space: `log`, for scores that are at least 0 (any below are ties with 0); or `asinh`, for scores with
            a sign.
        unit: of the output, `risk` or `mass`.
        kind: as the artifact names it; earlier releases had others.
    """

    def __init__(self, *, H: int, K: int, space: str = "log", unit: str = "risk", kind: str = KIND):
        super().__init__()
        if kind != KIND:
            raise ValueError(f"calibrators of the kind {kind!r} are not read any more, only {KIND!r}.")
        check_choice("space of a calibrator", space, ("log", "asinh"))
        check_choice("unit of a calibrator", unit, ("risk", "mass"))
        self.H, self.K, self.space, self.unit = H, K, space, unit
        # The unit of an asinh axis: about how large the scores of a head are.
        self.register_buffer("scale_H", torch.ones(H))
        for name in ("knots_K", "values_K"):
            self.register_buffer(name, torch.linspace(-1, 1, K))
        for name, value in (("mean_H", 0.0), ("spread_H", 1.0), ("offset_H", 0.0), ("gain_H", 1.0)):
            self.register_buffer(name, torch.full((H,), value))

    scale_H: Tensor
    knots_K: Tensor
    values_K: Tensor
    mean_H: Tensor
    spread_H: Tensor
    offset_H: Tensor
    gain_H: Tensor

    @property
    def device(self) -> torch.device:
        return self.scale_H.device

    def dims(self) -> dict[str, Any]:
        """Arguments that rebuild it, empty."""
        return {"kind": KIND, "H": self.H, "K": self.K, "space": self.space, "unit": self.unit}

    def knots(self) -> tuple[Float64[Tensor, "H K"], Float64[Tensor, "H K"]]:
        """Knots of every head, strictly increasing: on the axis, and in log-risk."""
        mean_H1, spread_H1 = self.mean_H.double()[:, None], self.spread_H.double()[:, None]
        offset_H1, gain_H1 = self.offset_H.double()[:, None], self.gain_H.double()[:, None]
        return mean_H1 + spread_H1 * self.knots_K.double(), offset_H1 + gain_H1 * self.values_K.double()

    def forward(self, score_BHT: Float[Tensor, "B H T"]) -> Float32[Tensor, "B H T"]:
        """`exp(curve_h(axis(score)))`; what is not finite (entries that do not exist) stays as it is.

        Args:
            score_BHT: as the gate gives it, in any unit.
        """
        x_BHT = axis(score_BHT, self.space, self.scale_H)
        risk_BHT = interpolate(x_BHT, *extended(*self.knots())).exp().float()
        return torch.where(score_BHT.isfinite(), risk_BHT, score_BHT.float())


def axis(
    score: Float[Tensor, "*batch H T"], space: str, scale_H: Float[Tensor, " H"]
) -> Float64[Tensor, "*batch H T"]:
    """Coordinate of scores on a curve's axis: `log s`, or `asinh(s / scale_h)`.

    Zero lies below every positive number of float32, and so does, in `log`, what is below zero.

    Args:
        score: scores, one row a head.
        space: `log` or `asinh`.
        scale_H: unit of an asinh axis.
    """
    if space == "log":
        # 0.7e-45: half of the smallest number above zero that float32 has.
        return score.double().clamp_min(0.7e-45).log()
    return (score.double() / scale_H.double()[:, None]).asinh().clamp(-EDGE, EDGE)


def extended(
    knots_HK: Float64[Tensor, "H K"], values_HK: Float64[Tensor, "H K"]
) -> tuple[Float64[Tensor, "H knots"], Float64[Tensor, "H knots"]]:
    """Add a knot at either edge of the axis.

    Beyond the outermost knots a curve goes on with the slope of its outermost piece, at most
    `STEEPEST_BEYOND`, and so that it meets the edge inside of `-REACH .. REACH`.

    Args:
        knots_HK: strictly increasing.
        values_HK: strictly increasing, inside of `-REACH .. REACH`.
    """
    slope_Hk = values_HK.diff(dim=-1) / knots_HK.diff(dim=-1)
    ends = []
    for end, slope_H1, sign in ((0, slope_Hk[:, :1], -1.0), (-1, slope_Hk[:, -1:], 1.0)):
        knot_H1, value_H1 = knots_HK[:, end, None], values_HK[:, end, None]
        # Of a curve that is stretched over each head's own scores, knots may lie beyond the edge.
        edge_H1 = (sign * knot_H1 + 1.0).clamp_min(EDGE + 1.0)
        away_H1 = edge_H1 - sign * knot_H1
        rise_H1 = torch.minimum(slope_H1.clamp_max(STEEPEST_BEYOND) * away_H1, REACH - sign * value_H1)
        ends.append((sign * edge_H1, value_H1 + sign * rise_H1))
    (low_H1, lowest_H1), (high_H1, highest_H1) = ends
    return (
        torch.cat([low_H1, knots_HK, high_H1], dim=-1),
        torch.cat([lowest_H1, values_HK, highest_H1], dim=-1),
    )


def interpolate(
    x: Float64[Tensor, "*batch H T"], knots_HK: Float64[Tensor, "H K"], values_HK: Float64[Tensor, "H K"]
) -> Float64[Tensor, "*batch H T"]:
    """Interpolate linearly between knots, one curve a head; never decreasing, rounding included.

    `y = min(y_k + (x - x_k) * slope_k, y_{k+1})` with `x_k <= x < x_{k+1}`; at the outermost knots beyond
    them.

    Args:
        x: between the outermost knots.
        knots_HK: strictly increasing.
        values_HK: increasing.
    """
    K = knots_HK.shape[-1]
    rows_HN = x.movedim(-2, 0).flatten(1).contiguous()
    piece_HN = (torch.searchsorted(knots_HK.contiguous(), rows_HN, right=True) - 1).clamp(0, K - 2)
    left_HN, right_HN = knots_HK.gather(1, piece_HN), knots_HK.gather(1, piece_HN + 1)
    low_HN, high_HN = values_HK.gather(1, piece_HN), values_HK.gather(1, piece_HN + 1)
    share_HN = (rows_HN - left_HN) / (right_HN - left_HN)
    y_HN = torch.minimum((low_HN + share_HN * (high_HN - low_HN)).clamp_min(low_HN), high_HN)
    H, T = x.shape[-2:]
    return y_HN.view(H, *x.shape[:-2], T).movedim(0, -2)
