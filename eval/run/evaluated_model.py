"""Loads the model that answers, with everything that scores it, and plans the units of work.

What is fitted on documents (the token-identity table) is fitted once for each model, and lies in the run's
folder with what it was made from.
"""

import gc
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from retain.eval.config import (
    SHARED,
    CompareConfig,
    Line,
    all_lines,
    find_policy,
    fits_table,
    gate_names,
    gate_users,
    indices_of,
    resolve_device,
    with_all_tasks,
)
from retain.eval.run.baselines import TokenIdentity, fit_token_identity
from retain.eval.run.gate_sources import load_source
from retain.eval.tasks.suite import Suite
from retain.hf.intercept.attach import attach
from retain.hf.model.identity import fingerprint
from retain.policy import Policy
from retain.precision import Precision
from retain.process.provenance import write_json
from retain.reference.documents import Document

T = TypeVar("T")

# The path of a unit whose regimes share a prefill.
SHARED_PATH = "shared"


@dataclass(frozen=True)
class Unit:
    """Items `start..stop` of one task, for one seed.

    Attributes:
        path: "shared": all regimes that share a prefill; or one of the regimes that do not.
    """

    seed: int
    task: str
    start: int
    stop: int
    path: str = SHARED_PATH

    @property
    def key(self) -> str:
        """Name of the unit in `items.jsonl`."""
        own = f"seed{self.seed}/{self.task}/{self.start}-{self.stop}"
        return own if self.shared else f"{own}/{self.path}"

    @property
    def shared(self) -> bool:
        """Whether its regimes share a prefill."""
        return self.path == SHARED_PATH

    def regimes(self, config: CompareConfig) -> tuple[str, ...]:
        """Regimes that it measures."""
        if not self.shared:
            return (self.path,)
        return tuple(regime for regime in config.regimes if regime in SHARED)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with everything that scores it: what a unit needs besides its items.

    Attributes:
        seed: Of the run.
        model: Attached.
        token_identity: The control's table, if it is asked for.
        policies: By label of a line.
        sets: Gates of every set that a policy takes, by name.
        users: Policy -> name of the set that it takes; who takes none is left out.
    """

    seed: int
    model: Any
    token_identity: TokenIdentity | None
    policies: Mapping[str, Policy]
    sets: Mapping[str, Any]
    users: Mapping[str, str]

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def gates_of(self, line: Line) -> Any | None:
        """The gates that a line's policy takes; None for one that takes none, and for controls."""
        return self.sets[self.users[line.policy]] if line.policy in self.users else None

    def sets_of(self, lines: Iterable[Line]) -> dict[str, Any]:
        """The sets of gates that any of these lines takes, by name."""
        names = dict.fromkeys(self.users[line.policy] for line in lines if line.policy in self.users)
        return {name: self.sets[name] for name in names}

    def gate_bytes(self, line: Line) -> int:
        """Bytes of the gates that a policy takes, parameters and buffers; 0 for one that takes none."""
        gates = self.gates_of(line)
        return 0 if gates is None else sum(own.nbytes for own in (*gates.parameters(), *gates.buffers()))

    def gates_sha(self, line: Line) -> str:
        """First 12 hex digits of the sha256 of those gates' weights; empty for a policy that takes none."""
        return str(getattr(self.gates_of(line), "metadata", {}).get("sha256") or "")[:12]

    def held_as(self, name: str) -> tuple[int, Precision | None]:
        """How a line holds what it leaves: bytes that attention reads beside each entry, and the
        precision."""
        policy = self.policies.get(name)
        return (0, None) if policy is None else (policy.beside_bytes, policy.precision)

    def trained(self, line: Line) -> bool:
        """Whether something trained or measured beforehand belongs to a policy: gates, weights of heads."""
        policy = self.policies.get(line.name)
        return (policy is not None and policy.weights is not None) or line.policy in self.users


def plan(config: CompareConfig, suite: Suite) -> list[Unit]:
    """All units of a run, a task at a time, so that a killed run leaves whole tasks."""
    paths = dict.fromkeys(SHARED_PATH if regime in SHARED else regime for regime in config.regimes)
    ordered = sorted(paths, key=lambda path: path != SHARED_PATH)
    return [
        Unit(seed, task, start, min(start + config.unit_items, asked.stop), path)
        for seed in config.seeds
        for task in with_all_tasks(config, suite)
        for asked in [indices_of(config, suite, task)]
        for start in asked[:: config.unit_items]
        for path in ordered
    ]


def item_seed(seed: int, task: str, index: int) -> int:
    """Seed of an item's random scores: its own, whatever batch and process it is in."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{task}/{index}".encode()).digest()[:4], "big")


@contextmanager
def naming(unit: Unit, cell: str) -> Iterator[None]:
    """Says where something went wrong. Nothing of the unit is written then: a crash is neither an answer nor
    a score; the same command goes on here once it is mended.

    Raises:
        ValueError: Out of memory, or what a policy refuses, with the unit and cell named.
        RuntimeError: Anything else that goes wrong, with the unit and cell named.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ValueError(
            f"out of memory in {unit.key}, {cell}: nothing of it was scored. Lower batch_items or "
            f"max_sequences, and start the run again: it goes on here ({str(error).partition('.')[0]})."
        ) from error
    except AssertionError:
        raise
    except ValueError as error:
        raise ValueError(f"in {unit.key}, {cell}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"in {unit.key}, {cell}: {type(error).__name__}: {error}") from error


def one_by_one(config: CompareConfig, suite: Suite, look: Callable[[int, Any], T]) -> dict[int, T]:
    """Looks at the model of every seed, one after another: it is let go before the next one is loaded, and
    loaded once where all seeds share it.

    Returns:
        By seed, what was seen.
    """
    model = None
    seen = {}
    for seed in config.seeds:
        if model is None or suite.seeds is not None:
            model = None
            gc.collect()  # hooks make cycles
            model = suite.load_model(seed)
        seen[seed] = look(seed, model)
    return seen


class EvaluatedModels:
    """The model of one seed at a time.

    What the next seed shares (the model, where the suite's is the same for all seeds; gates of the same
    folder) is kept; any other model is let go before the next one is loaded.
    """

    def __init__(self, config: CompareConfig, suite: Suite, local_rank: int = 0):
        self.config, self.suite, self.local_rank = config, suite, local_rank
        self.held: EvaluatedModel | None = None

    def of(self, seed: int) -> EvaluatedModel:
        """The model of a seed (`load_evaluated`)."""
        if self.held is None or self.held.seed != seed:
            if self.suite.seeds is not None:
                self.held = None
                gc.collect()  # hooks make cycles
            self.held = load_evaluated(self.config, self.suite, seed, self.local_rank, self.held)
        return self.held


def load_evaluated(
    config: CompareConfig, suite: Suite, seed: int, local_rank: int = 0, before: EvaluatedModel | None = None
) -> EvaluatedModel:
    """Loads a seed's model, its gates, and the token-identity table (fitted once, kept in the run's folder).

    Args:
        before: Of another seed with the same model, which is taken over; gates too, if they are the same.

    Raises:
        ValueError: If the gates belong to another model, or are damaged.
    """
    policies = {line.name: find_policy(config, line.policy, line.protection) for line in all_lines(config)}
    if before is not None:
        model = before.model
    else:
        model = suite.load_model(seed)
        if config.text.device_map is None:
            model = model.to(resolve_device(config.device, local_rank))
        attach(model)
    sets = _gate_sets(config, seed, model, before)

    def documents() -> Iterator[Document]:
        # A bar of its own below the run's: fitting on documents can take minutes.
        yield from tqdm(
            suite.documents(seed, config.control_documents, config.context_tokens),
            f"seed {seed}: token identity",
            config.control_documents,
            unit="document",
            position=1 + config.seeds.index(seed),
            leave=False,
            disable=local_rank != 0,
        )

    table = None
    if fits_table(config):
        made_from = {
            "model": fingerprint(model)["sha256"],
            "documents": config.control_documents,
            "context_tokens": config.context_tokens,
            "horizon": config.horizon,
        }
        table = _kept(
            config.folder / f"token_identity-seed{seed}.safetensors",
            made_from,
            lambda: fit_token_identity(model, documents(), horizon=config.horizon),
        )
    return EvaluatedModel(seed, model, table, policies, sets, gate_users(config))


def _gate_sets(config: CompareConfig, seed: int, model: Any, before: EvaluatedModel | None) -> dict[str, Any]:
    """The gates of every set that a policy takes; a folder is read once, and what the seed before had of the
    same folder is taken over. Random weights are every seed's own."""
    read: dict[str, Any] = {}
    sets = {}
    for name in gate_names(config):
        same = before is not None and config.gates_of(before.seed, name) == config.gates_of(seed, name)
        if before is not None and same and name in before.sets and config.source_of(name).control != "random":
            sets[name] = before.sets[name]
        else:
            sets[name] = load_source(config, seed, name, model, read)
    return sets


def _kept(path: Path, made_from: dict[str, Any], make: Callable[[], TokenIdentity]) -> TokenIdentity:
    """A table that lies in a file: read back where a note beside it says that it was made from this, else
    made and written, then its note. Without a note, or damaged, a table counts for nothing."""
    note = path.with_suffix(".json")
    with suppress(OSError, ValueError, RecursionError, SafetensorError):
        if json.loads(note.read_text(encoding="utf-8")) == made_from:
            return TokenIdentity.load(path)
    table = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    table.save(path)
    write_json(note, made_from)
    return table
