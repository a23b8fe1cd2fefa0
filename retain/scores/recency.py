"""Recency: the later, the better. With protected sinks this is StreamingLLM.

In: which entries exist. Out: a score in `rank`, the entry's place among the sequence's own tokens.
"""

from retain.evidence import Evidence
from retain.scores.score import Score, masked_score


def recency(evidence: Evidence) -> Score:
    """Place of the entry in its sequence, `score[i] = #{k < i: k valid}`: what was evicted counts too.

    Efficient Streaming Language Models with Attention Sinks (StreamingLLM), arXiv 2309.17453, when sinks are
    protected.

    Args:
        evidence: the layer (only its padding and its number of heads are read).

    Returns:
        score in `rank`, exact in float32 up to 2**24 entries.
    """
    values_BHT = evidence.places_BT.float()[:, None].expand(-1, evidence.num_heads, -1)
    return masked_score(values_BHT, evidence.valid_BT, "rank", held_BHT=evidence.held_BHT)
