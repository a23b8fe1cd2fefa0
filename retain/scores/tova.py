"""TOVA: scores entries by the last query's attention, with one ranking for all heads of a layer.

The one query is a window of one, so that protection and layer budgets treat it like other windows; protection
keeps the last entry itself.
"""

from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.window import window_received


@family(
    "mass",
    needs=("window",),
    reads=("keys",),
    paper="Transformers are Multi-State RNNs (TOVA), arXiv 2401.06104",
)
def tova(evidence: Evidence) -> Score:
    """Score by the attention of the last query, averaged over all query heads of the layer.

    `s[i] = mean_q a_{q,last}[i]`, over the query heads whose KV head holds the entry, for every KV head.

    Paper and released code agree on the score; the paper applies it at every decoding step, the released
    press once, after prefill.

    Returns:
        score in `mass`; its window is the last entry.
    """
    (paid_BHT,) = window_received(evidence, 1, "sum", group=True)
    if evidence.held_BHT is None:
        mass_BT = paid_BHT.mean(1) / evidence.group
    else:
        payers_BT = evidence.held_BHT.sum(1).clamp_min(1) * evidence.group
        mass_BT = paid_BHT.sum(1) / payers_BT
    values_BHT = mass_BT[:, None].expand(-1, evidence.num_heads, -1)
    return masked_score(values_BHT, evidence.exists_BHT, "mass", window=1)
