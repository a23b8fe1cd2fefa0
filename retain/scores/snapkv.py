"""SnapKV: scores entries by the mean attention of the last queries, smoothed over neighbours.

Papers and released codes disagree on the pool, which is a setting. Protection (`recent`) keeps the window.
"""

from jaxtyping import Float
from torch import Tensor

from retain.config import Many
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.window import Odd, Pooling, pool_group, window_received


@family(
    "mass",
    needs=("window",),
    reads=("keys",),
    paper="SnapKV: LLM Knows What You are Looking for, arXiv 2404.14469",
)
def snapkv(
    evidence: Evidence,
    *,
    window: Many = 32,
    pool: Pooling = "avg",
    pool_size: Odd = 5,
) -> Score:
    """Score by the mean attention of the window on each entry, pooled, averaged over the group.

    `mean_{q in group(h)} pool(mean_{j in window} a_qj)[i]`

    Defaults (avg, 5) are those of the released key-value presses; the papers that compare with it use
    `pool="max", pool_size=7`, and LAVa's code pools the mean of the group.

    Returns:
        score in `mass`.
    """
    mass_BHT = pooled_mass(evidence, window, pool, pool_size)
    return masked_score(mass_BHT, evidence.exists_BHT, "mass", window=window)


def pooled_mass(evidence: Evidence, window: int, pool: Pooling, pool_size: int) -> Float[Tensor, "B H T"]:
    """SnapKV's score before padding is masked, in the attention's precision."""
    (sum_BQT,) = window_received(evidence, window, "sum")
    return pool_group(sum_BQT / window, evidence, window, pool, pool_size)
