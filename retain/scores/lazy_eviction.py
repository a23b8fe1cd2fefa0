"""LazyEviction: keeps entries whose next access is not overdue, by the longest gap between accesses so far.

An access is attention above a small constant. Entries that are used again and again, with long pauses, are
what an average of attention loses.
"""

from retain.attention.received import advance_with_gaps
from retain.config import PositiveShare
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.h2o import running_statistics


@family(
    "rank",
    needs=("running",),
    reads=(),
    paper=(
        "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for Efficient Long "
        "Reasoning, arXiv 2506.15969"
    ),
    fold=advance_with_gaps,
)
def lazy_eviction(evidence: Evidence, *, alpha: PositiveShare = 1e-4) -> Score:
    """Score by the time since the last access over the longest gap between two.

    With t the place of the last query, `l` that of the entry's last access and `g` its longest gap
    (`advance_with_gaps`; an access is `max_{q in group(h)} a_qj[i] >= alpha`),
    `2 / (1 + exp(1 + (t - l) / (g + 1e-5))) + [g > 0] 2 / (1 + exp(g - 1))`.
    The second term is for entries that are accessed all the time.

    As in its released code (github.com/Halo-949/LazyEviction), which scores each query head, holds a copy for
    each head, and starts to count with the first generated token. Here the heads of a group share an entry,
    and the queries of the prompt count, so that there is a score at the eviction after it.

    Args:
        evidence: the layer, with `running`, or with S == T queries. A cache that kept `running` decided what
            an access is while it did so; `alpha` is then not read.
        alpha: attention.

    Returns:
        score in `rank`, within 0 .. 2.

    Raises:
        ValueError: if the evidence has neither running statistics nor every query.
    """
    running = running_statistics(evidence, advance_with_gaps, alpha=alpha)
    assert running.longest_gap_BHT is not None
    gap_BHT = running.longest_gap_BHT.double()
    now_B = evidence.places_BT.masked_fill(~evidence.valid_BT, 0).amax(-1)
    since_BHT = now_B[:, None, None] - running.last_access_BHT
    due_BHT = 2 * (-1 - since_BHT / (gap_BHT + 1e-5)).sigmoid()
    steady_BHT = 2 * (1 - gap_BHT).sigmoid() * (gap_BHT > 0)
    return masked_score(due_BHT + steady_BHT, evidence.exists_BHT, "rank")
