"""Computes rows of attention for many queries, a few at a time.

Memory is `B * Q * chunk * T` floats, whatever the number of queries; each chunk reads only the keys that its
last query sees. Use `retain.attention.received` where statistics per entry are enough.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from retain.evidence import Evidence, attention_probs
from retain.shapes import axis_of


def truncate(evidence: Evidence, stop: int) -> Evidence:
    """Cut the evidence to its first `stop` entries (views)."""
    axes = {name: axis_of(name, "T") for name, tensor in vars(evidence).items() if tensor is not None}
    seen: dict[str, Any] = {
        name: getattr(evidence, name).narrow(axis, 0, stop) for name, axis in axes.items() if axis is not None
    }
    queries, queried_BS = evidence.num_queries - (evidence.num_seen - stop), evidence.queried_BS
    return replace(
        evidence,
        **seen,
        queries_BQSD=evidence.queries_BQSD[:, :, :queries],
        queried_BS=None if queried_BS is None else queried_BS[:, :queries],
        running=None,  # it counts queries that come after
        lookahead_BQSD=None,  # and these have seen the entries that come after
        lookahead_keys_BHSD=None,
    )


def attention_chunks(evidence: Evidence, chunk: int, *, first: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Yield `(start, probs_BQsK)`: attention of the queries at entries `start..start+s` over entries `0..K`.

    Causality makes `K = start + s` enough. Rows of padded queries are zeros. `first` is the entry index of
    the first query wanted; queries `first..T` must be held.
    """
    T, S = evidence.num_seen, evidence.num_queries
    for start in range(first, T, chunk):
        stop = min(start + chunk, T)
        shown = truncate(evidence, stop)
        yield start, attention_probs(shown, start - (T - S), stop - (T - S))
