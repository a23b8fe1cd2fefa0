"""Key norm: scores short keys high, since they draw much attention. The cheapest score."""

import torch

from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family


@family(
    "rank",
    reads=("keys",),
    paper="A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430",
)
def knorm(evidence: Evidence) -> Score:
    """Score by minus the length of each key, `score[i] = -||k_i||_2`.

    Models that normalise their keys before RoPE (Qwen3) leave little for it to see: the learned scale of that
    norm is all that is left of the length.

    Args:
        evidence: the layer; its keys, as cached (RoPE leaves their lengths alone).

    Returns:
        score in `rank`, at most 0.
    """
    dtype = torch.promote_types(evidence.keys_BHTD.dtype, torch.float32)
    values_BHT = -evidence.keys_BHTD.to(dtype).norm(dim=-1)
    return masked_score(values_BHT, evidence.exists_BHT, "rank")
