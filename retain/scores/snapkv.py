"""SnapKV: scores entries by the mean attention of the last queries, smoothed over neighbours.

Papers and released codes disagree on the pool and on its order; both are settings. Protection (`recent`)
keeps the window itself.
"""

from jaxtyping import Float
from torch import Tensor

from retain.evidence import Evidence, Score, masked_score
from retain.registry import check_choice
from retain.scores.family import family
from retain.scores.window import check_order, pool_group, window_received


@family(
    "mass",
    needs=("window",),
    paper="SnapKV: LLM Knows What You are Looking for, arXiv 2404.14469",
    cost="W rows of attention (Q W T D)",
)
def snapkv(
    evidence: Evidence,
    *,
    window: int = 32,
    pool: str | None = "avg",
    pool_size: int = 5,
    order: str = "pool_first",
    aggregate: str = "mean",
) -> Score:
    """Score by the mean attention of the window on each entry, pooled, averaged over the group.

    `pool_first: mean_{q in group(h)} pool(mean_{j in window} a_qj)[i]`;
    `group_first: pool(mean_{q in group(h)} mean_{j in window} a_qj)[i]`. The two are equal for `avg`, not for
    `max`. With `aggregate="max"`, `mean_{j in window}` is `max_{j in window}` in both.

    SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469. Defaults (avg, 5, pool
    first) are those of the released key-value presses; the papers that compare with it and LAVa's code use
    `pool="max", pool_size=7`, the latter with `order="group_first"`. `aggregate="max"` is the one change that
    DefensiveKV (arXiv 2510.13334) argues for, made alone.

    Args:
        aggregate: `mean` or `max` over the queries of the window.

    Returns:
        score in `mass`.
    """
    mass_BHT = pooled_mass(evidence, window, pool, pool_size, order=order, aggregate=aggregate, name="snapkv")
    return masked_score(mass_BHT, evidence.exists_BHT, "mass", window=window)


def pooled_mass(
    evidence: Evidence,
    window: int,
    pool: str | None,
    pool_size: int,
    *,
    order: str = "pool_first",
    aggregate: str = "mean",
    name: str,
) -> Float[Tensor, "B H T"]:
    """SnapKV's score before padding is masked, in the attention's precision, for the score `name`."""
    check_order(order, name=name)
    check_choice(f"{name} aggregate", aggregate, ("mean", "max"))
    (mass_BQT,) = window_received(evidence, window, "sum" if aggregate == "mean" else "max")
    if aggregate == "mean":
        mass_BQT = mass_BQT / window
    return pool_group(mass_BQT, evidence, window, pool, pool_size, order)
