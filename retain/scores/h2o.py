"""H2O's running mass: the attention that an entry has received from every query so far.

In: evidence with every query. Out: a score in `mass`. The original sums, which favours old entries (more
queries could pay them); released re-implementations average over the queries that could. Both are settings.
"""

import torch

from retain.attention_chunks import attention_chunks
from retain.evidence import Evidence
from retain.scores.score import Score, masked_score
from retain.scores.window import group_heads


def h2o(evidence: Evidence, *, reduce: str = "sum", chunk: int = 128) -> Score:
    """Attention received from all queries, averaged over the group.

    `sum: mean_{q in group(h)} sum_{j >= i} a_qj[i]`; `mean`: the same over `n - i`, the number of queries
    that could see i.

    H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, arXiv 2306.14048
    (`sum`); `mean` is the released observed-attention press. Attention is walked in chunks of queries, never
    T x T.

    Args:
        evidence: the layer, with S == T queries.
        reduce: `sum` or `mean`.
        chunk: queries at a time; changes memory, not the result.

    Returns:
        score in `mass`.

    Raises:
        ValueError: if the evidence does not hold every query.
    """
    if reduce not in ("sum", "mean"):
        raise ValueError(f"h2o reduce is 'sum' or 'mean'; got {reduce!r}.")
    T, S = evidence.num_seen, evidence.num_queries
    if S != T:
        raise ValueError(
            f"h2o sums the attention of every query, but the evidence holds the last {S} of {T}: "
            "record all queries at prefill, or use a window score such as snapkv."
        )
    valid_BT = evidence.valid_BT
    B, Q = evidence.queries_BQSD.shape[:2]
    mass_BQT = torch.zeros((B, Q, T), device=valid_BT.device)
    for start, probs in attention_chunks(evidence, chunk):
        # Padded queries see nothing: their rows are zeros.
        mass_BQT[..., : start + probs.shape[2]] += probs.sum(2)
    mass_BHT = group_heads(mass_BQT, evidence.num_heads).mean(2)
    if reduce == "mean":
        # Queries that could pay entry i: the valid ones at i and after.
        payers_BT = valid_BT.flip(-1).cumsum(-1).flip(-1).clamp_min(1)
        mass_BHT = mass_BHT / payers_BT[:, None]
    return masked_score(mass_BHT, valid_BT, "mass")
