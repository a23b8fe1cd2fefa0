"""Scores the entries of a context for all candidates of a comparison, each distinct score once.

Candidates that differ in protection, budget or scope alone share a score. Gates score once for each set, and
a set with lookahead tokens reads them behind the same prompt. The oracle hands its score to the gate's
pipeline: the largest true risk under any question that is asked of what is left, and its right answer.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from retain.eval.config import Candidate
from retain.evidence import Evidence
from retain.future import future_risk
from retain.hf.cache.cache import Cache
from retain.hf.intercept.lookahead_pass import look_ahead
from retain.policy import Policy, score_entries
from retain.scores import Score


def gate_scores(
    model: Any, gates: Any, observed: Iterable[Evidence], prompt: Callable[[], Cache]
) -> list[Score]:
    """Scores every layer by its gate; gates with lookahead tokens read them behind `prompt()`."""
    if gates.extension is not None:
        observed = look_ahead(model, gates, prompt().engine.read_only(), list(observed))
    return [gates.score(layer) for layer in observed]


def score_candidates(
    policies: Mapping[Candidate, Policy],
    candidates: Iterable[Candidate],
    observed: Sequence[Evidence],
    learned: Mapping[str, Sequence[Score]],
    seeds: Sequence[int],
) -> dict[Candidate, list[Score]]:
    """Scores every layer for each candidate, once for all that agree in what a score depends on.

    Args:
        policies: Of the candidates.
        candidates: To be scored.
        observed: Evidence of every layer.
        learned: By name of a policy, the scores that are handed to its pipeline.
        seeds: Of each sequence, for policies that draw.
    """
    made: dict[str, list[Score]] = {}
    scores = {}
    for candidate in candidates:
        policy, handed = policies[candidate], learned.get(candidate.policy)
        how = (policy.observed, policy.learned, policy.fusion, policy.fusion_weight, policy.draw is not None)
        key = json.dumps([id(handed), *how, policy.observed_settings], sort_keys=True, default=str)
        if key not in made:
            by_gates: Sequence[Score | None] = handed or [None] * len(observed)
            made[key] = [
                score_entries(policy, layer, learned=score, seeds_B=seeds)
                for layer, score in zip(observed, by_gates, strict=True)
            ]
        scores[candidate] = made[key]
    return scores


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
        risks = [
            future_risk(layer, document_tokens=document_tokens, sources=("appendix",))[0] for layer in layers
        ]
        largest = [*map(torch.maximum, largest, risks)] if largest else risks
    return [Score(risk_BHT, "risk") for risk_BHT in largest]
