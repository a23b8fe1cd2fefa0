"""Scores the entries of a context for all lines of a comparison, each distinct score once.

Policies that differ in protection, budget or scope alone share a score. Gates score once for each set, and a
set with lookahead tokens reads them behind the same prompt. Controls hand their own score to the gate's
pipeline: the oracle's is the largest risk under any of the questions that are asked of what is left.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from retain.eval.config import Line
from retain.eval.run.evaluated_model import EvaluatedModel
from retain.evidence import Evidence
from retain.hf.cache.cache import Cache
from retain.hf.intercept.lookahead_pass import look_ahead
from retain.policy import Policy, score_entries
from retain.scores import Score


def wanted_by(evaluated: EvaluatedModel, lines: Iterable[Line]) -> frozenset[str]:
    """Returns what the gates of these lines look at, over all sets."""
    return frozenset[str]().union(*(gates.inputs for gates in evaluated.sets_of(lines).values()))


def gate_scores(
    model: Any, gates: Any, observed: Iterable[Evidence], prompt: Callable[[], Cache]
) -> list[Score]:
    """Scores every layer by its gate; gates with lookahead tokens read them behind `prompt()`."""
    if gates.extension is not None:
        observed = look_ahead(model, gates, prompt().engine.read_only(), list(observed))
    return [gates.score(layer) for layer in observed]


def learned_scores(
    evaluated: EvaluatedModel,
    lines: Sequence[Line],
    observed: Sequence[Evidence],
    prompt: Callable[[], Cache],
) -> dict[str, list[Score]]:
    """Scores by gates and by the token-identity control.

    Args:
        prompt: Makes the cache that lookahead tokens are read behind.

    Returns:
        By policy, its score of every layer; policies that take one set share one list.
    """
    of_set = {
        name: gate_scores(evaluated.model, gates, observed, prompt)
        for name, gates in evaluated.sets_of(lines).items()
    }
    found = {policy: of_set[name] for policy, name in evaluated.users.items() if name in of_set}
    if evaluated.token_identity is not None:
        found["token_identity"] = [evaluated.token_identity.score(layer) for layer in observed]
    return found


def score_lines(
    policies: Mapping[str, Policy],
    lines: Sequence[Line],
    observed: Sequence[Evidence],
    learned: Mapping[str, Sequence[Score]],
    seeds: Sequence[int],
) -> dict[str, list[Score]]:
    """Scores every layer for each line, once for all lines that agree in what a score depends on.

    Args:
        learned: By policy, the scores that are handed to its pipeline.
        seeds: Of each sequence, for policies that draw.
    """
    made: dict[tuple[object, ...], list[Score]] = {}
    scores = {}
    for line in lines:
        policy, handed = policies[line.name], learned.get(line.policy)
        how = (policy.observed, policy.learned, policy.fusion, policy.fusion_weight, policy.draw is not None)
        key = (id(handed), *map(str, how), json.dumps(policy.observed_settings, sort_keys=True))
        if key not in made:
            by_gates: Sequence[Score | None] = handed or [None] * len(observed)
            made[key] = [
                score_entries(policy, layer, learned=score, seeds_B=seeds)
                for layer, score in zip(observed, by_gates, strict=True)
            ]
        scores[line.name] = made[key]
    return scores


def first_entries(score: Score, count: int) -> Score:
    """Cuts a score to the first `count` entries; its window, to what of it is among them."""
    columns = {name: getattr(score, name) for name in ("values_BHT", "first_BHT", "draw_BHT")}
    cut: dict[str, Any] = {name: None if own is None else own[..., :count] for name, own in columns.items()}
    return replace(score, **cut, window=max(0, score.window - (score.values_BHT.shape[-1] - count)))
