"""SnapKV: the mean attention of the last queries, smoothed over neighbours.

In: evidence with at least `window` queries. Out: a score in `mass`. Papers and released codes disagree on the
pool and on its order; both are settings. The window itself is kept by protection (`recent`), not by a huge
score.
"""

from retain.evidence import Evidence
from retain.scores.score import Score, masked_score
from retain.scores.window import group_heads, pool_entries, window_attention


def snapkv(
    evidence: Evidence,
    *,
    window: int = 32,
    pool: str | None = "avg",
    pool_size: int = 5,
    order: str = "pool_first",
) -> Score:
    """Mean attention of the window on each entry, pooled, averaged over the group.

    `pool_first: mean_{q in group(h)} pool(mean_{j in window} a_qj)[i]`;
    `group_first: pool(mean_{q in group(h)} mean_{j in window} a_qj)[i]`. The two are equal for `avg`, not for
    `max`.

    SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469. Defaults (avg, 5, pool
    first) are those of the released key-value presses; the papers that compare with it and LAVa's code use
    `pool="max", pool_size=7`, the latter with `order="group_first"`.

    Args:
        evidence: the layer.
        window: last queries observed.
        pool: smoothing over neighbouring entries, None for none.
        pool_size: neighbours pooled, odd.
        order: pool each query head, or the mean of the group.

    Returns:
        score in `mass`.

    Raises:
        ValueError: if a sequence is shorter than the window.
    """
    if order not in ("pool_first", "group_first"):
        raise ValueError(f"snapkv order is 'pool_first' or 'group_first'; got {order!r}.")
    mass_BHGT = group_heads(window_attention(evidence, window).mean(2), evidence.num_heads)
    if order == "pool_first":
        mass_BHT = pool_entries(mass_BHGT, pool, pool_size, window=window).mean(2)
    else:
        mass_BHT = pool_entries(mass_BHGT.mean(2), pool, pool_size, window=window)
    return masked_score(mass_BHT, evidence.valid_BT, "mass")
