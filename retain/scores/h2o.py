"""H2O: scores entries by the attention that they received from every query so far.

The original sums, which favours old entries (more queries saw them); released re-implementations average over
the queries that could see an entry. Both are settings. Running statistics of a cache are used if there are
any, so that the score also works where only the last queries are held.
"""

from jaxtyping import Float
from torch import Tensor

from retain.attention.running_statistics import advance
from retain.evidence import Evidence
from retain.scores.score import Score, masked_score


def h2o(evidence: Evidence, *, reduce: str = "sum", chunk: int | None = None) -> Score:
    """Score by attention received from all queries, averaged over the group.

    `sum: mean_{q in group(h)} sum_{j >= i} a_qj[i]`; `mean`: the same over the number of queries that could
    see i, `n - i` (at most the layer's own sliding window, if it has one).

    H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, arXiv 2306.14048
    (`sum`: paper); `mean` is the released observed-attention press. Where the evidence carries no running
    mass it is made from the queries, a few at a time, never T x T.

    Args:
        evidence: the layer, with `running`, or with S == T queries.
        reduce: `sum` or `mean`.
        chunk: queries at a time; changes memory, not the result. None: as many as are quick.

    Returns:
        score in `mass`.

    Raises:
        ValueError: if the evidence holds neither running statistics nor every query.
    """
    if reduce not in ("sum", "mean"):
        raise ValueError(f"h2o reduce is 'sum' or 'mean'; got {reduce!r}.")
    mass_BHT = running_mass(evidence, chunk, name="h2o")
    if reduce == "mean":
        mass_BHT = mass_BHT / _payers(evidence)[:, None]
    return masked_score(mass_BHT, evidence.valid_BT, "mass", held_BHT=evidence.held_BHT)


def running_mass(evidence: Evidence, chunk: int | None, *, name: str) -> Float[Tensor, "B H T"]:
    """Attention summed over all queries, averaged over the group: from running statistics, else from every
    query.

    Args:
        evidence: the layer, with `running`, or with S == T queries.
        chunk: queries at a time; None: as many as are quick.
        name: the score that asks, for the error.

    Raises:
        ValueError: if the evidence holds neither.
    """
    if evidence.running is not None:
        return evidence.running.mass_BHT
    T, S = evidence.num_seen, evidence.num_queries
    if S != T:
        raise ValueError(
            f"{name} sums the attention of every query, but the evidence holds the last {S} of {T} and no "
            "running statistics: record all queries at prefill, or use a window score such as snapkv."
        )
    return advance(evidence, chunk=chunk).mass_BHT


def _payers(evidence: Evidence) -> Tensor:
    """Number of queries that could see each entry `[B, T]`, at least 1."""
    # Entries that were evicted since have asked too: places know them, the entries left do not.
    place_BT = evidence.places_BT
    last_B1 = place_BT.masked_fill(~evidence.valid_BT, 0).amax(-1, keepdim=True)
    return (last_B1 - place_BT + 1).clamp(min=1, max=evidence.window)
