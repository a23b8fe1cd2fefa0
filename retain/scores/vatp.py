"""VATP: scores entries by attention times the norm of the value.

The value has not gone through W_O, so the unit is `mass`, not `risk`. The attention is a setting: the paper
takes H2O's running sum, the paper that compares with it (LAVa) the mean of the last queries.
"""

from typing import Literal

import torch

from retain.config import Many
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.h2o import running_statistics
from retain.scores.snapkv import pooled_mass


@family(
    "mass",
    needs=("window",),
    paper="Attention Score is not All You Need (VATP), arXiv 2406.12335",
    where={("attention", "running"): {"needs": ("running",), "reads": ("values",)}},
)
def vatp(
    evidence: Evidence,
    *,
    attention: Literal["window", "running"] = "window",
    window: Many = 32,
) -> Score:
    """Attention of an entry times the L1 norm of its value, before any projection.

    `s_h[i] = ||v_h[i]||_1 * mean_{q in group(h)} mean_{j in window} a_qj[i]` (`window`), or with
    `sum_{j >= i} a_qj[i]` over all queries (`running`).

    `running` is the paper's and its code's (H2O's sum; it keeps the first tokens whatever they score, which
    here is protection's `sinks`). `window` is how LAVa (arXiv 2509.09754) compares with it, without LAVa's
    pool. Neither has a group of more than one query head; its mean is ours.

    Args:
        evidence: the layer; `running` needs `evidence.running`, or S == T queries.
        window: last queries observed (`window` only).

    Returns:
        score in `mass` (weighted by the size of the value).

    Raises:
        ValueError: the queries are not there.
    """
    if attention == "window":
        mass_BHT = pooled_mass(evidence, window, None, 1)
    else:
        mass_BHT, window = running_statistics(evidence).mass_BHT, 0
    norm_BHT = torch.linalg.vector_norm(evidence.values_BHTD, 1, dim=-1, dtype=mass_BHT.dtype)
    values_BHT = mass_BHT * norm_BHT
    return masked_score(values_BHT, evidence.exists_BHT, "mass", window=window)
