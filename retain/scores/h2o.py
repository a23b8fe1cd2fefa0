"""H2O: scores entries by the attention that they received from every query so far.

The original sums, which favours old entries (more queries saw them); released re-implementations average over
the queries that could see an entry. Both are settings. Running statistics of a cache are used if there are
any, so that the score also works where only the last queries are held.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from retain.attention.received import advance
from retain.evidence import Evidence, RunningStatistics, Score, masked_score
from retain.scores.family import family


@family(
    "mass",
    needs=("running",),
    reads=(),
    paper="H2O: Heavy-Hitter Oracle, arXiv 2306.14048",
)
def h2o(evidence: Evidence, *, reduce: Literal["sum", "mean"] = "sum") -> Score:
    """Score by attention received from all queries, averaged over the group.

    `sum: mean_{q in group(h)} sum_{j >= i} a_qj[i]`; `mean`: the same over the number of queries that could
    see i, `n - i`.

    `sum` is the paper's, `mean` the released observed-attention press. Where the evidence carries no running
    mass it is made from the queries, a few at a time, never T x T.

    Args:
        evidence: the layer, with `running`, or with S == T queries.

    Returns:
        score in `mass`.
    """
    mass_BHT = running_statistics(evidence).mass_BHT
    if reduce == "mean":
        mass_BHT = mass_BHT / _payers(evidence)[:, None]
    return masked_score(mass_BHT, evidence.exists_BHT, "mass")


def running_statistics(
    evidence: Evidence, fold: Callable[..., RunningStatistics] = advance, **settings: Any
) -> RunningStatistics:
    """Statistics of all queries: those that the evidence carries, else made from every query.

    Args:
        evidence: the layer, with `running`, or with S == T queries.
        fold: makes them, with these settings.

    Raises:
        ValueError: if the evidence holds neither.
    """
    if evidence.running is not None:
        return evidence.running
    T, S = evidence.num_seen, evidence.num_queries
    if S != T:
        raise ValueError(
            f"the score reads the attention of every query, but the evidence holds the last {S} of {T} and "
            "no running statistics: record all queries at prefill, or use a window score such as snapkv."
        )
    return fold(evidence, **settings)


def _payers(evidence: Evidence) -> Tensor:
    """Number of queries that could see each entry `[B, T]`, at least 1."""
    # Entries that were evicted since have asked too: places know them, the entries left do not.
    place_BT = evidence.places_BT
    last_B1 = place_BT.masked_fill(~evidence.valid_BT, 0).amax(-1, keepdim=True)
    return (last_B1 - place_BT + 1).clamp_min(1)
