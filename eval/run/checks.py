"""Finds everything about a comparison that can be wrong, before anything is measured, and says it at once.

First what the config alone shows (names, variants, protections, budgets); then, with the model loaded, that
gates fit, that every policy goes with every time of eviction, and that budgets hold what is protected on the
shortest context of each task.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retain.budget.head_weights import read_weights
from retain.budget.statement import Budget, LayerShape, spread
from retain.config import problems_of
from retain.eval.config import (
    CONTROLS,
    FULL,
    GATES,
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
from retain.eval.run.plan import Context, Loaded, load_contexts, load_model, task_settings
from retain.eval.run.prefill import open_cache
from retain.eval.tasks.files import HUB
from retain.eval.tasks.sources import SOURCES, load_rows, task_names
from retain.gates import GateSet
from retain.hf.model.gates import load_gates, own_gates
from retain.models.named import dtype_of
from retain.policy import Policy
from retain.presets import policies
from retain.process.registry import suggest
from retain.protection import protected_mask

# Fields whose entries are each named once.
REPEATABLE = ("seeds", "tasks", "when", "question", "keep_ratios", "tokens_per_head", "policies")


def load_checked(config: CompareConfig, local_rank: int = 0) -> tuple[Loaded, dict[str, list[Context]]]:
    """Loads everything that a comparison needs, and checks it.

    Returns:
        The model with what scores it; and by task its contexts.

    Raises:
        ValueError: All problems in one message.
    """
    _refuse(stated_problems(config))
    model, tokenizer = load_model(config, local_rank)
    problems: list[str] = []
    contexts: dict[str, list[Context]] = {}
    for task in task_names(config.tasks):
        try:
            contexts[task] = load_contexts(config, task, model, tokenizer)
        except (ValueError, OSError) as error:
            problems.append(f"task {task!r}: {error}")
    taken = {name: gates_of(config, name) for name in config.policies}
    users = {name: place for name, place in taken.items() if place is not None}
    gates: dict[str, GateSet] = {}
    for name, place in users.items():
        try:
            if place not in gates:
                other = config.allow_other_weights
                gates[place] = (
                    own_gates(model, name)
                    if place == SHIPPED
                    else load_gates(place, model, allow_other_weights=other)
                )
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


def stated_problems(config: CompareConfig) -> list[str]:
    """Problems that a config shows by itself."""
    parts = (_policies(config), _protections(config), _grid(config), _rows(config))
    return [*problems_of(config), *(problem for part in parts for problem in part)]


def _policies(config: CompareConfig) -> Iterator[str]:
    """Names of policies, and variants with their gates."""
    presets = [preset.name for preset in policies()]
    known = [*presets, *config.variants, *CONTROLS]
    for name in config.policies:
        if name == FULL:
            yield f"{FULL!r} is always measured: leave it out of `policies`"
        elif name not in known:
            yield f"unknown policy {name!r}{suggest(name, known)}; known: {', '.join(known)}"
    for name, parts in config.variants.items():
        if name in (FULL, *presets, *CONTROLS):
            yield f"variant {name!r} has the name of a policy that there is: give it another"
        elif not parts:
            yield f"variant {name!r} is empty: begin it with a preset, as in [snapkv, protection.sinks=0]"
        elif refused := error_of(find_policy, config, Candidate(name)):
            yield f"variant {name!r}: {refused}"
        elif gates_of(config, name) is None and any(part.startswith(GATES) for part in parts):
            yield f"variant {name!r} states gates, and its policy takes none: leave them out"
    if config.baseline is not None and config.baseline not in (FULL, *config.policies):
        hint = suggest(config.baseline, config.policies)
        yield f"`baseline` is none of the policies, got {config.baseline!r}{hint}"


def _protections(config: CompareConfig) -> Iterator[str]:
    """Protections, tried on every policy that is measured under one."""
    for label, changes in config.protections.items():
        others = [change for change in changes if not change.startswith(("protection.", "scope="))]
        if label == PRESET or others or not changes:
            yield (
                f"protection {label!r} is a list of `protection.field=value` and `scope=value` under another "
                f"label than {PRESET!r}, got {list(changes)}; other changes belong in a variant"
            )
            continue
        for name in config.policies:
            plain, changed = (error_of(find_policy, config, Candidate(name, at)) for at in (PRESET, label))
            if changed is not None and plain is None:
                yield f"protection {label!r}: {changed}"


def _grid(config: CompareConfig) -> Iterator[str]:
    """Names of the run, its tasks and device; fields that state something twice or leave nothing to do."""
    if Path(config.run).name != config.run or config.run in ("", ".", ".."):
        yield f"`run` is the name of a folder under {config.results}, got {config.run!r}"
    named = None if config.dtype == "auto" else error_of(dtype_of, config.dtype)
    for refused in (error_of(task_names, config.tasks), error_of(resolve_device, config.device), named):
        if refused is not None:
            yield str(refused)
    for name in REPEATABLE:
        values = getattr(config, name)
        if len({*values}) < len(values):
            yield f"`{name}` names something twice: {values}"
    if not config.budgets:
        yield "`keep_ratios` is empty, and so is `tokens_per_head`: state a budget"
    for tokens in config.tokens_per_head:
        if tokens >= config.context_tokens:
            yield f"tokens_per_head lies below context_tokens ({config.context_tokens}); got {tokens}"
    if "prefill" not in config.when and {*config.policies} <= {*CONTROLS}:
        yield "the policies are controls, which are measured with when=prefill alone: add it, or a policy"
    candidates = [one for one in map(Candidate, config.policies) if not error_of(find_policy, config, one)]
    packing = [one.policy for one in candidates if find_policy(config, one).precision is not None]
    if packing and config.tokens_per_head:
        yield (
            f"{', '.join(packing)} hold entries in fewer bytes, and tokens_per_head counts entries, of which "
            "they would hold fewer bytes than others: state keep_ratios, which are ratios of bytes for them"
        )


def _rows(config: CompareConfig) -> Iterator[str]:
    """Names in the settings of tasks, and rows of files, which need no model."""
    known = [*config.tasks, *SOURCES, *dict.fromkeys(task.partition("/")[0] for task in SOURCES)]
    for name in config.task_settings:
        if name not in known:
            yield f"`task_settings` names an unknown task or group {name!r}{suggest(name, known)}"
    for task in config.tasks:
        if task.endswith((".jsonl", ".parquet")) and not task.startswith(HUB):
            how = {"first_item": config.first_item, "items": config.items_per_task}
            if refused := error_of(partial(load_rows, task, None, **how, **task_settings(config, task))):
                yield f"task {task!r}: {refused}"


def _misfits(config: CompareConfig, loaded: Loaded) -> Iterator[str]:
    """Tries the cache of every candidate: its fusion may not take the unit of its gates, its weights may not
    be fitted, it may not evict at this time, or lack its head weights. Behind the prompt, a protected window
    shorter than the gates were trained for is measured as it is stated."""
    for when in config.when:
        for candidate in candidates_of(config, when):
            policy, place = loaded.policies[candidate], loaded.users.get(candidate.policy)
            if policy.weights is not None and (refused := error_of(read_weights, policy.weights)):
                yield f"policy {candidate.label!r}: {refused}"
                continue
            if candidate.policy in CONTROLS or (place is not None and place not in loaded.gates):
                continue  # missing gates are said already
            gates = loaded.gates_of(candidate)
            if when == "prefill" and gates is not None:
                window = gates.metadata.get("protected_window") or 0
                recent = max(window, policy.protection.recent)
                policy = replace(policy, protection=replace(policy.protection, recent=recent))
            refused = error_of(open_cache, loaded.model, config, when, policy, config.budgets[0], gates)
            if refused:
                yield f"policy {candidate.label!r} with when={when}: {refused}"


def _budgets(
    config: CompareConfig, policies: Mapping[Candidate, Policy], contexts: Mapping[str, list[Context]]
) -> Iterator[str]:
    """Tries each candidate's protection at every budget, on the shortest context of each task."""
    shortest = [
        min(of_task, key=lambda context: len(context.ids)) for of_task in contexts.values() if of_task
    ]
    for candidate in all_candidates(config):
        for budget in config.budgets:
            for context in sorted(shortest, key=lambda context: -len(context.ids)):
                row, tokens = context.rows[0], len(context.ids)
                if refused := error_of(_protect, policies[candidate], budget, tokens):
                    yield (
                        f"policy {candidate.label!r} at {budget_label(budget)}, on item {row.item} of task "
                        f"{row.task!r} (seed {row.seed}), whose context has {tokens} tokens: {refused} Or "
                        "leave the task out, or raise context_tokens."
                    )
                    break


def _protect(policy: Policy, budget: Budget, tokens: int) -> None:
    """Makes a policy's protected mask of a context of so many tokens under a budget."""
    totals = spread(budget, [tokens], [LayerShape(1, 1)])
    protected_mask(policy.protection, torch.ones(1, tokens, dtype=torch.bool), totals.per_head_B)


def error_of(call: Callable[..., object], *arguments: Any) -> Exception | None:
    """Error of a call that refuses its arguments."""
    try:
        call(*arguments)
    except (ValueError, FileNotFoundError, KeyError) as error:
        return error
    return None
