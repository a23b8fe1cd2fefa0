"""Future risk: what a perfect gate would say. The one definition, for targets and for the oracle.

In: the evidence of a whole sequence, `[document; appendix]`, in which the appendix (question and answer) was
run after the document with nothing evicted. Out: for each of the document's entries, the largest
value-weighted attention that any query which can still come after the entry's eviction pays it. The decision
taken here: which queries those are. Of the document's own tokens, those at distance `horizon` or more (nearer
ones always find the entry, which is protected while recent); of the appendix, all. Only `train/` and `eval/`
may import this file: at inference, the future is not known.
"""

from collections.abc import Collection

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from retain.attention_chunks import truncate
from retain.evidence import Evidence
from retain.paid import paid
from retain.registry import lookup
from retain.scores.value_norm import value_norm_l1

SOURCES = {"own": "the document's own tokens", "appendix": "the tokens appended after the document"}


@torch.no_grad()
def future_risk(
    evidence: Evidence,
    *,
    document_tokens: int,
    horizon: int = 32,
    sources: Collection[str] = ("own", "appendix"),
    chunk: int | None = None,
) -> tuple[Float32[Tensor, "B H document_tokens"], Bool[Tensor, "B H document_tokens"]]:
    """Largest value-weighted attention that an entry will be paid after it could have been evicted.

    `risk[b, h, i] = max_{j in J(i), q in group(h)} a_qj[i] * ||v_i W_O^q||_1`, where `a_qj` is the softmax of
    query j over all valid keys of the whole sequence up to itself, and `J(i)` holds the valid queries
    `{j in document: j - i >= horizon}` (source `own`) and `{j in appendix}` (source `appendix`).

    The first `document_tokens` entries are the document, the others the appendix; both may contain padding,
    anywhere, and distance is counted in entries. No rows of attention are held beyond `chunk` queries at a
    time, and on CUDA none: memory is linear in T.

    Args:
        evidence: one layer over the whole sequence; the queries of the chosen sources must be held.
        document_tokens: entries (padding included) of the document block, 1..T.
        horizon: least distance of a document query, in entries; the protected recent window.
        sources: `own`, `appendix`, or both.
        chunk: queries at a time; changes memory, not the result. None: as many as are quick.

    Returns:
        risk, float32, 0 where no such query exists; and whether one exists: entries that no query can reach
        (padding, and without an appendix the last `horizon` ones) belong in no loss.

    Raises:
        ValueError: if the sources, the document's length or the queries held make no sense.
    """
    T = evidence.num_seen
    _check(evidence, document_tokens, horizon, sources, chunk)
    B, Q = evidence.queries_BQSD.shape[:2]
    H = evidence.num_heads
    valid_BT = evidence.valid_BT
    worst_BQT = torch.zeros((B, Q, document_tokens), device=valid_BT.device)
    reached_BT = torch.zeros((B, document_tokens), dtype=torch.bool, device=valid_BT.device)

    # (evidence, first query, distance): the document alone is enough for its own queries, which cannot see
    # the appendix.
    walks = []
    if "own" in sources:
        walks.append((truncate(evidence, document_tokens) if document_tokens < T else evidence, 0, horizon))
    if "appendix" in sources:
        walks.append((evidence, document_tokens, 0))
    for part, first, distance in walks:
        start = first - (part.num_seen - part.num_queries)
        (most_BQT,) = paid(part, "max", start=start, entries=document_tokens, distance=distance, chunk=chunk)
        worst_BQT = torch.maximum(worst_BQT, most_BQT)
        reached_BT |= _reached(part, first, distance, document_tokens)

    reached_BT &= valid_BT[:, :document_tokens]
    norm_BQT = value_norm_l1(evidence.values_BHTD[:, :, :document_tokens], evidence.output_weight_QDE)
    risk_BHT = (worst_BQT * norm_BQT).unflatten(1, (H, Q // H)).amax(2).float()
    reached_BHT = reached_BT[:, None].expand(B, H, document_tokens)
    return risk_BHT.masked_fill(~reached_BHT, 0.0), reached_BHT


def _reached(
    evidence: Evidence, first: int, distance: int, document_tokens: int
) -> Bool[Tensor, "B document_tokens"]:
    """Whether a valid query at `first` or later lies `distance` or more behind the entry and sees it."""
    T = evidence.num_seen
    # counted[j] = number of valid queries in first..j-1
    counted_BT = torch.zeros(
        (evidence.valid_BT.shape[0], T + 1), dtype=torch.int64, device=evidence.valid_BT.device
    )
    counted_BT[:, first + 1 :] = evidence.valid_BT[:, first:].cumsum(-1)
    entry = torch.arange(document_tokens, device=evidence.valid_BT.device)
    earliest = (entry + distance).clamp_max(T)
    latest = torch.full_like(entry, T) if evidence.window is None else (entry + evidence.window).clamp_max(T)
    return counted_BT[:, torch.maximum(latest, earliest)] > counted_BT[:, earliest]


def _check(
    evidence: Evidence, document_tokens: int, horizon: int, sources: Collection[str], chunk: int | None
) -> None:
    T, S = evidence.num_seen, evidence.num_queries
    for source in sources:
        lookup(source, SOURCES, what="source of future queries")
    if not sources:
        raise ValueError(f"future risk needs a source of queries: pass one or both of {', '.join(SOURCES)}.")
    if not 1 <= document_tokens <= T:
        raise ValueError(f"document_tokens is 1..{T}, the entries of the sequence; got {document_tokens}.")
    if horizon < 0 or (chunk is not None and chunk < 1):
        raise ValueError(f"horizon is 0 or more and chunk 1 or more; got horizon {horizon}, chunk {chunk}.")
    if "appendix" in sources and document_tokens == T:
        raise ValueError(
            f"the source 'appendix' needs tokens after the document, and the document fills all {T} entries: "
            "append a question and answer, or pass sources=('own',)."
        )
    wanted = T if "own" in sources else T - document_tokens
    if wanted > S:
        raise ValueError(
            f"these sources need the last {wanted} queries, the evidence holds {S}: record more queries."
        )
