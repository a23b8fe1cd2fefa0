"""Scores the entries of a context by gates, and by the oracle: the largest true risk under any question that
is asked of what is left, and its right answer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from retain.attention.chunked import truncate
from retain.evidence import Evidence
from retain.future import future_use
from retain.hf.cache.cache import Cache
from retain.hf.intercept.lookahead_pass import look_ahead
from retain.scores import Score


def gate_scores(
    model: Any, gates: Any, observed: Iterable[Evidence], prompt: Callable[[], Cache]
) -> list[Score]:
    """Scores every layer by its gate; gates with lookahead tokens read them behind `prompt()`."""
    if gates.extension is not None:
        observed = look_ahead(model, gates, prompt().engine.read_only(), list(observed))
    return [gates.score(layer) for layer in observed]


def first_entries(score: Score, count: int) -> Score:
    """Cuts a score to the first `count` entries; its window, to what of it is among them."""
    columns = {name: getattr(score, name) for name in ("values_BHT", "first_BHT", "draw_BHT")}
    cut: dict[str, Any] = {
        name: None if values is None else values[..., :count] for name, values in columns.items()
    }
    return replace(score, **cut, window=max(0, score.window - (score.values_BHT.shape[-1] - count)))


def oracle(teachers: Iterable[Sequence[Evidence]], document_tokens: int) -> list[Score]:
    """Returns the true future risk of the first entries of a sequence: the largest under any of the tokens
    that may really follow.

    Args:
        teachers: For each question, every layer over `[document; rest of the question; right answer]`,
            nothing evicted. Queries of the rest alone count.
        document_tokens: Entries that the eviction will see.

    Returns:
        A score a layer, `[B, H, document_tokens]`, in units of risk.
    """
    largest: list[torch.Tensor] = []
    for layers in teachers:
        risks = [_risk(layer, document_tokens) for layer in layers]
        largest = [*map(torch.maximum, largest, risks)] if largest else risks
    return [Score(risk_BHT, "risk") for risk_BHT in largest]


def _risk(layer: Evidence, document_tokens: int) -> torch.Tensor:
    """The risk of the first entries of a layer under the queries behind them."""
    start = document_tokens - (layer.num_seen - layer.num_queries)
    assert 0 <= start < layer.num_queries, "a query for each entry behind the document"
    behind = replace(layer, queries_BQSD=layer.queries_BQSD[:, :, start:])
    return future_use(truncate(layer, document_tokens), [("appendix", behind)], sources={"appendix": 1.0})[0]
