"""H2O: scores entries by the attention that they received from every query so far.

The original sums, which favours old entries (more queries saw them); released re-implementations average over
the queries that could see an entry. Both are settings. Running statistics of a cache are used if there are
any, so that the score also works where only the last queries are held.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from retain.attention.received import advance
from retain.evidence import Evidence, RunningStatistics, Score, masked_score
from retain.registry import check_choice


def h2o(
    evidence: Evidence, *, reduce: str = "sum", layer_weight: str | None = None, chunk: int | None = None
) -> Score:
    """Score by attention received from all queries, averaged over the group.

    `sum: mean_{q in group(h)} sum_{j >= i} a_qj[i]`; `mean`: the same over the number of queries that could
    see i, `n - i` (at most the layer's own sliding window, if it has one).

    H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, arXiv 2306.14048
    (`sum`: paper); `mean` is the released observed-attention press. Where the evidence carries no running
    mass it is made from the queries, a few at a time, never T x T.

    Args:
        evidence: the layer, with `running`, or with S == T queries.
        reduce: `sum` or `mean`.
        layer_weight: `variance`: the layer's weight in a budget that layers share falls with how unevenly its
            entries are attended to (`variance_weight`); None: it has none.

    Returns:
        score in `mass`.
    """
    check_choice("h2o reduce", reduce, ("sum", "mean"))
    check_choice("h2o layer_weight", layer_weight, (None, "variance"))
    mass_BHT = running_statistics(evidence, chunk, reads="h2o sums the attention of every query").mass_BHT
    weight_B = None if layer_weight is None else variance_weight(mass_BHT, evidence.exists_BHT)
    if reduce == "mean":
        mass_BHT = mass_BHT / _payers(evidence)[:, None]
    return masked_score(mass_BHT, evidence.exists_BHT, "mass", layer_weight_B=weight_B)


def variance_weight(mass_BHT: Float[Tensor, "B H T"], exists_BHT: Bool[Tensor, "B H T"]) -> Tensor:
    """D2O's weight of a layer, `exp(-mean_h n_h)`, where n is the heads' variance over their entries of the
    attention received, stretched to 0..1 over the heads of the layer; float64 `[B]`.

    D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language Models,
    arXiv 2406.13035. The paper takes the variance itself; stretched as in the released code, whose heads are
    query heads: here groups of them that share a KV head count once. With two KV heads n is 0 and 1 in every
    layer, and all layers weigh the same.
    """
    mass_BHT = mass_BHT.double().masked_fill(~exists_BHT, 0.0)
    count_BH = exists_BHT.sum(-1)
    mean_BH1 = (mass_BHT.sum(-1) / count_BH.clamp_min(1))[..., None]
    squares_BHT = (mass_BHT - mean_BH1).square().masked_fill(~exists_BHT, 0.0)
    var_BH = squares_BHT.sum(-1) / (count_BH - 1).clamp_min(1)
    least_B1, most_B1 = var_BH.amin(-1, keepdim=True), var_BH.amax(-1, keepdim=True)
    stretched_BH = (var_BH - least_B1) / (most_B1 - least_B1 + 1e-6)
    return (-stretched_BH.mean(-1)).exp()


def running_statistics(
    evidence: Evidence,
    chunk: int | None,
    *,
    reads: str,
    fold: Callable[..., RunningStatistics] = advance,
    **settings: Any,
) -> RunningStatistics:
    """Statistics of all queries: those that the evidence carries, else made from every query.

    Args:
        evidence: the layer, with `running`, or with S == T queries.
        reads: the score that asks, and for what, for the error.
        fold: makes them, with these settings.

    Raises:
        ValueError: if the evidence holds neither.
    """
    if evidence.running is not None:
        return evidence.running
    T, S = evidence.num_seen, evidence.num_queries
    if S != T:
        raise ValueError(
            f"{reads}, but the evidence holds the last {S} of {T} and no running statistics: record all "
            "queries at prefill, keep running statistics, or use a window score such as snapkv."
        )
    return fold(evidence, chunk=chunk, **settings)


def _payers(evidence: Evidence) -> Tensor:
    """Number of queries that could see each entry `[B, T]`, at least 1."""
    # Entries that were evicted since have asked too: places know them, the entries left do not.
    place_BT = evidence.places_BT
    last_B1 = place_BT.masked_fill(~evidence.valid_BT, 0).amax(-1, keepdim=True)
    return (last_B1 - place_BT + 1).clamp(min=1, max=evidence.window)
