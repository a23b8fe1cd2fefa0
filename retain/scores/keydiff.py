"""KeyDiff: scores keys low that point where most keys point.

Reads keys only, so it costs next to nothing and does not depend on the question. The mean direction is taken
over the entries that the head holds.
"""

import torch
from torch.nn.functional import normalize

from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family


@family(
    "rank",
    reads=("keys",),
    paper="KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364",
)
def keydiff(evidence: Evidence) -> Score:
    """Score by minus the cosine of each key with the mean key direction.

    `score[i] = - k_i . m / (||k_i|| ||m||)`, with `m = mean_i k_i / ||k_i||`

    In the paper our anchor m is mu.

    Args:
        evidence: the layer; its keys, after RoPE, as cached.

    Returns:
        score in `rank`, within -1 .. 1; 0 for a key of zeros.
    """
    keys_BHTD = evidence.keys_BHTD.to(torch.promote_types(evidence.keys_BHTD.dtype, torch.float32))
    unit_BHTD = normalize(keys_BHTD, dim=-1)
    # A direction only: the sum over the entries points where their mean does.
    others_BHT1 = ~evidence.exists_BHT[..., None]
    anchor_BHD1 = normalize(unit_BHTD.masked_fill(others_BHT1, 0.0).sum(2), dim=-1)[..., None]
    values_BHT = -(unit_BHTD @ anchor_BHD1)[..., 0]
    return masked_score(values_BHT, evidence.exists_BHT, "rank")
