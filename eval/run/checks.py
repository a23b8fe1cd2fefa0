"""Finds everything about a comparison that can be wrong, before anything is measured, and says it at once.

First what the config alone shows (names, variants, protections, budgets); then, with the model loaded, that
gates fit, that every policy goes with every time of eviction, and that budgets hold what is protected on the
shortest context of each task.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from retain.budget.statement import spread
from retain.config import problems_of
from retain.eval.config import (
    CONTROLS,
    FULL,
    PRESET,
    SHIPPED,
    Candidate,
    CompareConfig,
    all_candidates,
    budget_label,
    candidates_of,
    find_policy,
    gates_of,
    resolve_device,
)
from retain.eval.run.plan import Context, Loaded, load_contexts, load_model
from retain.eval.run.prefill import open_cache
from retain.eval.tasks.sources import SOURCES, task_names
from retain.gates import GateSet
from retain.models.named import dtype_of
from retain.models.named_gates import load_gates, shipped_gates
from retain.policy import Policy
from retain.presets import policies
from retain.process.registry import suggest
from retain.protection import protected_mask
from retain.shapes import LayerShape

# Fields whose entries are each named once.
REPEATABLE = ("seeds", "tasks", "when", "question", "keep_ratios", "tokens_per_head", "policies")


def load_checked(config: CompareConfig, local_rank: int = 0) -> tuple[Loaded, dict[str, list[Context]]]:
    """Loads a model with everything that scores it, and the contexts of each task; a ValueError with all
    problems in one message."""
    refuse_stated(config)
    origin: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    how = {"local_rank": local_rank, "device_map": config.device_map, "dtype": config.dtype, **origin}
    model, tokenizer = load_model(config.model, config.device, **how)
    problems: list[str] = []
    contexts: dict[str, list[Context]] = {}
    for task in task_names(config.tasks):
        try:
            contexts[task] = load_contexts(config, task, model, tokenizer)
        except (ValueError, OSError) as error:
            problems.append(f"task {task!r}: {error}")
    gates: dict[str, GateSet] = {}
    users = {name: place for name in config.policies if (place := gates_of(config, name)) is not None}
    for name, place in users.items():
        try:
            if place == SHIPPED:
                gates.setdefault(place, shipped_gates(model, name))
            elif place not in gates:
                gates[place] = load_gates(place, model, allow_other_weights=config.allow_other_weights)
        except (ValueError, OSError) as error:
            problems.append(f"gates of policy {name!r}: {error}")
    resolved = {candidate: find_policy(config, candidate) for candidate in all_candidates(config)}
    loaded = Loaded(model, tokenizer, resolved, gates, users)
    _refuse([*problems, *_misfits(config, loaded), *_budgets(config, resolved, contexts)])
    return loaded, contexts


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
        raise ValueError(f"This comparison cannot start:\n{lines}")


def refuse_stated(config: CompareConfig) -> None:
    """Raises ValueError with all problems that a config shows by itself."""
    _refuse(stated_problems(config))


def stated_problems(config: CompareConfig) -> list[str]:
    """Problems that a config shows by itself."""
    return [*problems_of(config), *_policies(config), *_grid(config)]


def _policies(config: CompareConfig) -> Iterator[str]:
    """Names of policies, variants, and protections, which are tried on every policy."""
    presets = [preset.name for preset in policies()]
    known = [*presets, *config.variants, *CONTROLS]
    for name in config.policies:
        if name == FULL:
            yield f"{FULL!r} is always measured: leave it out of `policies`"
        elif name not in known:
            yield f"unknown policy {name!r}{suggest(name, known)}; known: {', '.join(known)}"
    for name in config.variants:
        if name in (FULL, *presets, *CONTROLS):
            yield f"variant {name!r} has the name of a policy that there is: give it another"
        elif refused := error_of(find_policy, config, Candidate(name)):
            yield f"variant {name!r}: {refused}"
    for label, changes in config.protections.items():
        if label == PRESET or not all(part.startswith(("protection.", "scope=")) for part in changes):
            yield (
                f"protection {label!r} is a list of `protection.field=value` and `scope=value` under another "
                f"label than {PRESET!r}, got {list(changes)}; other changes belong in a variant"
            )
            continue
        for name in config.policies:
            plain, changed = (error_of(find_policy, config, Candidate(name, at)) for at in (PRESET, label))
            if changed is not None and plain is None:
                yield f"protection {label!r}: {changed}"
    if config.baseline not in (None, FULL, *config.policies):
        hint = suggest(str(config.baseline), config.policies)
        yield f"`baseline` is none of the policies, got {config.baseline!r}{hint}"


def _grid(config: CompareConfig) -> Iterator[str]:
    """Names of the run, its tasks and device; fields that state something twice or leave nothing to do."""
    if Path(config.run).name != config.run or config.run in ("", ".", ".."):
        yield f"`run` is the name of a folder under {config.results}, got {config.run!r}"
    tried = [error_of(task_names, config.tasks), error_of(resolve_device, config.device)]
    tried += [] if config.dtype == "auto" else [error_of(dtype_of, config.dtype)]
    yield from (str(refused) for refused in tried if refused is not None)
    known = [*config.tasks, *SOURCES, *(task.partition("/")[0] for task in SOURCES)]
    for name in config.task_settings:
        if name not in known:
            yield f"`task_settings` names an unknown task or group {name!r}{suggest(name, known)}"
    for name in REPEATABLE:
        values = getattr(config, name)
        if len({*values}) < len(values):
            yield f"`{name}` names something twice: {values}"
    if not config.budgets:
        yield "`keep_ratios` is empty, and so is `tokens_per_head`: state a budget"
    if "prefill" not in config.when and {*config.policies} <= {*CONTROLS}:
        yield "the policies are controls, which are measured with when=prefill alone: add it, or a policy"


def _misfits(config: CompareConfig, loaded: Loaded) -> Iterator[str]:
    """Tries the cache of every candidate: its gates may have another unit or a wider protected window, it may
    not evict at this time, lack its head weights, or hold entries in fewer bytes than others."""
    for when in config.when:
        for candidate in candidates_of(config, when):
            policy, place = loaded.policies[candidate], loaded.users.get(candidate.policy)
            if candidate.policy in CONTROLS or (place is not None and place not in loaded.gates):
                continue  # missing gates are said already
            how = (loaded.model, config, when, policy, config.budgets[0], loaded.gates_of(candidate))
            if refused := error_of(open_cache, *how):
                yield f"policy {candidate.label!r} with when={when}: {refused}"
            if policy.precision is not None and config.tokens_per_head:
                yield (
                    f"policy {candidate.label!r} holds entries in fewer bytes, and tokens_per_head counts "
                    "entries: state keep_ratios, which are ratios of bytes for it"
                )


def _budgets(
    config: CompareConfig, policies: Mapping[Candidate, Policy], contexts: Mapping[str, list[Context]]
) -> Iterator[str]:
    """Tries each candidate's protection at every budget, on the shortest context of all tasks."""
    every = [context for of_task in contexts.values() for context in of_task]
    for context in sorted(every, key=lambda one: len(one.ids))[:1]:
        row, tokens = context.rows[0], len(context.ids)
        everywhere = torch.ones(1, tokens, dtype=torch.bool)
        for candidate, budget in product(all_candidates(config), config.budgets):
            per_head_B = spread(budget, [tokens], [LayerShape(1, 1)]).per_head_B
            if refused := error_of(protected_mask, policies[candidate].protection, everywhere, per_head_B):
                yield (
                    f"policy {candidate.label!r} at {budget_label(budget)}, on item {row.item} of task "
                    f"{row.task!r} (seed {row.seed}), whose context has {tokens} tokens: {refused} Or leave "
                    "the task out, or raise context_tokens."
                )


def error_of(call: Callable[..., object], *arguments: Any) -> Exception | None:
    """Error of a call that refuses its arguments."""
    try:
        call(*arguments)
    except (ValueError, FileNotFoundError, KeyError) as error:
        return error
    return None
