"""DefensiveKV: scores entries by the window's worst case, floored by the head's mean, times the value norm.

The unit is `risk` (raw norm) or `mass` (a normalised norm). Text and released code disagree on the norm,
which is a setting. The first stage (the entries that hold 90 % of the window's mean mass) belongs to the
policy (`first_stage: {by: mass, share: 0.9}`), and ranks by `first_BHT`.
"""

import torch
from torch import Tensor

from retain.evidence import Evidence, Score, masked_score
from retain.process.registry import check_choice
from retain.scores.family import family
from retain.scores.value_norm import value_norms
from retain.scores.window import group_heads, window_received


@family(
    "risk",
    needs=("window", "value_norm"),
    paper="Taming the Fragility of KV Cache Eviction (DefensiveKV), arXiv 2510.13334",
)
def defensive(
    evidence: Evidence,
    *,
    window: int = 32,
    pool: str | None = "avg",
    pool_size: int = 5,
    norm: str = "raw",
) -> Score:
    """DefensiveKV's risk, in the order of its released code.

    1. `p_qj = pool(a_qj)`, rescaled so that the row keeps its mass over the entries before the window;
    2. `r_h[i] = max_{q in group(h), j in window} p_qj[i]`;
    3. floor: `R_h[i] = max(r_h[i], mean_i r_h[i])`, the mean over the entries before the window;
    4. `R_h[i] * N_h[i]`, with `N_h[i] = mean_{q in group(h)} N_q[i]` and `N_q[i] = ||v_i W_O^q||_1` as it is
       (`raw`, the text), over `sum_h N_h[i]` (`head_share`, the code: what is left is how much of an entry's
       norm is in this head, of the heads that hold it), or over `sum_i N_h[i]` before the window
       (`token_sum`, the text on layer budgets; over 1 where that sum is nothing, as it is for a sequence that
       is all window).

    The paper's diagram has the norm in step 2, `p_qj[i] * N_q[i]`, which is not built.

    The first stage ranks by `mean_{q in group(h), j in window} a_qj[i]`, without pool, floor or norm.

    `raw` is the default: under equal budgets a head compares its entries, and the share takes away the
    one thing that the norm could tell them apart by (more than half of the entries sit on the floor).

    In the paper our `risk` is R.

    Args:
        norm: `raw`, `head_share` or `token_sum`.

    Returns:
        score in `risk` for `raw`, else in `mass`, with `first_BHT`.
    """
    check_choice("defensive norm", norm, ("raw", "head_share", "token_sum"))
    H, T = evidence.num_heads, evidence.num_seen
    # Without held_BHT all heads hold the same, and one is enough.
    exists_BHT = evidence.valid_BT[:, None] if evidence.held_BHT is None else evidence.exists_BHT
    before_BHT = exists_BHT.clone()
    before_BHT[..., T - window :] = False

    plain = "sum" if pool is None else "plain"
    plain_BQT, worst_BQT = window_received(
        evidence, window, plain, "max", pool=pool, pool_size=pool_size, keep_mass=True
    )
    first_BHT = group_heads(plain_BQT, H).mean(2) / window

    norm_BHT = group_heads(value_norms(evidence), H).mean(2)
    norm_BHT = norm_BHT / _divisor(norm_BHT, exists_BHT, before_BHT, norm)
    worst_BHT = group_heads(worst_BQT, H).amax(2)
    count_BH1 = before_BHT.sum(-1, keepdim=True).clamp_min(1)
    mean_BH1 = worst_BHT.masked_fill(~before_BHT, 0.0).sum(-1, keepdim=True) / count_BH1
    values_BHT = torch.maximum(worst_BHT, mean_BH1) * norm_BHT
    unit = "risk" if norm == "raw" else "mass"
    return masked_score(values_BHT, evidence.exists_BHT, unit, first_BHT=first_BHT, window=window)


def _divisor(norm_BHT: Tensor, exists_BHT: Tensor, before_BHT: Tensor, norm: str) -> Tensor:
    """Divisor of the value norm, broadcastable to `[B, H, T]`."""
    if norm == "raw":
        return norm_BHT.new_ones(1, 1, 1)
    if norm == "head_share":
        total = norm_BHT.masked_fill(~exists_BHT, 0.0).sum(1, keepdim=True)
    else:
        total = norm_BHT.masked_fill(~before_BHT, 0.0).sum(-1, keepdim=True)
    return torch.where(total > 0, total, 1.0)
