"""CAKE: scores entries by mean attention plus its variance, and weights layers for a shared budget.

The weight of a layer (its preference) is how spread its attention is times how much it shifts. It is computed
for each sequence by itself (the released code sums over the batch), over the entries before the window, in
float64, since it is a product of powers that spans many decades.
"""

from typing import Annotated

import torch
from pydantic import Field

from retain.config import NotNegative, Positive
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.window import Odd, Pooling, pool_group, window_received


@family(
    "mass",
    needs=("window",),
    reads=("keys",),
    weighs_layers=True,
    paper="CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences, arXiv 2503.12491",
)
def cake(
    evidence: Evidence,
    *,
    window: Annotated[int, Field(ge=2, le=10**6)] = 32,
    gamma: NotNegative = 200.0,
    pool: Pooling = "avg",
    pool_size: Odd = 5,
    tau1: Positive = 1.6,
    tau2: Positive = 0.6,
) -> Score:
    """Score by mean and variance of the window's attention on each entry, pooled, averaged over the group.

    `s_h[i] = mean_{q in group(h)} pool(mean_j a_qj + gamma * var_j a_qj)[i]`, with j over the window and the
    variance unbiased (over `window - 1`), as in the press that was released with DefensiveKV.

    The layer's preference is `dispersion^(1 / tau1) * shift^(1 / tau2)`, over the entries i before the window
    and all query heads, without any normalisation:

    - `dispersion = - sum_{q, j, i} a_qj[i] * log(a_qj[i] + 1e-10)`;
    - `shift = sum_{q, i} var_j a_qj[i]`.

    A sequence without entries before its window has a preference of 0.

    In the paper our `dispersion` is H, our `shift` V.

    Args:
        window: last queries observed, at least 2.
        gamma: weight of the variance.
        tau1: temperature of the dispersion.
        tau2: temperature of the shift.

    Returns:
        score in `mass` (the variance is that of a mass), with `layer_weight_B`.
    """
    sum_BQT, scatter_BQT, entropy_BQT = window_received(evidence, window, "sum", "scatter", "entropy")
    mean_BQT, var_BQT = sum_BQT / window, scatter_BQT / (window - 1)
    values_BHT = pool_group(mean_BQT + gamma * var_BQT, evidence, window, pool, pool_size)

    # An entry that a head does not hold is attended by none of its queries, and adds 0 to every sum below.
    split = evidence.num_seen - window
    shift_B = var_BQT.sum(1)[..., :split].sum(-1, dtype=torch.float64)
    # An attention of exactly 1 makes a term of -1e-10.
    dispersion_B = entropy_BQT[..., :split].sum((1, 2), dtype=torch.float64).clamp_min(0.0)
    weight_B = dispersion_B ** (1 / tau1) * shift_B ** (1 / tau2)
    return masked_score(values_BHT, evidence.exists_BHT, "mass", window=window, layer_weight_B=weight_B)
