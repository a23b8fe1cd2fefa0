"""Computes the future attention of entries: the target of gates, and the oracle.

Input is the evidence of a document with nothing evicted, and of what was run after it: question and answer, a
repetition of the document, or the model's own continuation. Queries count if they can still come after the
entry's eviction: of the document's own tokens those at distance `horizon` or more (nearer ones always find
the entry, which is protected while recent), of later text all. Only `train/` and `eval/` may import this
file: at inference the future is unknown. The *risk* of an entry is the `max` of `value_norm`.

Published, with sources: `max` of `repeat`, weight `none`: KVzip (arXiv 2505.23416; it normalises within the
chunk that is repeated, here rows are over everything that is seen). `max` of `repeat`,
`value_norm_over_hidden`: KVzip+ of KVzap (arXiv 2601.07891; its norms are Euclidean, here both are L1, as
everywhere in this project). `max` of `appendix`, `none`: Locret (arXiv 2410.01805). `mean` of
`continuation`, `none`: LookaheadKV (arXiv 2603.10899; the loss normalises).
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from jaxtyping import Bool, Float32, Int
from torch import Tensor

from retain.attention.received import received_attention
from retain.evidence import Evidence
from retain.scores.value_norm import value_norms

SOURCES = {
    "own": "the document's own tokens",
    "appendix": "the tokens appended after the document",
    "repeat": "the document once more, after a prompt that asks for it",
    "continuation": "what the model itself writes after the document",
}
AGGREGATES = ("max", "mean")
# Attention alone; times the norm of the projected value; that over the norm of the query's attention input.
WEIGHTS = ("none", "value_norm", "value_norm_over_hidden")


@torch.no_grad()
def future_use(
    document: Evidence,
    branches: Iterable[tuple[str, Evidence]] = (),
    *,
    sources: Mapping[str, float],
    aggregate: str = "max",
    weight: str = "value_norm",
    horizon: int = 32,
) -> tuple[Float32[Tensor, "B H T"], Bool[Tensor, "B H T"]]:
    """How much attention the queries after an entry's eviction will give to it.

    With `a_qj` the softmax of query j of head q over all valid keys up to itself, a query pays entry i

        p_qj[i] = a_qj[i]                                        weight `none`
        p_qj[i] = a_qj[i] ||v_i W_O^q||_1                        `value_norm`
        p_qj[i] = a_qj[i] ||v_i W_O^q||_1 / ||h_j||_1            `value_norm_over_hidden`

    with `h_j` the query's attention input. The queries `J_s(i)` of a source s are those that are there, see
    i, and lie behind it: of `own`, at distance `horizon` or more; of any other source, all in its branches.
    With the G query heads q of KV head h, and w_s the weight of a source,

        max:    r_s[h, i] = max_{j in J_s(i), q} p_qj[i]                    r = max_s w_s r_s
        mean:   r_s[h, i] = 1 / (G |J_s(i)|) sum_{j in J_s(i), q} p_qj[i]   r = sum_s w_s r_s / W(i)

    where `W(i)` is the sum of the weights of those sources that have a query in `J_s(i)`: an entry that fewer
    sources reach is not thereby worth less. Memory is linear in T.

    Args:
        document: one layer over the document; with a query for each entry if `own` is a source.
        branches: source -> evidence over `[document | branch]`, of which all held queries are the branch's;
            a source may have several or none. Taken one at a time, and only those of `sources`.
        sources: of `SOURCES`, with a positive weight.
        aggregate, weight: of `AGGREGATES` and `WEIGHTS`.
        horizon: least distance of a document query, in entries; the protected recent window.

    Returns:
        the use, float32, 0 where no such query exists; and whether one exists: entries that no query can
        reach (padding, and without a branch the last `horizon` ones) belong in no loss.

    Raises:
        ValueError: evidence that holds too little.
    """
    assert aggregate in AGGREGATES and weight in WEIGHTS
    T, H = document.num_seen, document.num_heads
    if "own" in sources and document.num_queries < T:
        raise ValueError(
            f"the source 'own' needs a query for each of the document's {T} entries, the evidence holds "
            f"{document.num_queries}: record more queries."
        )
    B, device = len(document.valid_BT), document.valid_BT.device
    norm_BQT = None if weight == "none" else value_norms(document)
    found: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for source, part, distance in _parts(document, branches, sources, horizon):
        if source not in found:
            found[source] = torch.zeros((B, H, T), device=device)
            counts[source] = torch.zeros((B, T), dtype=torch.int64, device=device)
        use_BHT = _use(part, distance, T, aggregate, weight, norm_BQT)
        if aggregate == "mean":
            found[source] += use_BHT
        else:
            torch.maximum(found[source], use_BHT, out=found[source])
        counts[source] += _count(part, distance, T)
        del part
    use_BHT = torch.zeros((B, H, T), device=device)
    weight_BT = torch.zeros((B, T), device=device)
    for source, found_BHT in found.items():
        found_BHT = found_BHT * sources[source]
        if aggregate == "mean":
            use_BHT += found_BHT / counts[source].clamp_min(1)[:, None]
        else:
            use_BHT = torch.maximum(use_BHT, found_BHT)
        weight_BT += sources[source] * (counts[source] > 0)
    if aggregate == "mean":
        use_BHT /= torch.where(weight_BT > 0, weight_BT, 1.0)[:, None]
    reached_BT = (weight_BT > 0) & document.valid_BT
    reached_BHT = reached_BT[:, None].expand(B, H, T)
    return use_BHT.masked_fill(~reached_BHT, 0.0), reached_BHT


def _parts(
    document: Evidence,
    branches: Iterable[tuple[str, Evidence]],
    sources: Mapping[str, float],
    horizon: int,
) -> Iterator[tuple[str, Evidence, int]]:
    """(source, evidence whose held queries are that source's, least distance)."""
    if "own" in sources:
        yield "own", document, horizon
    for source, evidence in branches:
        if source in sources:
            if evidence.num_seen - evidence.num_queries < document.num_seen:
                raise ValueError(
                    f"a branch of source {source!r} holds {evidence.num_queries} queries over "
                    f"{evidence.num_seen} entries, of which {document.num_seen} are the document's: pass the "
                    "branch's own queries only."
                )
            yield source, evidence, 0
        del evidence  # before the next one is made


def _use(
    part: Evidence,
    distance: int,
    T: int,
    aggregate: str,
    weight: str,
    norm_BQT: Tensor | None,
) -> Float32[Tensor, "B H T"]:
    """Largest or sum of what the held queries pay the first T entries, group reduced."""
    lse_BQS, least_B = None, None
    if weight == "value_norm_over_hidden":
        lse_BQS, least_B = _over_hidden(part)
    kind = "max" if aggregate == "max" else "sum"
    (paid_BQT,) = received_attention(part, kind, entries=T, distance=distance, lse_BQs=lse_BQS)
    if norm_BQT is not None:
        paid_BQT = paid_BQT * norm_BQT
    paid_BHGT = paid_BQT.unflatten(1, (part.num_heads, -1))
    use_BHT = paid_BHGT.amax(2) if aggregate == "max" else paid_BHGT.mean(2)
    return (use_BHT if least_B is None else use_BHT / least_B[:, None, None]).float()


def _over_hidden(part: Evidence) -> tuple[Tensor, Tensor]:
    """Log-sum-exps with which a row of attention comes out over the norm of its query's attention input, in
    units of the smallest such norm: `a_qj / ||h_j||_1 = exp(l_qj - lse_qj - log(||h_j||_1 / least)) / least`.

    In these units no row pays more than its attention: a probability above 1 would be cut off.
    """
    if part.hidden_BTE is None:
        raise ValueError(
            "weight='value_norm_over_hidden' looks at the attention input, and the evidence has none "
            "(hidden_BTE): record it, or pass weight='value_norm'."
        )
    (lse_BQS,) = received_attention(part, "lse")
    hidden_BSE = part.hidden_BTE[:, part.num_seen - part.num_queries :]
    norm_BS = torch.linalg.vector_norm(hidden_BSE, 1, dim=-1, dtype=lse_BQS.dtype)
    norm_BS = norm_BS.clamp_min(torch.finfo(norm_BS.dtype).tiny)
    least_B = norm_BS.masked_fill(~part.asks_BS, float("inf")).amin(-1)
    least_B = least_B.masked_fill(least_B.isinf(), 1.0)  # of a sequence without such queries
    return lse_BQS + (norm_BS / least_B[:, None]).log()[:, None], least_B


def _count(part: Evidence, distance: int, T: int) -> Int[Tensor, "B T"]:
    """Count the held valid queries that lie `distance` or more behind each of the first T entries and see
    it."""
    seen = part.num_seen
    first = seen - part.num_queries
    # counted[j] = number of valid queries in first..j-1
    counted_BT = torch.zeros((len(part.valid_BT), seen + 1), dtype=torch.int64, device=part.valid_BT.device)
    counted_BT[:, first + 1 :] = part.asks_BS.cumsum(-1)
    entry = torch.arange(T, device=part.valid_BT.device)
    return counted_BT[:, -1:] - counted_BT[:, (entry + distance).clamp_max(seen)]
