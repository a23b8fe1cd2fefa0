"""Fits the curve from a gate's score to risk: monotone, one for all heads.

A head's isotonic curve, which the shared one is fitted to, is the *mean* target of entries with about that
score: a joint budget that takes the largest expected risks keeps the most risk. The logarithm is only the
axis on which it is drawn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from retain.gates.calibrate import LEAST_RISE, SMALLEST_SLOPE, Calibrator, axis
from retain.process.extras import require

# Distance of neighbouring knots on the axis, at least: nothing that float32 would round away.
SMALLEST_STEP = 1e-3
# Mean targets below this share of the mean over all heads are drawn at it.
FLOOR_SHARE = 1e-6
# Log-risks of knots lie in -MOST .. MOST, which leaves a curve room to go on beyond them.
MOST = 60.0
# Bins of equal count per knot that the isotonic regression is made of.
BINS_A_KNOT = 8
# Ends of the logistic curve along which knots lie: dense where a budget cuts, at either end of the scores.
REACH_OF_KNOTS = 5.0
# A head's gain on the shared curve, at least.
SMALLEST_GAIN = 0.1
# Share of a head's scores that lie inside of the flat middle of an asinh axis, and its unit at least.
SMALL_SHARE = 0.01
SMALLEST_SCALE = 1e-30
# Rounds of the alternating fit of the shared curve.
ROUNDS = 30
# Layer -> for each head, the numbers of all entries that count, over all documents.
Heads = Mapping[int, Sequence[Tensor]]


def isotonic(values: np.ndarray, weights: np.ndarray | None = None) -> Any:
    """Fit the nearest ascending numbers, as scipy returns them."""
    require("train", "scipy", what="calibration")
    from scipy.optimize import isotonic_regression

    return isotonic_regression(values, weights=weights)


def isotonic_log_means(
    x_N: Float64[Tensor, " N"],
    target_N: Float64[Tensor, " N"],
    x_K: Float64[Tensor, " K"],
    *,
    floor: float,
    bins: int,
) -> Float64[Tensor, " K"]:
    """The isotonic regression of one head's targets (at least 0) on its scores, as logarithms at K places:
    straight lines between block centres, level beyond them.

    Entries are averaged in so many bins of equal count first; means below the floor are drawn at it.
    """
    order_N = x_N.sort(stable=True).indices
    x, target = x_N[order_N].numpy(), target_N[order_N].numpy()
    # Equal scores get one mean, so that no order among them is learnt.
    _, start, group = np.unique(x, return_index=True, return_inverse=True)
    bin_of = np.unique(start * bins // len(x), return_inverse=True)[1][group]
    count = np.bincount(bin_of)
    fitted = isotonic(np.bincount(bin_of, target) / count, count)
    blocks = fitted.blocks[:-1]
    x_k = np.add.reduceat(np.bincount(bin_of, x), blocks) / np.add.reduceat(count, blocks)
    return torch.from_numpy(np.interp(x_K.numpy(), x_k, np.log(np.maximum(fitted.x[blocks], floor))))


def knots_of(x_N: Float64[Tensor, " N"], K: int) -> Float64[Tensor, " K"]:
    """Positions of the knots: at quantiles `logistic(-5 .. 5)` of the scores, ends at their ends, strictly
    rising."""
    place_K = torch.linspace(-REACH_OF_KNOTS, REACH_OF_KNOTS, K, dtype=torch.float64).sigmoid()
    share_K = (place_K - place_K[0]) / (place_K[-1] - place_K[0])
    quantile_K = torch.from_numpy(np.quantile(x_N.numpy(), share_K.numpy()))
    return rising(quantile_K, torch.full((K - 1,), SMALLEST_STEP))


def rising(values_K: Float64[Tensor, " K"], least_k: Float[Tensor, " k"]) -> Float64[Tensor, " K"]:
    """The smallest values, none below these, that rise from each to the next by at least so much."""
    offset_K = torch.cat([torch.zeros(1), least_k]).double().cumsum(0)
    return (values_K - offset_K).cummax(0).values + offset_K


def strictly(values_K: Float64[Tensor, " K"], knots_K: Float64[Tensor, " K"]) -> Float64[Tensor, " K"]:
    """The values nearest to these, in least squares, that rise strictly from knot to knot: with a slope of
    `SMALLEST_SLOPE`, or over wide pieces by `LEAST_RISE / (K - 1)`.

    So a level curve is tilted about its middle, by `LEAST_RISE / 2` at either end at most, and a head keeps
    its level, however far its scores reach.
    """
    least_k = (SMALLEST_SLOPE * knots_K.diff()).clamp_max(LEAST_RISE / (len(knots_K) - 1))
    offset_K = torch.cat([least_k.new_zeros(1), least_k.cumsum(0)])
    return torch.from_numpy(isotonic((values_K - offset_K).numpy()).x) + offset_K


def fit_shared(scores: Heads, targets: Heads, *, K: int, space: str, unit: str) -> dict[int, Calibrator]:
    """Fits one curve for all heads, and a mean, a spread, an offset and a gain for each.

    Each head's scores are standardised on the axis by their median and half the distance of their 16% and 84%
    quantiles. With `Y_hk` the head's isotonic log-risk at the common knots, `o_h + g_h c_k` is fitted to it
    by least squares: `c` given `o, g` (then made monotone), and `o, g` given `c`, in turns.

    Args:
        scores: of every head of every layer.
        targets: of the same entries, at least 0.
        K: knots.
        space: axis of the scores (`retain.gates.calibrate`).
        unit: of the targets, `risk` or `mass`.
    """
    whole = torch.cat([target_N.double() for of_heads in targets.values() for target_N in of_heads])
    floor = max(FLOOR_SHARE * float(whole.mean()), 1e-30)
    standard, numbers = {}, {}
    for layer, of_heads in scores.items():
        for head, score_N in enumerate(of_heads):
            x_N, scale = _on_axis(score_N, space)
            low, mean, high = x_N.quantile(torch.tensor([0.16, 0.5, 0.84], dtype=torch.float64)).tolist()
            spread = max((high - low) / 2, 10 * SMALLEST_STEP)
            standard[layer, head] = (x_N - mean) / spread
            numbers[layer, head] = (scale, mean, spread)
    knots_K = knots_of(torch.cat(list(standard.values())), K)
    Y_hK = torch.stack(
        [
            isotonic_log_means(z_N, targets[layer][head].double(), knots_K, floor=floor, bins=BINS_A_KNOT * K)
            for (layer, head), z_N in standard.items()
        ]
    )
    curve_K = strictly(Y_hK.mean(0), knots_K)
    for _ in range(ROUNDS):
        gain_h, offset_h = _lines(Y_hK, curve_K)
        best_K = (gain_h[:, None] * (Y_hK - offset_h[:, None])).sum(0) / gain_h.square().sum()
        curve_K = strictly(best_K, knots_K)
        curve_K = (curve_K - curve_K.mean()) / curve_K.std(correction=0)
    gain_h, offset_h = _lines(Y_hK, curve_K)
    made = {
        layer: Calibrator(H=len(of_heads), K=K, space=space, unit=unit) for layer, of_heads in scores.items()
    }
    for number, ((layer, head), (scale, mean, spread)) in enumerate(numbers.items()):
        shared, gain, offset = made[layer], float(gain_h[number]), float(offset_h[number])
        ends = offset + gain * curve_K[0], offset + gain * curve_K[-1]
        # Curves stay inside of what float32's exponential holds, whatever a head without any target asks.
        shift = min(0.0, MOST - float(ends[1])) + max(0.0, -MOST - float(ends[0]))
        shared.knots_K.copy_(knots_K)
        shared.values_K.copy_(curve_K)
        shared.scale_H[head], shared.mean_H[head], shared.spread_H[head] = scale, mean, spread
        shared.gain_H[head], shared.offset_H[head] = gain, offset + shift
    return made


def _lines(
    Y_hK: Float64[Tensor, "h K"], curve_K: Float64[Tensor, " K"]
) -> tuple[Float64[Tensor, " h"], Float64[Tensor, " h"]]:
    """Gain and offset of each head by least squares; a gain is never below `SMALLEST_GAIN`."""
    centred_K = curve_K - curve_K.mean()
    gain_h = ((Y_hK * centred_K).sum(-1) / centred_K.square().sum()).clamp_min(SMALLEST_GAIN)
    return gain_h, Y_hK.mean(-1) - gain_h * curve_K.mean()


def _on_axis(score_N: Tensor, space: str) -> tuple[Float64[Tensor, " N"], float]:
    """A head's scores where they lie on the axis, and the unit of an asinh axis: the size that one in
    `1 / SMALL_SHARE` of the scores is below, of those that are not 0.

    Below it the axis is flat as the score itself, and above it a logarithm. Gates that age have scores over
    many powers of ten, and the smallest are of the entries that are kept.
    """
    size_n, scale = score_N.double().abs(), 1.0
    size_n = size_n[size_n > 0]
    if space == "asinh" and len(size_n):
        scale = max(float(size_n.quantile(SMALL_SHARE)), SMALLEST_SCALE)
    return axis(score_N[None].float(), space, torch.tensor([scale]))[0], scale
