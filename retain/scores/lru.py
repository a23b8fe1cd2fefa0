"""LRU: scores entries by the place of their last access.

An access is attention above a share of uniform attention, since softmax gives every entry something. Writing
an entry is its first access, as in any LRU cache.
"""

from retain.config import NotNegative
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.h2o import running_statistics


@family(
    "rank",
    needs=("running",),
    reads=(),
    paper="least recently used, by attention; a control, no paper",
)
def lru(evidence: Evidence, *, share: NotNegative = 1.0) -> Score:
    """Score by the place of the last query that accessed the entry.

    `score[i] = max({i} | {j >= i: max_{q in group(h)} a_qj[i] >= share / n_j})`, where `n_j` is the number of
    entries that query j sees, so that `share = 1` means at least uniform attention. Both extremes are
    recency: with `share = 0` every query accesses all that it sees, all entries tie, and ties go to the later
    position; with a share that no query reaches, an entry is as old as its position.

    With a sink logit uniform attention is less than `1 / n_j`: pass a smaller share there.

    Args:
        evidence: the layer, with `running`, or with S == T queries. A cache that kept `running` decided what
            an access is while it did so; `share` is then not read.
        share: of 1 / n_j.

    Returns:
        score in `rank`, counted from the sequence's first entry, exact in float32 up to 2**24.

    Raises:
        ValueError: if the evidence has neither running statistics nor every query.
    """
    running = running_statistics(evidence, share=share)
    return masked_score(running.last_access_BHT.float(), evidence.exists_BHT, "rank")
