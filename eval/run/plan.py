"""Loads what a comparison needs (model, policies, gates, rows), and lists the lines that it measures.

A unit is a context with all questions on it, at one time of eviction, and the keys of its lines. It depends
on the config alone, so that units run in any order, in any process, and again.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch

from retain.budget.statement import Budget
from retain.eval.config import (
    FULL_BUDGET,
    FULL_CANDIDATE,
    Candidate,
    CompareConfig,
    budget_label,
    candidates_of,
    resolve_device,
)
from retain.eval.run.table import GROWING, KEY, Key, digest
from retain.eval.tasks.encode import Encoded, encode
from retain.eval.tasks.row import Row
from retain.eval.tasks.sources import load_rows
from retain.gates import GateSet
from retain.hf.intercept.attach import attach
from retain.models.named import load
from retain.presets import Policy


@dataclass(frozen=True)
class Loaded:
    """A model with everything that scores it.

    Attributes:
        model: Attached.
        tokenizer: Of the model.
        policies: Policy of each candidate.
        gates: Sets of gates, by where they come from.
        users: Policy -> where its gates come from.
    """

    model: Any
    tokenizer: Any
    policies: Mapping[Candidate, Policy]
    gates: Mapping[str, GateSet]
    users: Mapping[str, str]

    @property
    def device(self) -> torch.device:
        """Device of token ids."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def gates_of(self, candidate: Candidate) -> GateSet | None:
        """Gates that a candidate's policy takes."""
        return self.gates[self.users[candidate.policy]] if candidate.policy in self.users else None

    def sets_of(self, candidates: Iterable[Candidate]) -> dict[str, GateSet]:
        """Sets of gates that any of these candidates takes, by where they come from."""
        places = (self.users[one.policy] for one in candidates if one.policy in self.users)
        return {place: self.gates[place] for place in dict.fromkeys(places)}


@dataclass(frozen=True)
class Context:
    """A context with its questions: rows of one `context_id`, and the same in tokens of the model."""

    rows: tuple[Row, ...]
    encoded: tuple[Encoded, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the context."""
        return self.encoded[0].context_ids

    def read_back(self, question: int) -> tuple[int, ...]:
        """The part of a right answer that generation reads: all but its last token."""
        return self.encoded[question].answer_ids[: self.rows[question].max_new_tokens - 1]

    @property
    def random_seed(self) -> int:
        """Seed of random scores, the same in every process."""
        first = self.rows[0]
        text = f"{first.seed}/{first.task}/{first.item}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Unit:
    """A context at one time of eviction, with the identity of every line to measure, by its key."""

    when: str
    context: Context
    identities: Mapping[Key, str]

    @property
    def name(self) -> str:
        """Name for messages."""
        first, last = self.context.rows[0], self.context.rows[-1]
        items = f"item {first.item}" if first is last else f"items {first.item} to {last.item}"
        return f"{items} of {first.task} (seed {first.seed}, {self.when})"


def load_model(
    name: str, device: str = "cpu", *, local_rank: int = 0, device_map: str | None = None, **how: Any
) -> tuple[Any, Any]:
    """Loads a model, attached, frozen and on its device, and its tokenizer, for commands that ask texts;
    a ValueError if it cannot be loaded. `how` as `retain.load` takes it."""
    place = resolve_device(device, local_rank)
    model, tokenizer = load(name, device_map=device_map, **how)
    if tokenizer is None:
        raise ValueError(f"model={name!r} has no tokenizer, and texts need one.")
    if device_map is None:
        model = model.to(place)
    attach(model.requires_grad_(False))
    return model, tokenizer


def task_settings(config: CompareConfig, task: str) -> dict[str, Any]:
    """Settings of a task: those of its group, and those of the task before them."""
    stated = config.task_settings
    return {**stated.get(task.partition("/")[0], {}), **stated.get(task, {})}


def load_contexts(config: CompareConfig, task: str, model: Any, tokenizer: Any) -> list[Context]:
    """Makes and encodes the rows of a task, of all seeds, and joins those of one context. A data set has the
    same rows for every seed; they are asked once. ValueError: rows that cannot be made or encoded."""
    rows: dict[tuple[int, int], Row] = {}
    for seed in config.seeds:
        how = {"context_tokens": config.context_tokens, "seed": seed, "first_item": config.first_item}
        made = load_rows(task, tokenizer, items=config.items_per_task, **how, **task_settings(config, task))
        rows |= {(row.seed, row.item): row for row in made}
    groups = groupby(rows.values(), key=lambda row: (row.seed, row.context_id))
    contexts = [tuple(group) for _, group in groups]
    return [
        Context(of_one, tuple(encode(row, tokenizer, model, chat=config.chat) for row in of_one))
        for of_one in contexts
    ]


def line_key(row: Row, candidate: Candidate, budget: Budget, when: str, question: str) -> Key:
    """Returns the key of a line."""
    stated = {"policy": candidate.policy, "protection": candidate.protection}
    stated |= {"budget": budget_label(budget), "when": when, "question": question}
    return tuple(stated[name] if name in stated else getattr(row, name) for name in KEY)


def units_of(
    config: CompareConfig, contexts: Iterable[Context], identity: Mapping[str, Any]
) -> Iterator[Unit]:
    """Yields a unit for each context and time of eviction.

    A line's identity is of the model, the policy, the task's settings, and the row as the model reads it and
    its answer is scored; `identity` is that of the run, as its manifest holds it.
    """
    shared = {name: part for name, part in identity.items() if name not in GROWING}

    @cache
    def of_policy(task: str, label: str) -> str:
        return digest([shared, identity["policies"].get(label), identity["tasks"][task]])

    for context in contexts:
        of_row = [
            digest(
                [one.context_ids, one.question_ids, one.end_ids, row.answers, row.max_new_tokens, row.metric]
            )
            for row, one in zip(context.rows, context.encoded, strict=True)
        ]
        for when in config.when:
            cells = [(FULL_CANDIDATE, FULL_BUDGET)]
            cells += [(one, budget) for budget in config.budgets for one in candidates_of(config, when)]
            identities = {
                line_key(row, candidate, budget, when, question): digest(
                    [of_policy(row.task, candidate.label), read]
                )
                for candidate, budget in cells
                for row, read in zip(context.rows, of_row, strict=True)
                for question in (config.question if when == "prefill" else ("unknown",))
            }
            yield Unit(when, context, identities)
