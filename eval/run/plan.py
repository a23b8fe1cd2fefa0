"""Loads what a comparison needs (model, policies, gates, rows), and divides its work into units.

A unit is a few contexts that are read together, with all questions on them, at one time of eviction. It
depends on the config alone, so that units run in any order, in any process, and again.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from retain.eval.config import Candidate, CompareConfig, resolve_device
from retain.eval.tasks.encode import Encoded, encode
from retain.eval.tasks.row import Row
from retain.eval.tasks.sources import load_rows
from retain.gates import GateSet
from retain.hf.intercept.attach import attach
from retain.models.named import load_named_model, load_named_tokenizer
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
    def tails(self) -> tuple[tuple[int, int, int], ...]:
        """Tokens of each question, of its answer at most, and of what is read back of a right one."""
        return tuple(
            (len(encoded.question_ids), row.max_new_tokens, len(self.read_back(number)))
            for number, (row, encoded) in enumerate(zip(self.rows, self.encoded, strict=True))
        )

    @property
    def random_seed(self) -> int:
        """Seed of random scores, the same in every batch and process."""
        first = self.rows[0]
        text = f"{first.seed}/{first.task}/{first.item}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Unit:
    """Contexts of one task and seed that are read together, at one time of eviction. Questions, answers and
    ends are alike in length; contexts may differ, and are padded."""

    when: str
    contexts: tuple[Context, ...]

    @property
    def rows(self) -> list[Row]:
        """Rows of all contexts."""
        return [row for context in self.contexts for row in context.rows]

    @property
    def name(self) -> str:
        """Name for messages."""
        first, last = self.rows[0], self.rows[-1]
        return f"items {first.item} to {last.item} of {first.task} (seed {first.seed}, {self.when})"

    @property
    def questions(self) -> range:
        """Numbers of the questions on each context."""
        return range(len(self.contexts[0].rows))


def load_model(config: CompareConfig, local_rank: int = 0) -> tuple[Any, Any]:
    """Loads the model, attached and on its device, and its tokenizer.

    Raises:
        ValueError: It cannot be loaded, or has no tokenizer.
    """
    origin: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    tokenizer = load_named_tokenizer(config.model, **origin)
    if tokenizer is None:
        raise ValueError(f"model={config.model!r} has no tokenizer, and rows of text need one.")
    model = load_named_model(config.model, dtype=config.dtype, device_map=config.device_map, **origin)
    if config.device_map is None:
        model = model.to(resolve_device(config.device, local_rank))
    attach(model)
    return model, tokenizer


def task_settings(config: CompareConfig, task: str) -> dict[str, Any]:
    """Settings of a task: those of its group, and its own before them."""
    stated = config.task_settings
    return {**stated.get(task.partition("/")[0], {}), **stated.get(task, {})}


def load_contexts(config: CompareConfig, task: str, model: Any, tokenizer: Any) -> list[Context]:
    """Makes and encodes the rows of a task, of all seeds, and joins those of one context. A data set has the
    same rows for every seed; they are asked once.

    Raises:
        ValueError: Rows that cannot be made or encoded, or that the task lacks.
    """
    settings = task_settings(config, task)
    rows: dict[tuple[int, int], Row] = {}
    for seed in config.seeds:
        how = {"context_tokens": config.context_tokens, "seed": seed, "first_item": config.first_item}
        made = load_rows(task, tokenizer, items=config.items_per_task, **how, **settings)
        rows |= {(row.seed, row.item): row for row in made}
    contexts = []
    for _, group in groupby(rows.values(), key=lambda row: (row.seed, row.context_id)):
        same = tuple(group)
        encoded = [encode(row, tokenizer, model, chat=config.chat, template=config.template) for row in same]
        contexts.append(Context(same, tuple(encoded)))
    return contexts


def units_of(config: CompareConfig, contexts: Sequence[Context]) -> list[Unit]:
    """Divides the contexts of a task into units: `batch_items` in order, and of these the ones that can be
    read together.

    Where entries go while an answer is decoded, a context whose answers end anywhere stands alone: a cache
    would count what a finished sequence is filled up with. Chunks have equal borders only in contexts of
    equal length.
    """
    units = []
    for _, same_seed in groupby(contexts, key=lambda one: one.rows[0].seed):
        whole = list(same_seed)
        for start in range(0, len(whole), config.batch_items):
            for when in config.when:
                groups: dict[Any, list[Context]] = {}
                for place, context in enumerate(whole[start : start + config.batch_items]):
                    ends = context.encoded[0].end_ids
                    alone = place if when != "prefill" and ends else None
                    width = len(context.ids) if "chunk" in when else None
                    groups.setdefault((context.tails, ends, alone, width), []).append(context)
                units += [Unit(when, tuple(group)) for group in groups.values()]
    return units


@contextmanager
def naming(unit: Unit, cell: str) -> Iterator[None]:
    """Says in which unit and cell something went wrong. Nothing of the unit is written then: a crash is
    neither an answer nor a score; the same command goes on here once it is mended.

    Raises:
        ValueError: Out of memory, or a refusal of a policy.
        RuntimeError: Any other error.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ValueError(
            f"out of memory in {unit.name}, {cell}: nothing of it was scored. Lower batch_items or "
            f"max_sequences, and start the run again: it goes on here ({str(error).partition('.')[0]})."
        ) from error
    except AssertionError:
        raise
    except ValueError as error:
        raise ValueError(f"in {unit.name}, {cell}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"in {unit.name}, {cell}: {type(error).__name__}: {error}") from error
