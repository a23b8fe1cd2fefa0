"""Observed risk: the largest value-weighted attention in the observation window.

This is the observed side of the default fusion. The value norm of each query head stands *inside* the
maximum, and heads are not normalised against each other, so that the unit is exactly that of
`retain/future.py` and a learned risk can be fused by a plain maximum.
"""

from retain.config import Many
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.value_norm import value_norms
from retain.scores.window import group_heads, window_received


@family(
    "risk",
    needs=("window", "value_norm"),
    reads=("keys",),
    paper="this project, after DefensiveKV (arXiv 2510.13334)",
)
def observed_risk(evidence: Evidence, *, window: Many = 32) -> Score:
    """Score by the largest value-weighted attention of the last `window` queries.

    `risk[h, i] = max_{q in group(h)} ( ||v_i W_O^q||_1 * max_{j in window} a_qj[i] )`

    After DefensiveKV, whose worst case over the window this is; the published orders and norms are the score
    `defensive`.

    Returns:
        score in `risk`, non-negative.
    """
    (worst_BQT,) = window_received(evidence, window, "max")
    risk_BQT = worst_BQT * value_norms(evidence)
    risk_BHT = group_heads(risk_BQT, evidence.num_heads).amax(2)
    return masked_score(risk_BHT, evidence.exists_BHT, "risk", window=window)
