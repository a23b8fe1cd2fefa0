"""Measures a unit of contexts: makes the cache of every candidate and budget, answers, scores, counts.

Caches that evict no more decode as one batch, as many sequences as `max_sequences` allows; a cache that
evicts while it decodes decodes alone. A group of candidates that decode together is measured whole or, if all
its lines are in the table, not at all, so that a run which was killed gives the same numbers.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from retain.budget.statement import Budget
from retain.eval.config import (
    FULL,
    FULL_BUDGET,
    FULL_CANDIDATE,
    Candidate,
    CompareConfig,
    budget_label,
    candidates_of,
)
from retain.eval.metrics import METRICS
from retain.eval.run.answers import respond
from retain.eval.run.memory import Held, check_budget, held_of
from retain.eval.run.plan import Context, Loaded, Unit, naming
from retain.eval.run.prefill import Caches, Reader, SingleEviction, caches_of
from retain.eval.run.table import GROWING, KEY, Key, Line, digest, key_of
from retain.eval.tasks.encode import answer_text
from retain.eval.tasks.row import Row


class Keys:
    """Keys and identities of the lines of a comparison; `identity` is that of the run, as its manifest holds
    it."""

    def __init__(self, config: CompareConfig, identity: Mapping[str, Any]):
        self.config, self.identity = config, identity
        self.of_policy: dict[tuple[str, str], str] = {}
        self.of_row: dict[tuple[str, int, int], str] = {}

    def key(self, row: Row, candidate: Candidate, budget: Budget, when: str, question: str) -> Key:
        """Key of a line."""
        stated = {"policy": candidate.policy, "protection": candidate.protection}
        stated |= {"budget": budget_label(budget), "when": when, "question": question}
        return tuple(stated[name] if name in stated else getattr(row, name) for name in KEY)

    def identity_of(self, context: Context, number: int, candidate: Candidate) -> str:
        """Identity of a line: the model, the policy, the task's settings, and the row as the model reads it
        and its answer is scored."""
        row, encoded = context.rows[number], context.encoded[number]
        place, which = (row.task, row.seed, row.item), (row.task, candidate.label)
        if place not in self.of_row:
            read = (encoded.context_ids, encoded.question_ids, encoded.end_ids)
            self.of_row[place] = digest([*read, row.answers, row.max_new_tokens, row.metric])
        if which not in self.of_policy:
            parts = {name: part for name, part in self.identity.items() if name not in GROWING}
            growing = self.identity["policies"].get(candidate.label), self.identity["tasks"][row.task]
            self.of_policy[which] = digest([parts, *growing])
        return digest([self.of_policy[which], self.of_row[place]])

    def expected(self, unit: Unit) -> dict[Key, str]:
        """Key and identity of every line of a unit."""
        states = self.config.question if unit.when == "prefill" else ("unknown",)
        cells = [(FULL_CANDIDATE, FULL_BUDGET)]
        cells += [(c, b) for b in self.config.budgets for c in candidates_of(self.config, unit.when)]
        return {
            self.key(row, candidate, budget, unit.when, state): self.identity_of(context, number, candidate)
            for context in unit.contexts
            for number, row in enumerate(context.rows)
            for candidate, budget in cells
            for state in states
        }


@torch.inference_mode()
def measure(
    config: CompareConfig,
    loaded: Loaded,
    unit: Unit,
    keys: Keys,
    done: Mapping[Key, Mapping[str, Any]],
) -> list[Line]:
    """Measures the lines of a unit that are not done.

    Raises:
        RuntimeError: A cache does not hold what its budget states.
        ValueError: Out of memory, or a refusal of a policy; the unit is named.
    """
    reader = Reader(config, loaded, unit)
    made: list[Line] = []
    for question, caches in caches_of(reader):
        single = isinstance(caches, SingleEviction)
        width = max(1, config.max_sequences // len(unit.contexts)) if single else 1
        for budget in (FULL_BUDGET, *config.budgets):
            candidates = (FULL_CANDIDATE,) if budget is FULL_BUDGET else reader.candidates
            for start in range(0, len(candidates), width):
                group = candidates[start : start + width]
                wanted = {
                    keys.key(context.rows[number], candidate, budget, unit.when, question)
                    for context in unit.contexts
                    for number in caches.questions
                    for candidate in group
                }
                if wanted <= done.keys():
                    continue
                lines = _group(reader, question, caches, budget, group, keys)
                made += [line for line in lines if key_of(asdict(line)) not in done]
    return made


def _group(
    reader: Reader,
    state: str,
    caches: Caches,
    budget: Budget,
    candidates: Sequence[Candidate],
    keys: Keys,
) -> list[Line]:
    """Measures candidates whose caches decode as one batch."""
    unit, loaded, single = reader.unit, reader.loaded, isinstance(caches, SingleEviction)
    contexts = unit.contexts
    cell = f"{', '.join(one.label for one in candidates)} at {budget_label(budget)}, question {state}"
    began = time.perf_counter()
    caches_made, behind, lines = [], list[Held](), list[Line]()
    for candidate in candidates:
        with naming(unit, f"{candidate.label} at {budget_label(budget)}, question {state}"):
            cache = caches.cache_of(candidate, budget)
            caches_made.append(cache)
            if candidate.policy != FULL:
                check_budget(cache, cell, budget, [loaded.policies[candidate]] * len(contexts))
            if single:
                behind += held_of(cache)
    for number in caches.questions:
        first, encoded = contexts[0].rows[number], contexts[0].encoded[number]
        with naming(unit, cell):
            ids_BT, mask_BT = reader.ids(number)
            if isinstance(caches, SingleEviction):
                slack = ids_BT.shape[1] - caches_made[0].num_seen + first.max_new_tokens
                cache = type(cache).concat(caches_made, slack=slack)
            else:
                cache = caches.asked(caches_made[0], number)
            answers = respond(
                loaded.model,
                cache,
                ids_BT.repeat(len(candidates), 1),
                mask_BT.repeat(len(candidates), 1),
                new_tokens=first.max_new_tokens,
                end_ids=encoded.end_ids,
            )
            if not single and candidates[0].policy != FULL:
                check_budget(cache, cell, budget, [loaded.policies[candidates[0]]] * len(contexts))
            held = behind or held_of(cache)
        seconds = (time.perf_counter() - began) / len(answers)
        cells = [(one, context) for one in candidates for context in contexts]
        for (candidate, context), counts, answer in zip(cells, held, answers, strict=True):
            row = context.rows[number]
            text = answer_text(row, answer, loaded.tokenizer, encoded.end_ids)
            score = METRICS[row.metric](text, row) if answer and text.strip() else 0.0
            where = keys.key(row, candidate, budget, unit.when, state)
            more: dict[str, Any] = {
                "context_id": row.context_id,
                "stratum": row.stratum,
                "score": float(score),
            }
            more |= {"seconds": round(seconds, 4), "tokens": len(answer), "text": text}
            lines.append(
                Line(
                    run=reader.config.run,
                    model=reader.config.model,
                    gates=loaded.users.get(candidate.policy),
                    keep_ratio=budget.keep_ratio,
                    identity=keys.identity_of(context, number, candidate),
                    **dict(zip(KEY, where, strict=True)),
                    **more,
                    **asdict(counts),
                )
            )
        began = time.perf_counter()
    return lines
