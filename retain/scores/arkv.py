"""ARKV: scores entries by mean attention and its variance, and says how much of a layer stays as it is."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float64
from torch import Tensor

from retain.evidence import Evidence, Score, attention_probs, padded_columns
from retain.scores.cake import cake

# Least variance of an entry's attention in its kurtosis.
LEAST = 1e-8


def arkv(
    evidence: Evidence,
    *,
    window: int = 32,
    gamma: int | float = 263.8,
    pool_size: int = 5,
    tau1: int | float = 7.774,
    tau2: int | float = 5.407,
    tau3: int | float = 5.528,
) -> Score:
    """Score by mean and variance of the window's attention on each entry, averaged over 5 neighbours and over
    the group; weigh a layer by its dispersion, shift and kurtosis.

    The score is CAKE's (`retain.scores.cake`). The layer's weight is `dispersion^(1 / tau1) * shift^(1 /
    tau2) * kurtosis^(1 / tau3)` over the entries i before the window and all query heads q, with CAKE's
    dispersion and shift and `kurtosis = sum_{q, i} m4 / max(m2, 1e-8)^2`, where `m2` and `m4` are the mean
    square and the mean fourth power of `a_qj[i] - mean_j a_qj[i]` over the window. By it layers share the
    entries that stay in full precision (`precision.full_layers: preference`).

    ARKV: Adaptive and Resource-Efficient KV Cache Management under Limited Memory Budget, arXiv 2603.08727;
    its text could not be read, so formulas and settings are those of its released code, which sums over a
    batch where this weighs each sequence, and splits each layer's budget by its weight relative to the
    largest.

    Args:
        window: last queries observed, at least 2.
        gamma: weight of the variance.
        pool_size: entries averaged, odd.
        tau1, tau2, tau3: temperatures of dispersion, shift and kurtosis, positive.

    Returns:
        score in `mass`, with `layer_weight_B`.

    Raises:
        ValueError: as `cake`; or a temperature that is not positive.
    """
    if not tau3 > 0:
        raise ValueError(f"arkv's temperatures are positive; got tau3={tau3}.")
    score = cake(evidence, window=window, gamma=gamma, pool="avg", pool_size=pool_size, tau1=tau1, tau2=tau2)
    assert score.layer_weight_B is not None
    kurtosis_B = _kurtosis(evidence, window)
    return replace(score, layer_weight_B=score.layer_weight_B * kurtosis_B ** (1 / tau3))


def _kurtosis(evidence: Evidence, window: int) -> Float64[Tensor, " B"]:
    """The kurtosis of attention over the window, summed over heads and the entries before it; the attention
    of one query exists at a time."""
    S, split, padded = evidence.num_queries, evidence.num_seen - window, padded_columns(evidence)

    def rows() -> Iterator[Float64[Tensor, "B Q T"]]:
        for query in range(S - window, S):
            yield attention_probs(evidence, query, query + 1, padded=padded)[:, :, 0, :split].double()

    mean_BQT = second = fourth = torch.zeros(
        *evidence.queries_BQSD.shape[:2], split, dtype=torch.float64, device=evidence.keys_BHTD.device
    )
    for own_BQT in rows():
        mean_BQT = mean_BQT + own_BQT / window
    for own_BQT in rows():
        square = (own_BQT - mean_BQT).square()
        second, fourth = second + square / window, fourth + square.square() / window
    return (fourth / second.clamp_min(LEAST).square()).sum((1, 2))
