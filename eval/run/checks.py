"""Finds everything about a comparison that can be wrong, before work starts, and says it at once.

Names exist, gates are there and fit, budgets hold what is protected, and every policy goes with every regime.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from retain.budget.statement import LayerShape, spread
from retain.config import problems_of
from retain.eval.config import (
    CONTROLS,
    FULL,
    OWN_GATES,
    PRESET,
    REGIMES,
    SHARED,
    CompareConfig,
    all_lines,
    budget_of,
    find_policy,
    gate_names,
    gate_users,
    indices_of,
    lines_of,
    resolve_device,
    with_all_tasks,
)
from retain.eval.run.caches import open_cache
from retain.eval.run.evaluated_model import one_by_one
from retain.eval.run.gate_sources import load_source
from retain.eval.tasks.suite import Suite
from retain.gates.artifact import METADATA_FILE
from retain.hf.model.gates import load_gates
from retain.policy import Policy
from retain.presets import policies
from retain.protection import protected_mask
from retain.registry import suggest

# Of a task, all items are made to find its shortest; but behind the first few only while that takes no more
# seconds than this, and never for longer than that.
FIRST_ITEMS = 50
CHEAP_SECONDS = 3.0
MOST_SECONDS = 30.0
# Fields whose entries are each named once.
REPEATABLE = ("seeds", "tasks", "regimes", "keep_ratios", "tokens_per_head", "policies")


def check(config: CompareConfig, suite: Suite, processes: int = 1) -> list[str]:
    """Finds everything that is wrong with a config.

    Returns:
        What could not be made sure of.

    Raises:
        ValueError: All problems in one message.
    """
    notes: list[str] = []
    problems = stated_problems(config, suite, processes)
    if not problems:
        problems = [*_gates(config, suite), *_budgets(config, suite, notes), *_documents(config, suite)]
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ValueError(f"This comparison cannot start:\n{lines}")
    return notes


def stated_problems(config: CompareConfig, suite: Suite, processes: int = 1) -> list[str]:
    """Problems of a config, found before gates, budgets and documents are looked at."""
    return [*problems_of(config), *_names(config, suite), *_numbers(config, suite, processes)]


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    names = list(dict.fromkeys(known))
    return f"{what} {name!r}{suggest(name, names)}; known: {', '.join(names)}"


def _names(config: CompareConfig, suite: Suite) -> Iterator[str]:
    presets = {preset.name: preset.variants for preset in policies()}
    known = [FULL, *presets, *config.variants, *CONTROLS]
    groups = [name.partition("/")[0] for name in suite.tasks]
    for what, asked, there in (
        ("policy", config.policies, known),
        ("task", config.tasks, [*suite.tasks, *groups]),
        ("regime", config.regimes, REGIMES),
    ):
        yield from (_unknown(f"unknown {what}", name, there) for name in asked if name not in there)
    for seed in config.seeds:
        if suite.seeds is not None and seed not in suite.seeds:
            has = ", ".join(map(str, suite.seeds))
            yield f"suite {suite.name!r} has no model of seed {seed}; it has {has}"
    yield from _uses(config, presets)
    yield from _variants(config, presets)
    yield from _protections(config, known)
    if FULL in config.policies:
        yield f"{FULL!r} is always measured: leave it out of `policies`"
    for field in REPEATABLE:
        if len(set(getattr(config, field))) < len(getattr(config, field)):
            yield f"`{field}` names something twice: {getattr(config, field)}"
    if Path(config.run).name != config.run or config.run in ("", ".", ".."):
        yield f"`run` is the name of a folder under {config.results}, got {config.run!r}"


def _uses(config: CompareConfig, presets: Iterable[str]) -> Iterator[str]:
    """Problems of sets of gates, and of the policies that take them."""
    if OWN_GATES in config.gate_sets:
        yield (
            f"`gate_sets` names a set {OWN_GATES!r}, which is what the folder `gates` is called: give it "
            "another name"
        )
    known, sets = [*presets, *config.variants], [OWN_GATES, *config.gate_sets]
    for policy, name in config.uses.items():
        if policy in (FULL, *CONTROLS):
            yield f"`uses` gives gates to {policy!r}, which takes none: leave it out"
            continue
        if policy not in known:
            yield _unknown("`uses` gives gates to an unknown policy", policy, known)
        # Of a policy that cannot be made it is not known whether it takes gates.
        elif _error_of(find_policy, config, policy) is None and not find_policy(config, policy).learned:
            yield (
                f"`uses` gives gates to {policy!r}, which takes none (its `learned` is false): leave it out, "
                "or set learned=true in a variant"
            )
        if name not in sets:
            yield _unknown(f"`uses` gives {policy!r} unknown gates", name, sets)


def _variants(config: CompareConfig, presets: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Problems of variants; `presets` says which variants each preset has of its own."""
    for name, variant in config.variants.items():
        first = variant[0] if variant else ""
        preset, colon, own = first.partition(":")
        if name in (FULL, *presets, *CONTROLS):
            yield f"variant {name!r} has the name of a policy that there is: give it another"
        elif "+" in name:
            yield f"variant {name!r}: a '+' stands before a protection: take a name without it"
        elif preset == FULL or preset not in presets:
            yield (
                f"variant {name!r} begins with the preset that it changes, got "
                f"{first or 'nothing'!r}{suggest(preset, presets)}; then `key=value`, as in "
                "[snapkv, protection.sinks=0]"
            )
        elif colon and own not in presets[preset]:
            yield (
                f"variant {name!r} begins with {first!r}, and preset {preset!r} has no variant "
                f"{own!r}{suggest(own, presets[preset])}; it has {', '.join(presets[preset]) or 'none'}"
            )
        elif refused := _error_of(find_policy, config, name):
            yield f"variant {name!r}: {refused}"


def _protections(config: CompareConfig, known: Sequence[str]) -> Iterator[str]:
    """Problems of protections, tried on every policy that is measured under one, and of `under`."""
    for name, changes in config.protections.items():
        others = [change for change in changes if not change.startswith(("protection.", "scope="))]
        if name == PRESET or "+" in name:
            yield f"protection {name!r}: take a name that is not {PRESET!r} and has no '+' in it"
        elif others or not changes:
            yield (
                f"protection {name!r} is a list of `protection.field=value` and `scope=value`, got "
                f"{list(changes)}; what else a policy changes belongs in a variant"
            )
        else:
            for policy in dict.fromkeys(config.under.get(name, config.policies)):
                # Unknown ones are said elsewhere, with what they may have meant.
                if policy in known and (refused := _error_of(find_policy, config, policy, name)):
                    yield f"protection {name!r}: {refused}"
    for name, measured in config.under.items():
        if name not in config.protections:
            hint = suggest(name, config.protections)
            yield f"`under` names the protection {name!r}{hint}, which is not in `protections`"
        for policy in measured:
            if policy not in config.policies:
                yield (
                    f"`under` asks for {policy!r} under {name!r}{suggest(policy, config.policies)}, and it "
                    "is not among the policies: add it there, or leave it out"
                )
    if not config.protections and not config.preset_protection:
        yield "`preset_protection` is false and `protections` is empty: nothing would be measured"


def _numbers(config: CompareConfig, suite: Suite, processes: int) -> Iterator[str]:
    for name in ("seeds", "regimes", "policies"):
        if not getattr(config, name):
            yield f"`{name}` is empty"
    if not config.budgets:
        yield "`keep_ratios` is empty, and so is `tokens_per_head`: state a budget"
    for tokens in config.tokens_per_head:
        if tokens >= config.context_tokens:
            yield f"tokens_per_head lies below context_tokens ({config.context_tokens}); got {tokens}"
    for regime in config.regimes:
        if regime not in SHARED and {*config.policies} <= {*CONTROLS}:
            yield (
                f"the policies are controls, and regime {regime!r} has no place for them: leave it out, or "
                "name a policy"
            )
    spread_over, refused = config.text.device_map, _error_of(resolve_device, config.device)
    if refused is not None:
        yield str(refused)
    elif (config.workers > 1 and processes == 1) and (
        spread_over or resolve_device(config.device).type == "cuda"
    ):
        yield (
            f"each of {config.workers} workers would load a model onto the same GPU: take workers=0, or "
            "start a process for each GPU with `accelerate launch --num_processes N eval/compare.py ...`"
        )
    if spread_over and config.suite != "text":
        yield f"text.device_map spreads the model of suite 'text', and this is {config.suite!r}"
    for name in with_all_tasks(config, suite) if config.first_item > 0 else ():
        if not indices_of(config, suite, name):
            yield (
                f"task {name!r} has {suite.tasks[name].num_items} items, and `first_item` is "
                f"{config.first_item}: none is left; lower it, or leave the task out"
            )
    if len(config.seeds) > 1 and suite.seeds is not None:
        folders = {f"gate_sets.{name}.folder": own.folder for name, own in config.gate_sets.items()}
        for name, folder in {"gates": config.gates, **folders}.items():
            if folder and "{seed}" not in folder:
                yield (
                    f"`{name}` needs a {{seed}} in it, since there are {len(config.seeds)} seeds; got "
                    f"{folder!r}"
                )


def _gates(config: CompareConfig, suite: Suite) -> list[str]:
    """Loads every seed's gates against its model, as the run will, and makes its controls of them; with those
    of the first seed, tries the caches of all lines."""
    if not gate_users(config) and all(regime in SHARED for regime in config.regimes):
        return []
    missing, broken = [], {}

    def look(seed: int, model: Any) -> None:
        problems, sets = [], {}
        for folder, names in _folders(config, seed).items():
            if not (Path(folder) / METADATA_FILE).is_file():
                command = suite.train_gates.format(seed=seed, gates=folder)
                missing.append(
                    f"there are no gates for seed {seed} in {folder}{_of_sets(names)}; train them first:"
                    f"\n      {command}"
                )
                continue
            try:
                read = {folder: load_gates(folder, model)}
            except ValueError as error:
                problems.append(f"gates of seed {seed}{_of_sets(names)}: {error}")
                continue
            for name in names:
                try:
                    sets[name] = load_source(config, seed, name, model, read)
                except ValueError as error:
                    problems.append(f"gates of seed {seed}{_of_sets([name])}: {error}")
        broken[seed] = problems + (_misfits(config, model, sets) if seed == config.seeds[0] else [])

    # Without gates the first seed's caches are all there is to try.
    one_by_one(config if gate_users(config) else replace(config, seeds=config.seeds[:1]), suite, look)
    return missing + [problem for problems in broken.values() for problem in problems]


def _folders(config: CompareConfig, seed: int) -> dict[str, list[str]]:
    """Folders of gates that a seed's policies take -> names of the sets that are made of them."""
    found: dict[str, list[str]] = {}
    for name in gate_names(config):
        found.setdefault(config.gates_of(seed, name), []).append(name)
    return found


def _of_sets(names: Sequence[str]) -> str:
    """For a message; the config's own `gates` need no name."""
    return "" if [*names] == [OWN_GATES] else f" (gate_sets: {', '.join(names)})"


def _misfits(config: CompareConfig, model: Any, sets: Mapping[str, Any]) -> list[str]:
    """Tries the cache of every line: a unit that its fusion cannot use, weights that were never fitted, a
    regime that it cannot serve. In the regimes that share a prefill, a protected window shorter than the
    gates were trained for is measured as it is stated, and no problem."""
    users, found = gate_users(config), {}
    for regime in config.regimes:
        for line in lines_of(config, regime):
            policy = find_policy(config, line.policy, line.protection)
            name, shared = users.get(line.policy, ""), regime in SHARED
            # A table of head classes is measured when the run begins; gates that are not there are said.
            if policy.allocation.head_classes is not None or ((name or shared) and name not in sets):
                continue
            window = (sets[name].metadata.get("protected_window") or 0) if shared else 0
            if policy.protection.recent < window:
                policy = replace(policy, protection=replace(policy.protection, recent=window))
            opened = "context_only" if shared else regime
            where = f"with gates {name!r}" if shared else f"in regime {regime!r}"
            refused = _error_of(open_cache, model, config, opened, policy, config.budgets[0], sets.get(name))
            if refused:
                found[line.name, where] = f"policy {line.name!r} {where}: {refused}"
    return [*found.values()]


@dataclass(frozen=True)
class Shortest:
    """The shortest context of a task: its tokens, and of which item of which seed it is."""

    tokens: int
    task: str
    seed: int
    index: int


def shortest_of(config: CompareConfig, suite: Suite, task: str) -> tuple[Shortest, int, int]:
    """The shortest of a task's contexts.

    Returns:
        It, how many items were made to find it, and how many there are.

    Raises:
        ValueError: An item that cannot be made.
    """
    places = [(index, seed) for index in indices_of(config, suite, task) for seed in config.seeds]
    found: list[Shortest] = []
    began = time.monotonic()
    for index, seed in places:
        item = suite.item(task, seed, index, config.context_tokens)
        found.append(Shortest(len(item.context_ids), task, seed, index))
        took = time.monotonic() - began
        if took > MOST_SECONDS or (took > CHEAP_SECONDS and len(found) >= FIRST_ITEMS):
            break
    return min(found, key=lambda own: own.tokens), len(found), len(places)


def _budgets(config: CompareConfig, suite: Suite, notes: list[str]) -> Iterator[str]:
    """Tries each policy's protection on a context of full length, and on the shortest of each task: a budget
    below what is protected is found here, not hours later."""
    shortest, some = [], []
    for task in with_all_tasks(config, suite):
        try:
            found, looked, there = shortest_of(config, suite, task)
        except ValueError as error:
            yield f"task {task!r}: {error}"
            continue
        shortest.append(found)
        if looked < there:
            some.append(f"{task} ({looked} of {there})")
    if some:
        notes.append(
            "budgets were tried on the shortest of the first items alone: a shorter one may stop the run. "
            + ", ".join(some)
        )
    shortest.sort(key=lambda own: own.tokens)
    for line in all_lines(config):
        policy = find_policy(config, line.policy, line.protection)
        if policy.protection.reads_turns:
            yield (
                f"policy {line.name!r} protects the turns of a conversation, and the contexts here are "
                "documents: set protection.turns, turn_prefix and turn_suffix to nothing in a variant"
            )
        if policy.allocation.rounding != "exact" or policy.allocation.line != "rest":
            yield (
                f"policy {line.name!r} rounds its budget as its release does, and a comparison is at equal "
                "memory: take the preset's `code` variant, which is the release's score under the common "
                "protection and exact budget"
            )
        for value in config.budgets:
            what = f"policy {line.name!r} at {'keep_ratio' if value < 1 else 'tokens_per_head'} {value:g}"
            if refused := _error_of(_protect, policy, value, config.context_tokens):
                yield f"{what}: {refused}"
                continue
            for own in shortest:
                if refused := _error_of(_protect, policy, value, own.tokens):
                    yield (
                        f"{what}, on item {own.index} of task {own.task!r} (seed {own.seed}), whose context "
                        f"has {own.tokens} tokens: {refused} Or leave the task out, or raise context_tokens."
                    )
                    break


def _protect(policy: Policy, value: float, tokens: int) -> None:
    """Makes a policy's protected mask of a context of so many tokens under a budget."""
    totals = spread(budget_of(value), [tokens], [LayerShape(1, 1)])
    protected_mask(policy.protection, torch.ones(1, tokens, dtype=torch.bool), totals.per_head_B)


def _error_of(call: Callable[..., object], *arguments: Any) -> ValueError | None:
    """The error of a call that refuses its arguments."""
    try:
        call(*arguments)
    except ValueError as error:
        return error
    return None


def _documents(config: CompareConfig, suite: Suite) -> Iterator[str]:
    """Whether there are documents for what is fitted on them."""
    readers = [
        name
        for name in config.policies
        if name == "token_identity" or find_policy(config, name).allocation.head_classes is not None
    ]
    if readers and (refused := _error_of(suite.documents, config.seeds[0], 1, config.context_tokens)):
        yield f"{', '.join(readers)}: {refused}"
