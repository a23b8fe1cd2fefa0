"""Computes rows of attention for many queries, a few at a time.

Memory is `B * Q * chunk * T` floats, whatever the number of queries; each chunk reads only the keys that its
last query sees. Use `retain.attention.received` where statistics per entry are enough.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from retain.evidence import Evidence, attention_probs, padded_columns


def truncate(evidence: Evidence, stop: int) -> Evidence:
    """Cut the evidence to its first `stop` entries (views)."""
    by_head = ("keys_BHTD", "values_BHTD", "held_BHT", "learned_BHT", "value_norm_BQT")
    seen: dict[str, Any] = {name: _cut(getattr(evidence, name), stop, axis=2) for name in by_head}
    by_token = ("positions_BT", "valid_BT", "hidden_BTE", "stream_BTE", "token_ids_BT", "place_BT")
    seen |= {name: _cut(getattr(evidence, name), stop, axis=1) for name in by_token}
    queries = evidence.num_queries - (evidence.num_seen - stop)
    return replace(
        evidence,
        **seen,
        queries_BQSD=evidence.queries_BQSD[:, :, :queries],
        queried_BS=_cut(evidence.queried_BS, queries, axis=1),
        running=None,  # it counts queries that come after
        lookahead_BQSD=None,  # and these have seen the entries that come after
        lookahead_keys_BHSD=None,
    )


def _cut(field: Tensor | None, stop: int, *, axis: int) -> Tensor | None:
    return None if field is None else field.narrow(axis, 0, stop)


def attention_chunks(evidence: Evidence, chunk: int, *, first: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Yield `(start, probs_BQsK)`: attention of the queries at entries `start..start+s` over entries `0..K`.

    Causality makes `K = start + s` enough. Rows of padded queries are zeros.

    Args:
        evidence: the layer.
        chunk: queries at a time, at least 1.
        first: entry index of the first query wanted; queries `first..T` must be held.
    """
    T, S = evidence.num_seen, evidence.num_queries
    # Asked once, since the answer is waited for.
    padded = padded_columns(evidence) if evidence.held_BHT is None else T
    for start in range(first, T, chunk):
        stop = min(start + chunk, T)
        own = truncate(evidence, stop)
        yield start, attention_probs(own, start - (T - S), stop - (T - S), padded=min(padded, stop))
