"""Recency: the later, the better. With protected sinks this is StreamingLLM.

In: which entries exist. Out: a score in `rank`, the entry's place among the valid ones.
"""

from retain.evidence import Evidence
from retain.scores.score import Score, masked_score


def recency(evidence: Evidence) -> Score:
    """Place of the entry in its sequence, `score[i] = #{k < i: k valid}`; padding does not count.

    Efficient Streaming Language Models with Attention Sinks (StreamingLLM), arXiv 2309.17453, when sinks are
    protected.

    Args:
        evidence: the layer (only its padding and its number of heads are read).

    Returns:
        score in `rank`, exact in float32 up to 2**24 entries.
    """
    place_BT = evidence.valid_BT.cumsum(-1) - 1
    B, T = place_BT.shape
    return masked_score(place_BT.float()[:, None].expand(B, evidence.num_heads, T), evidence.valid_BT, "rank")
