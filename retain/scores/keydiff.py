"""KeyDiff: scores keys low that point where most keys point.

Reads keys only, so it costs next to nothing and does not depend on the question. The mean direction is taken
over the entries that the head holds.
"""

import torch
from torch.nn.functional import normalize

from retain.evidence import Evidence, Score, masked_score
from retain.registry import check_choice
from retain.scores.family import family


@family(
    "rank",
    paper="KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364",
    cost="two passes over the keys (H T D)",
)
def keydiff(evidence: Evidence, *, anchor: str = "normalised") -> Score:
    """Score by minus the cosine of each key with the mean key direction.

    `score[i] = - k_i . m / (||k_i|| ||m||)`, with `m = mean_i k_i / ||k_i||` (`normalised`, paper and
    released press alike) or `m = mean_i k_i` (`raw`: long keys count for more; one pass over the keys less).

    KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
    Environments, arXiv 2504.15364. Our anchor m is their mu.

    Args:
        evidence: the layer; its keys, after RoPE, as cached.
        anchor: which mean.

    Returns:
        score in `rank`, within -1 .. 1; 0 for a key of zeros.

    Raises:
        ValueError: if the anchor is neither.
    """
    check_choice("keydiff anchor", anchor, ("normalised", "raw"))
    keys_BHTD = evidence.keys_BHTD.to(torch.promote_types(evidence.keys_BHTD.dtype, torch.float32))
    unit_BHTD = normalize(keys_BHTD, dim=-1)
    averaged = unit_BHTD if anchor == "normalised" else keys_BHTD
    # A direction only: the sum over the entries points where their mean does.
    others_BHT1 = ~evidence.exists_BHT[..., None]
    anchor_BHD1 = normalize(averaged.masked_fill(others_BHT1, 0.0).sum(2), dim=-1)[..., None]
    values_BHT = -(unit_BHTD @ anchor_BHD1)[..., 0]
    return masked_score(values_BHT, evidence.exists_BHT, "rank")
