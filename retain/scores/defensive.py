"""DefensiveKV: the window's worst case, floored by the head's mean, times the value norm.

In: evidence with at least `window` queries. Out: a score in `risk` (raw norm) or `mass` (a normalised norm).
Where text and released code disagree, on the norm, both are here: the text multiplies by the raw norm, the
code by each head's share of it. The code's first stage (the entries that hold 90 % of the window's mean mass
are forced) is not part of this score.
"""

import torch
from torch import Tensor

from retain.evidence import Evidence
from retain.scores.score import Score, masked_score
from retain.scores.value_norm import value_norm_l1
from retain.scores.window import group_heads, pool_entries, window_attention


def defensive(
    evidence: Evidence, *, window: int = 32, pool: str | None = "avg", pool_size: int = 5, norm: str = "raw"
) -> Score:
    """DefensiveKV's risk, in the order of its released code.

    1. `p_qj = pool(a_qj)`, rescaled so that the row keeps its mass over the entries before the window;
    2. `r_h[i] = max_{q in group(h), j in window} p_qj[i]`;
    3. floor: `R_h[i] = max(r_h[i], mean_i r_h[i])`, the mean over the entries before the window;
    4. `R_h[i] * N_h[i]`, with `N_h[i] = mean_{q in group(h)} ||v_i W_O^q||_1` as it is (`raw`, the text),
       over `sum_h N_h[i]` (`head_share`, the code: what is left is how much of an entry's norm is in this
       head), or over `sum_i N_h[i]` before the window (`token_sum`, the text on layer budgets).

    `raw` is the default: under equal budgets a head compares its own entries, and the share takes away the
    one thing that the norm could tell them apart by (more than half of the entries sit on the floor).

    Taming the Fragility of KV Cache Eviction in LLM Inference (DefensiveKV), arXiv 2510.13334. Our `risk` is
    its R.

    Args:
        evidence: the layer.
        window: last queries observed.
        pool: smoothing of each query's row, None for none.
        pool_size: neighbours pooled, odd.
        norm: which value norm.

    Returns:
        score in `risk` for `raw`, else in `mass`.

    Raises:
        ValueError: if a sequence is shorter than the window.
    """
    if norm not in ("raw", "head_share", "token_sum"):
        raise ValueError(f"defensive norm is 'raw', 'head_share' or 'token_sum'; got {norm!r}.")
    probs = window_attention(evidence, window)
    valid_B1T = evidence.valid_BT[:, None]
    pooled = pool_entries(probs, pool, pool_size, window=window)
    if pool is not None:
        pooled = _keep_row_mass(pooled.masked_fill(~valid_B1T[:, None], 0.0), probs, window)
    worst_BHT = group_heads(pooled.amax(2), evidence.num_heads).amax(2)

    before_B1T = valid_B1T.clone()
    before_B1T[..., worst_BHT.shape[-1] - window :] = False
    count_B11 = before_B1T.sum(-1, keepdim=True).clamp_min(1)
    mean_BH1 = worst_BHT.masked_fill(~before_B1T, 0.0).sum(-1, keepdim=True) / count_B11
    floored_BHT = torch.maximum(worst_BHT, mean_BH1)

    norm_BQT = value_norm_l1(evidence.values_BHTD, evidence.output_weight_QDE)
    norm_BHT = group_heads(norm_BQT, evidence.num_heads).mean(2)
    tiny = torch.finfo(norm_BHT.dtype).tiny
    if norm == "head_share":
        norm_BHT = norm_BHT / norm_BHT.sum(1, keepdim=True).clamp_min(tiny)
    elif norm == "token_sum":
        total_BH1 = norm_BHT.masked_fill(~before_B1T, 0.0).sum(-1, keepdim=True)
        norm_BHT = norm_BHT / total_BH1.clamp_min(tiny)
    unit = "risk" if norm == "raw" else "mass"
    return masked_score(floored_BHT * norm_BHT, evidence.valid_BT, unit)


def _keep_row_mass(pooled_BQWT: Tensor, probs_BQWT: Tensor, window: int) -> Tensor:
    """Scale each pooled row, before and inside the window apart, to the mass that it had before pooling."""
    split = pooled_BQWT.shape[-1] - window
    parts = []
    for part in (slice(0, split), slice(split, None)):
        pooled, probs = pooled_BQWT[..., part], probs_BQWT[..., part]
        mass = pooled.sum(-1, keepdim=True).clamp_min(torch.finfo(pooled.dtype).tiny)
        parts.append(pooled * (probs.sum(-1, keepdim=True) / mass))
    return torch.cat(parts, dim=-1)
