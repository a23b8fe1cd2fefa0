"""Measures a unit: makes the cache of every candidate and budget, answers, scores, counts.

Caches that evict no more decode as one batch, as many as `max_sequences` allows; a cache that evicts while it
decodes decodes alone. A group of candidates that decode together is measured whole or, if all its lines are
in the table, not at all, so that a run which was killed gives the same numbers.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict

import torch

from retain.budget.statement import Budget
from retain.eval.config import FULL_BUDGET, FULL_CANDIDATE, Candidate, CompareConfig
from retain.eval.metrics import METRICS
from retain.eval.run.answers import respond
from retain.eval.run.memory import held_of
from retain.eval.run.plan import Loaded, Unit, line_key
from retain.eval.run.prefill import Make, Reader, caches_of
from retain.eval.run.table import KEY, Key, Line, key_of
from retain.eval.tasks.encode import answer_text
from retain.hf.cache.cache import Cache


@torch.inference_mode()
def measure(config: CompareConfig, loaded: Loaded, unit: Unit, done: Collection[Key]) -> list[Line]:
    """Measures the lines of a unit that are not done.

    Raises:
        RuntimeError: A cache does not hold what its budget states.
        ValueError: A policy refuses what it is asked for.
    """
    reader = Reader(config, loaded, unit)
    made: list[Line] = []
    width = config.max_sequences if unit.when == "prefill" else 1
    for question, numbers, make in caches_of(reader):
        for budget in (FULL_BUDGET, *config.budgets):
            candidates = (FULL_CANDIDATE,) if budget is FULL_BUDGET else reader.candidates
            for start in range(0, len(candidates), width):
                group = candidates[start : start + width]
                wanted = {
                    line_key(unit.context.rows[number], candidate, budget, unit.when, question)
                    for number in numbers
                    for candidate in group
                }
                if not all(key in done for key in wanted):
                    lines = _group(reader, question, numbers, make, budget, group)
                    made += [line for line in lines if key_of(asdict(line)) not in done]
    return made


def _group(
    reader: Reader,
    question: str,
    numbers: Sequence[int],
    make: Make,
    budget: Budget,
    candidates: Sequence[Candidate],
) -> list[Line]:
    """Measures candidates whose caches decode as one batch."""
    unit, loaded, context = reader.unit, reader.loaded, reader.unit.context
    began, lines = time.perf_counter(), list[Line]()
    caches = [make(candidate, budget) for candidate in candidates]
    held = [held_of(*pair, budget, loaded.policies) for pair in zip(caches, candidates, strict=True)]
    for number in numbers:
        row, encoded, ids_BT = context.rows[number], context.encoded[number], reader.ids(number)
        if unit.when == "prefill":
            slack = ids_BT.shape[1] - caches[0].num_seen + row.max_new_tokens
            cache = Cache.concat(caches, slack=slack)
        else:
            cache = caches[0].fork()
        ids_NT = ids_BT.repeat(len(candidates), 1)
        most, ends = row.max_new_tokens, encoded.end_ids
        answers = respond(loaded.model, cache, ids_NT, new_tokens=most, end_ids=ends)
        if unit.when != "prefill":
            held = [held_of(cache, candidates[0], budget, loaded.policies)]
        seconds = round((time.perf_counter() - began) / len(answers), 4)
        for candidate, counts, answer in zip(candidates, held, answers, strict=True):
            text = answer_text(row, answer, loaded.tokenizer)
            key = line_key(row, candidate, budget, unit.when, question)
            lines.append(
                Line(
                    **dict(zip(KEY, key, strict=True)),
                    **counts,
                    run=reader.config.run,
                    model=reader.config.model,
                    gates=loaded.users.get(candidate.policy),
                    keep_ratio=budget.keep_ratio,
                    stratum=row.stratum,
                    context_id=row.context_id,
                    score=float(METRICS[row.metric](text, row)) if text.strip() else 0.0,
                    seconds=seconds,
                    tokens=len(answer),
                    text=text,
                    identity=unit.identities[key],
                )
            )
        began = time.perf_counter()
    return lines
