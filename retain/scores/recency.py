"""Recency: scores later entries higher. With protected sinks this is StreamingLLM."""

from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family


@family(
    "rank",
    reads=(),
    paper="Efficient Streaming Language Models (StreamingLLM), arXiv 2309.17453",
)
def recency(evidence: Evidence) -> Score:
    """Score by the entry's place in its sequence, `score[i] = #{k < i: k valid}`, evicted entries included.

    Args:
        evidence: the layer (only its padding and its number of heads are read).

    Returns:
        score in `rank`, exact in float32 up to 2**24 entries.
    """
    values_BHT = evidence.places_BT.float()[:, None].expand(-1, evidence.num_heads, -1)
    return masked_score(values_BHT, evidence.exists_BHT, "rank")
