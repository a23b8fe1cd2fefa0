"""DefensiveKV: scores entries by the window's worst case, floored by the head's mean, times the value norm.

The first stage (the entries that hold 90 % of the window's mean mass) belongs to the policy
(`first_stage: {by: mass, share: 0.9}`), and ranks by `first_BHT`.
"""

from typing import Literal

import torch

from retain.config import Many
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.value_norm import value_norms
from retain.scores.window import Odd, Pooling, group_heads, window_received


@family(
    "risk",
    needs=("window", "value_norm"),
    reads=("keys",),
    two_stages=True,
    where={("norm", "head_share"): {"unit": "mass"}, ("norm", "token_sum"): {"unit": "mass"}},
    paper="Taming the Fragility of KV Cache Eviction (DefensiveKV), arXiv 2510.13334",
)
def defensive(
    evidence: Evidence,
    *,
    window: Many = 32,
    pool: Pooling = "avg",
    pool_size: Odd = 5,
    norm: Literal["raw", "head_share", "token_sum"] = "raw",
) -> Score:
    """DefensiveKV's risk, in the order of its released code.

    1. `p_qj = pool(a_qj)`, rescaled so that the row keeps its mass over the entries before the window;
    2. `r_h[i] = max_{q in group(h), j in window} p_qj[i]`;
    3. floor: `R_h[i] = max(r_h[i], mean_i r_h[i])`, the mean over the entries before the window;
    4. `R_h[i] * N_h[i]`, with `N_h[i] = mean_{q in group(h)} N_q[i]` and `N_q[i] = ||v_i W_O^q||_1` as it is
       (`raw`, the text), over `sum_h N_h[i]` (`head_share`, the code: what is left is how much of an entry's
       norm is in this head, of the heads that hold it), or over `sum_i N_h[i]` before the window
       (`token_sum`, the text on layer budgets); over 1 where that sum is nothing.

    The paper's diagram has the norm in step 2, `p_qj[i] * N_q[i]`, which is not built.

    The first stage ranks by `mean_{q in group(h), j in window} a_qj[i]`, without pool, floor or norm.

    In the paper our `risk` is R.

    Returns:
        score in `risk` for `raw`, else in `mass`, with `first_BHT`.
    """
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
    if norm != "raw":
        counted_BHT, axis = (exists_BHT, 1) if norm == "head_share" else (before_BHT, -1)
        total_BHT = norm_BHT.masked_fill(~counted_BHT, 0.0).sum(axis, keepdim=True)
        norm_BHT = norm_BHT / torch.where(total_BHT > 0, total_BHT, 1.0)
    worst_BHT = group_heads(worst_BQT, H).amax(2)
    count_BH1 = before_BHT.sum(-1, keepdim=True).clamp_min(1)
    mean_BH1 = worst_BHT.masked_fill(~before_BHT, 0.0).sum(-1, keepdim=True) / count_BH1
    values_BHT = torch.maximum(worst_BHT, mean_BH1) * norm_BHT
    unit = "risk" if norm == "raw" else "mass"
    return masked_score(values_BHT, evidence.exists_BHT, unit, first_BHT=first_BHT, window=window)
