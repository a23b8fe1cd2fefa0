"""CriticalKV: scores entries by attention times the norm of the projected value.

Ranking so minimises the (relaxed) bound on the output's perturbation only after a first stage has collected
more than half of the attention. That stage belongs to the policy (`first_stage: {by: budget, share: 0.5}`):
it ranks by `first_BHT` and spends its share of the budget; the rest of the budget goes by `values_BHT`.
"""

from retain.config import Many, NotNegative
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.snapkv import pooled_mass
from retain.scores.value_norm import value_norms
from retain.scores.window import Odd, Pooling, group_heads


@family(
    "risk",
    needs=("window", "value_norm"),
    reads=("keys",),
    two_stages=True,
    paper="Identify Critical KV Cache in LLM Inference (CriticalKV), arXiv 2502.03805",
)
def critical(
    evidence: Evidence,
    *,
    window: Many = 32,
    pool: Pooling = "avg",
    pool_size: Odd = 5,
    eps: NotNegative = 1e-4,
) -> Score:
    """Score by the perturbation that evicting an entry causes; `first_BHT` is the attention alone.

    `first: s_h[i] = mean_{q in group(h)} pool(mean_{j in window} a_qj)[i]`;
    `values: (s_h[i] + eps) * N_h[i]`, with `N_h[i] = mean_{q in group(h)} ||v_i W_O^q||_1`.

    Paper: `pool="max", pool_size=7`. Released (default): `pool="avg", pool_size=5`. The mean over the group,
    of both factors, is the released code's; the paper has no groups. Its bound is of one query head and does
    not pass to the two means: their product may fall short of the group's mean `a * N`, by a factor of G at
    most.

    Args:
        eps: attention that every entry is granted, so that an unseen one ranks by its value.

    Returns:
        score in `risk` (attention that is granted is attention), with `first_BHT`.
    """
    mass_BHT = pooled_mass(evidence, window, pool, pool_size)
    risk_BHT = (mass_BHT + eps) * group_heads(value_norms(evidence), evidence.num_heads).mean(2)
    return masked_score(risk_BHT, evidence.exists_BHT, "risk", first_BHT=mass_BHT, window=window)
