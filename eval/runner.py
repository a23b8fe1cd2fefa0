"""The comparison itself: one unit of work in, its rows out; and the loop over units.

A unit is one batch of items of one task, for one seed. The model reads `[context; question; right answer]`
*once*, with nothing evicted (of the answer, what generation will have read): that is the teacher whose
attention the oracle looks at, and, cropped to what a regime has seen before it evicts, the prefill of every
policy (a causal model's entries do not depend on what comes after them; a test compares with caches that
never saw more). Every policy and keep_ratio evicts from a fork, the forks are put side by side, and all of
them decode as one batch of `model.generate`, greedily, through the ragged cache. Items of unlike lengths are
not padded but read apart.

Regimes. `context_only`: the context is prefilled and evicted, then the whole question is read. `query_aware`:
scores have observed the context and the whole question; evicted are the entries of all but the question's
last token, which is then read again, so that the answer's first token too comes from what was kept (a
prefill's own last logits would have seen everything). In both, what is read after the eviction (and the
answer) is held on top of the budget, and is the same for every policy.

The one decision taken here: equal memory is asserted, not assumed. Per item, every policy of one keep_ratio
must hold the same number of entries, and the cache's own count of entries and bytes must agree with it, or
the run stops.
"""

import concurrent.futures
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig

from retain.attention_chunks import truncate
from retain.budget import Budget
from retain.eval.baselines import TokenIdentity, fit_token_identity, load_token_identity, oracle
from retain.eval.config import FULL, CompareConfig, find_policy, needs_gates, with_all_tasks
from retain.eval.head_classes import measure_head_classes, write_head_classes
from retain.eval.record import Row, append_unit, take_up, tokens_sha
from retain.eval.tasks import Item, Suite
from retain.evidence import Evidence
from retain.hf.attach import attach
from retain.hf.cache import Cache
from retain.hf.gates import load_gates
from retain.hf.lookahead import look_ahead
from retain.hf.model import fingerprint
from retain.policy import Policy, decide_layers, score_entries
from retain.provenance import write_json
from retain.scores import Score


@dataclass(frozen=True)
class Unit:
    """A batch of items `start..stop` of one task, for one seed, in all regimes."""

    seed: int
    task: str
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Name of the unit in `items.jsonl`."""
        return f"seed{self.seed}/{self.task}/{self.start}-{self.stop}"


@dataclass(frozen=True)
class Subject:
    """A model with everything that scores it: what a unit needs besides its items.

    Attributes:
        seed: Of the model.
        model: Attached.
        gates: Of that model, if a policy takes them.
        token_identity: The control's table, if it is asked for.
        policies: By name, with this model's own table of head classes where one is read.
    """

    seed: int
    model: Any
    gates: Any | None
    token_identity: TokenIdentity | None
    policies: Mapping[str, Policy]


@dataclass(frozen=True)
class Eviction:
    """One policy at one keep_ratio: its cache after eviction, and what each item of the batch holds there."""

    policy: str
    keep_ratio: float
    cache: Cache
    kept_entries: tuple[int, ...]
    bytes_held: tuple[int, ...]
    seen_entries: int


def plan(config: CompareConfig, suite: Suite) -> list[Unit]:
    """All units of a run, a task at a time, so that a killed run leaves whole tasks."""
    return [
        Unit(seed, task, start, min(start + config.batch_items, config.items_per_task))
        for seed in config.seeds
        for task in with_all_tasks(config, suite)
        for start in range(0, config.items_per_task, config.batch_items)
    ]


def rows_of(config: CompareConfig, unit: Unit) -> int:
    """How many rows a unit writes: in each regime every policy at every ratio, and the full cache once."""
    cells = 1 + len(config.policies) * len(config.keep_ratios)
    return (unit.stop - unit.start) * len(config.regimes) * cells


def rows_per_unit(config: CompareConfig, suite: Suite) -> dict[str, int]:
    """How many rows each unit of a run writes, by its key."""
    return {unit.key: rows_of(config, unit) for unit in plan(config, suite)}


def load_subject(config: CompareConfig, suite: Suite, seed: int) -> Subject:
    """Load a seed's model, its gates, and the token-identity table (fitted once, kept in the run's folder).

    Raises:
        ValueError: If the gates belong to another model, or are damaged.
    """
    model = suite.load_model(seed)
    attach(model)
    gates = None
    if needs_gates(config):
        gates = load_gates(config.gates_of(seed), model)
    table = None
    if "token_identity" in config.policies:
        path = config.folder / f"token_identity-seed{seed}.safetensors"
        made_from = {
            "model": fingerprint(model)["sha256"],
            "documents": config.control_documents,
            "context_tokens": config.context_tokens,
            "horizon": config.horizon,
        }
        table = load_token_identity(path, made_from)
        if table is None:
            documents = suite.documents(seed, config.control_documents, config.context_tokens)
            table = fit_token_identity(model, documents, horizon=config.horizon)
            path.parent.mkdir(parents=True, exist_ok=True)
            table.save(path, made_from)
    return Subject(seed, model, gates, table, _with_head_classes(config, suite, seed, model))


def _with_head_classes(config: CompareConfig, suite: Suite, seed: int, model: Any) -> dict[str, Policy]:
    """The policies; those that read head classes read a table of this model, measured once (on documents
    like those that gates train on, with sinks and recent entries of the first such policy)."""
    policies = {name: find_policy(config, name) for name in config.policies}
    readers = [name for name, own in policies.items() if own.allocation.head_classes is not None]
    if not readers:
        return policies
    protection = policies[readers[0]].protection
    made_from = {
        "model": fingerprint(model)["sha256"],
        "documents": config.control_documents,
        "context_tokens": config.context_tokens,
        "sinks": protection.sinks,
        "recent": protection.recent,
    }
    path = config.folder / f"head_classes-seed{seed}.tsv"
    note = path.with_suffix(".json")
    if not (path.exists() and note.exists() and json.loads(note.read_text()) == made_from):
        documents = suite.documents(seed, config.control_documents, config.context_tokens)
        table_LH = measure_head_classes(model, documents, sinks=protection.sinks, recent=protection.recent)
        note.unlink(missing_ok=True)
        write_head_classes(table_LH, path)
        write_json(note, made_from)
    for name in readers:
        own = policies[name]
        allocation = replace(own.allocation, head_classes=str(path))
        policies[name] = replace(own, allocation=allocation)
    return policies


@torch.inference_mode()
def run_unit(config: CompareConfig, suite: Suite, subject: Subject, unit: Unit) -> list[Row]:
    """Measure one unit.

    Returns:
        Its rows: regime by regime, item by item, the full cache first.
    """
    alike: dict[tuple[int, ...], dict[int, Item]] = {}
    for index in range(unit.start, unit.stop):
        item = suite.item(unit.task, unit.seed, index, config.context_tokens)
        lengths = tuple(map(len, (item.context_ids, item.question_ids, item.gold_ids)))
        alike.setdefault((*lengths, item.generate), {})[index] = item
    rows = [row for items in alike.values() for row in run_alike(config, suite, subject, unit, items)]
    order: dict[str, int] = {regime: place for place, regime in enumerate(config.regimes)}
    return sorted(rows, key=lambda row: (order[row.regime], row.item))  # stable: cells stay in order


def run_alike(
    config: CompareConfig, suite: Suite, subject: Subject, unit: Unit, items: Mapping[int, Item]
) -> Iterator[Row]:
    """Measure items of equal lengths, by index, in all regimes."""
    whole = Cache(subject.model, policy=None, slack=0)  # concat gives what decoding needs
    ids_BT = torch.tensor([[*i.context_ids, *i.question_ids, *read_back(i)] for i in items.values()])
    wanted = () if subject.gates is None else subject.gates.inputs
    whole.prefill(ids_BT, evict=False, hold_evidence=True, wanted=wanted)
    assert whole.evidence is not None
    teacher = whole.evidence
    first = next(iter(items.values()))
    asked = len(first.context_ids) + len(first.question_ids)
    seeds = [item_seed(unit.seed, unit.task, index) for index in items]
    width = max(1, config.max_sequences // len(items))
    for regime in config.regimes:
        num_seen = seen_tokens(first, regime)
        base = whole.fork()
        base.crop(num_seen)
        evidence = [truncate(layer, num_seen) for layer in teacher]
        observed = [truncate(layer, observed_tokens(first, regime)) for layer in teacher]
        if subject.gates is not None and getattr(subject.gates, "extension", None) is not None:
            asked_behind = whole.fork()
            asked_behind.crop(observed_tokens(first, regime))
            observed = look_ahead(subject.model, subject.gates, asked_behind.read_only(), observed)
        scores = score_all(config, subject, teacher, observed, num_seen, seeds)
        for ratio in (1.0, *config.keep_ratios):
            names = (FULL,) if ratio == 1.0 else config.policies
            group = [
                evict(base, evidence, name, subject.policies.get(name), ratio, scores.get(name, ()))
                for name in names
            ]
            check_equal_memory(group, unit)
            for start in range(0, len(group), width):
                chunk = group[start : start + width]
                answers = generate(subject.model, chunk, ids_BT[:, :asked], first.generate)
                for one, own in zip(chunk, answers, strict=True):
                    yield from make_rows(config, suite, unit, regime, items, one, own)


def seen_tokens(item: Item, regime: str) -> int:
    """How many tokens' entries are there to evict from."""
    context = len(item.context_ids)
    return context if regime == "context_only" else context + len(item.question_ids) - 1


def observed_tokens(item: Item, regime: str) -> int:
    """How many tokens' queries the scores have observed: with the question seen, its last token too, at which
    a model that answers at once does its looking up."""
    context = len(item.context_ids)
    return context if regime == "context_only" else context + len(item.question_ids)


def read_back(item: Item) -> tuple[int, ...]:
    """What generation reads of a right answer: all but its last generated token, which nothing comes after,
    and what is never generated (an end token). None of it, where one token is generated."""
    return tuple(item.gold_ids[: item.generate - 1])


def item_seed(seed: int, task: str, index: int) -> int:
    """Seed of an item's random scores: its own, whatever batch and process it is in."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{task}/{index}".encode()).digest()[:4], "big")


def score_all(
    config: CompareConfig,
    subject: Subject,
    teacher: Sequence[Evidence],
    observed: Sequence[Evidence],
    num_seen: int,
    seeds: Sequence[int],
) -> dict[str, list[Score]]:
    """Each policy's score of the first `num_seen` entries per layer, from what was observed, for all
    keep_ratios; gates and controls are handed to it."""
    learned: list[Score] | None = None
    if subject.gates is not None:
        learned = [subject.gates.score(layer) for layer in observed]
    handed: dict[str, list[Score]] = {}
    if subject.token_identity is not None:
        handed["token_identity"] = [subject.token_identity.score(layer) for layer in observed]
    if "oracle" in config.policies:
        handed["oracle"] = oracle(teacher, num_seen)
    made: dict[tuple[str, ...], list[Score]] = {}
    scores = {}
    for name in config.policies:
        policy = subject.policies[name]
        key = (name,) if name in handed else scored_by(policy)
        if key not in made:
            gate: Sequence[Score | None] = handed.get(name) or learned or [None] * len(observed)
            made[key] = [
                first_entries(score_entries(policy, layer, learned=own, seeds_B=seeds), num_seen)
                for layer, own in zip(observed, gate, strict=True)
            ]
        scores[name] = made[key]
    return scores


def scored_by(policy: Policy) -> tuple[str, ...]:
    """What its score depends on: policies that agree in it share one."""
    how = (policy.observed, policy.learned, policy.fusion, policy.fusion_weight)
    return (*map(str, how), json.dumps(policy.observed_settings, sort_keys=True))


def first_entries(score: Score, count: int) -> Score:
    """The score of the first `count` entries, with what of its window is among them."""
    first_BHT = score.first_BHT
    return replace(
        score,
        values_BHT=score.values_BHT[..., :count],
        first_BHT=None if first_BHT is None else first_BHT[..., :count],
        window=max(0, score.window - (score.values_BHT.shape[-1] - count)),
    )


def evict(
    base: Cache,
    evidence: Sequence[Evidence],
    name: str,
    policy: Policy | None,
    keep_ratio: float,
    scores: Sequence[Score],
) -> Eviction:
    """Fork the prefilled cache and evict from the fork, by one policy's scores, to one keep_ratio; without a
    policy, everything is kept."""
    fork = base.fork()
    if policy is None:
        keeps = [keep_all(layer) for layer in evidence]
    else:
        made = decide_layers(policy, evidence, Budget(keep_ratio=keep_ratio), scores=scores)
        keeps = [one.keep_BHT for one in made]
    fork.evict_with(keeps)
    kept = torch.stack([keep_BHT.sum((1, 2)) for keep_BHT in keeps]).sum(0).tolist()
    seen = sum(layer.num_heads * layer.num_seen for layer in evidence)
    held, entries = fork.bytes_held(), fork.entries_held
    assert entries == sum(kept), (
        f"{name} at {keep_ratio}: the cache holds {entries} entries, {sum(kept)} were kept"
    )
    return Eviction(name, keep_ratio, fork, tuple(kept), tuple(held * own // entries for own in kept), seen)


def keep_all(evidence: Evidence) -> Tensor:
    """Every entry that exists."""
    B, T = evidence.valid_BT.shape
    return evidence.valid_BT[:, None].expand(B, evidence.num_heads, T)


def check_equal_memory(group: Sequence[Eviction], unit: Unit) -> None:
    """Assert that all policies of one keep_ratio hold the same entries and bytes, item by item."""
    for one in group[1:]:
        first = group[0]
        assert (one.kept_entries, one.bytes_held) == (first.kept_entries, first.bytes_held), (
            f"unequal memory in {unit.key} at keep_ratio {one.keep_ratio}: {one.policy} holds "
            f"{one.kept_entries} entries, {first.policy} {first.kept_entries}"
        )


def generate(
    model: Any, group: Sequence[Eviction], ids_BT: Tensor, new_tokens: int
) -> list[list[tuple[int, ...]]]:
    """Greedy answers of all cells of a group at once: per cell, per item. Their length is given, no end token
    is taken before.

    Args:
        model: Attached.
        group: Caches after eviction.
        ids_BT: `[context; question]` of each item; what the caches have not seen of it is read first.
        new_tokens: To generate, for every item.
    """
    B, T = ids_BT.shape
    cache = Cache.concat([one.cache for one in group], slack=T - group[0].cache.num_seen + new_tokens)
    input_ids = ids_BT.repeat(len(group), 1)
    output = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        past_key_values=cache,
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=0,
        ),
    )
    answers = [tuple(answer) for answer in output[:, T:].tolist()]
    return [answers[start : start + B] for start in range(0, len(answers), B)]


def make_rows(
    config: CompareConfig,
    suite: Suite,
    unit: Unit,
    regime: str,
    items: Mapping[int, Item],
    one: Eviction,
    answers: Sequence[tuple[int, ...]],
) -> Iterator[Row]:
    """Score the answers of one cell."""
    for place, (index, item) in enumerate(items.items()):
        tokens = answers[place]
        exact, partial = item.score(tokens)
        kept, held = one.kept_entries[place], one.bytes_held[place]
        yield Row(
            run=config.run,
            unit=unit.key,
            seed=unit.seed,
            task=unit.task,
            family=suite.tasks[unit.task].family,
            item=index,
            regime=regime,
            policy=one.policy,
            keep_ratio=one.keep_ratio,
            exact=float(exact),
            partial=float(partial),
            kept_entries=kept,
            seen_entries=one.seen_entries,
            bytes_held=held,
            bytes_full=held * one.seen_entries // kept,
            tokens=tokens,
            tokens_sha=tokens_sha(tokens),
        )


# What a worker process keeps between units: its config, and the subject of the seed that it is at.
_worker: dict[str, Any] = {}

# What they start with. glibc otherwise gives every large buffer back to the system and faults it in again.
_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "TOKENIZERS_PARALLELISM": "false",
}


def _start_worker(config: CompareConfig, suite: Suite) -> None:
    torch.set_num_threads(1)
    _worker.update(config=config, suite=suite, subject=None)


def _subject_here(seed: int) -> Subject:
    if _worker["subject"] is None or _worker["subject"].seed != seed:
        _worker["subject"] = load_subject(_worker["config"], _worker["suite"], seed)
    return _worker["subject"]


def _fit_in_worker(seed: int) -> None:
    _subject_here(seed)


def _run_in_worker(unit: Unit) -> list[Row]:
    return run_unit(_worker["config"], _worker["suite"], _subject_here(unit.seed), unit)


def run_all(config: CompareConfig, suite: Suite, on_unit: Callable[[Unit], None] | None = None) -> int:
    """Run what is not yet done, appending each finished unit to `items.jsonl`.

    Args:
        config: Checked before (`retain.eval.config.check`).
        suite: Of the config; with worker processes, made of functions that they can import.
        on_unit: Called after a unit was written (tests interrupt a run with it).

    Returns:
        How many units were run now.
    """
    units = plan(config, suite)
    done = take_up(config.folder, rows_per_unit(config, suite))
    left = [unit for unit in units if unit.key not in done]
    seeds = list(dict.fromkeys(unit.seed for unit in left))
    total = sum(unit.stop - unit.start for unit in units)
    finished = total - sum(unit.stop - unit.start for unit in left)
    with tqdm(total=total, initial=finished, unit="item", desc=config.run, smoothing=0.05) as bar:
        for unit, rows in _results(config, suite, left, seeds, bar):
            append_unit(config.folder, rows)
            bar.update(unit.stop - unit.start)
            bar.set_postfix_str(f"seed {unit.seed}, {unit.task}", refresh=False)
            if on_unit is not None:
                on_unit(unit)
    return len(left)


def _results(
    config: CompareConfig, suite: Suite, left: Sequence[Unit], seeds: Sequence[int], bar: tqdm
) -> Iterator[tuple[Unit, list[Row]]]:
    if config.workers == 0:
        subject: Subject | None = None
        for unit in left:
            if subject is None or subject.seed != unit.seed:
                bar.set_postfix_str(f"seed {unit.seed}: loading, fitting the control")
                subject = load_subject(config, suite, unit.seed)
            yield unit, run_unit(config, suite, subject, unit)
        return
    # A process that was forked after torch had started its threads may hang; environment variables reach
    # spawned ones.
    for name, value in _WORKER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    pool = concurrent.futures.ProcessPoolExecutor(
        config.workers, multiprocessing.get_context("spawn"), _start_worker, (config, suite)
    )
    try:
        # The tables first, one seed a process, so that no two processes fit the same one.
        bar.set_postfix_str("loading models, fitting the control")
        for fitted in [pool.submit(_fit_in_worker, seed) for seed in seeds]:
            fitted.result()
        running = {pool.submit(_run_in_worker, unit): unit for unit in left}
        for future in concurrent.futures.as_completed(running):
            yield running[future], future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
