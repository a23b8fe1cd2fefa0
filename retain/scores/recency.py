"""Recency: scores later entries higher. With protected sinks this is StreamingLLM."""

import torch

from retain.evidence import Evidence, Score, masked_score


def recency(evidence: Evidence, *, sinks: int = 0) -> Score:
    """Score by the entry's place in its sequence, `score[i] = #{k < i: k valid}`, evicted entries included.

    Efficient Streaming Language Models with Attention Sinks (StreamingLLM), arXiv 2309.17453, when sinks are
    protected.

    Args:
        evidence: the layer (only its padding and its number of heads are read).
        sinks: first entries that rank above all others, as in the released press of StreamingLLM; without,
            protection is what keeps them.

    Returns:
        score in `rank`, exact in float32 up to 2**24 entries.

    Raises:
        ValueError: if `sinks` is negative.
    """
    if sinks < 0:
        raise ValueError(f"recency sinks is a number of entries, at least 0; got {sinks}.")
    places_BT = evidence.places_BT.float()
    places_BT = torch.where(places_BT < sinks, places_BT[:, -1:] + 1, places_BT)
    values_BHT = places_BT[:, None].expand(-1, evidence.num_heads, -1)
    return masked_score(values_BHT, evidence.exists_BHT, "rank")
