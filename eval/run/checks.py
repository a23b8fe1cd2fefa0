"""Finds everything about a comparison that can be wrong, before work starts, and says it at once.

Names exist, gates are there and fit, budgets hold what is protected, and every policy goes with every regime.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from retain.budget.statement import Budget, LayerShape, spread
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
from retain.gone import hint_of
from retain.head_weights import read_weights
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
    problems = stated_problems(config, suite, processes) or [*_weights(config)]
    if not problems:
        problems = [
            *_gates(config, suite, notes),
            *_budgets(config, suite, notes),
            *_documents(config, suite),
        ]
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ValueError(f"This comparison cannot start:\n{lines}")
    return notes


def stated_problems(config: CompareConfig, suite: Suite, processes: int = 1) -> list[str]:
    """Problems of a config, found before gates, budgets and documents are looked at."""
    presets = {preset.name: tuple(preset.variants) for preset in policies()}
    found = (
        *(_names(config, suite, presets), _uses(config, presets), _variants(config, presets)),
        *(_protections(config, presets), _grid(config, suite), _devices(config, processes)),
        _bytes(config, presets),
    )
    return [*problems_of(config), *(problem for part in found for wrong, problem in part if wrong)]


# What may be wrong with a config: whether it is, and the message.
Checked = Iterator[tuple[object, str]]
Presets = Mapping[str, tuple[str, ...]]


def _unknown(what: str, name: str, known: Iterable[str]) -> tuple[bool, str]:
    names = list(dict.fromkeys(known))
    return name not in names, f"{what} {name!r}{suggest(name, names)}; known: {', '.join(names)}"


def _names(config: CompareConfig, suite: Suite, presets: Presets) -> Checked:
    for what, asked, there in (
        ("policy", config.policies, [FULL, *presets, *config.variants, *CONTROLS]),
        ("task", config.tasks, [*suite.tasks, *(name.partition("/")[0] for name in suite.tasks)]),
        ("regime", config.regimes, REGIMES),
    ):
        yield from (_unknown(f"unknown {what}", name, there) for name in asked)
    known = config.seeds if suite.seeds is None else suite.seeds
    has = f"it has {', '.join(map(str, known))}"
    for seed in config.seeds:
        yield seed not in known, f"suite {suite.name!r} has no model of seed {seed}; {has}"
    yield FULL in config.policies, f"{FULL!r} is always measured: leave it out of `policies`"
    for field in REPEATABLE:
        own = getattr(config, field)
        yield len({*own}) < len(own), f"`{field}` names something twice: {own}"
    nowhere = Path(config.run).name != config.run or config.run in ("", ".", "..")
    yield nowhere, f"`run` is the name of a folder under {config.results}, got {config.run!r}"


def _uses(config: CompareConfig, presets: Presets) -> Checked:
    """Sets of gates, and the policies that take them."""
    yield (
        OWN_GATES in config.gate_sets,
        f"`gate_sets` names a set {OWN_GATES!r}, which is what the folder `gates` is called: give it another "
        "name",
    )
    known, sets = [*presets, *config.variants], [OWN_GATES, *config.gate_sets]
    for policy, name in config.uses.items():
        gives = f"`uses` gives gates to {policy!r}, which takes none"
        if policy in (FULL, *CONTROLS):
            yield True, f"{gives}: leave it out"
            continue
        yield _unknown("`uses` gives gates to an unknown policy", policy, known)
        # Of a policy that cannot be made it is not known whether it takes gates.
        can_be = policy in known and _error_of(find_policy, config, policy) is None
        yield (
            can_be and not find_policy(config, policy).learned,
            f"{gives} (its `learned` is false): leave it out, or set learned=true in a variant",
        )
        yield _unknown(f"`uses` gives {policy!r} unknown gates", name, sets)


def _variants(config: CompareConfig, presets: Presets) -> Checked:
    """Variants; `presets` says which variants each preset has of its own."""
    for name, variant in config.variants.items():
        first = variant[0] if variant else ""
        preset, colon, own = first.partition(":")
        if name in (FULL, *presets, *CONTROLS):
            yield True, f"variant {name!r} has the name of a policy that there is: give it another"
        elif "+" in name:
            yield True, f"variant {name!r}: a '+' stands before a protection: take a name without it"
        elif preset == FULL or preset not in presets:
            yield (
                True,
                f"variant {name!r} begins with the preset that it changes, got "
                f"{first or 'nothing'!r}{suggest(preset, presets)}; then `key=value`, as in "
                "[snapkv, protection.sinks=0]",
            )
        elif colon and own not in presets[preset]:
            known = presets[preset]
            yield (
                True,
                f"variant {name!r} begins with {first!r}, and preset {preset!r} has no variant "
                f"{own!r}{hint_of(first) or suggest(own, known)}; it has {', '.join(known) or 'none'}",
            )
        else:
            refused = _error_of(find_policy, config, name)
            yield refused, f"variant {name!r}: {refused}"


def _protections(config: CompareConfig, presets: Presets) -> Checked:
    """Protections, tried on every policy that is measured under one, and `under`."""
    for name, changes in config.protections.items():
        others = [change for change in changes if not change.startswith(("protection.", "scope="))]
        if name == PRESET or "+" in name:
            yield True, f"protection {name!r}: take a name that is not {PRESET!r} and has no '+' in it"
        elif others or not changes:
            yield (
                True,
                f"protection {name!r} is a list of `protection.field=value` and `scope=value`, got "
                f"{list(changes)}; what else a policy changes belongs in a variant",
            )
        else:
            # Unknown policies are said elsewhere, with what they may have meant.
            known = {FULL, *presets, *config.variants, *CONTROLS}
            for policy in dict.fromkeys(config.under.get(name, config.policies)):
                refused = _error_of(find_policy, config, policy, name) if policy in known else None
                yield refused, f"protection {name!r}: {refused}"
    for name, measured in config.under.items():
        hint = suggest(name, config.protections)
        named = f"`under` names the protection {name!r}{hint}, which is not in `protections`"
        yield name not in config.protections, named
        for policy in measured:
            yield (
                policy not in config.policies,
                f"`under` asks for {policy!r} under {name!r}{suggest(policy, config.policies)}, and it is "
                "not among the policies: add it there, or leave it out",
            )
    nothing = not config.protections and not config.preset_protection
    yield nothing, "`preset_protection` is false and `protections` is empty: nothing would be measured"


def _grid(config: CompareConfig, suite: Suite) -> Checked:
    """Numbers, and what would leave nothing to measure."""
    for name in ("seeds", "regimes", "policies"):
        yield not getattr(config, name), f"`{name}` is empty"
    yield not config.budgets, "`keep_ratios` is empty, and so is `tokens_per_head`: state a budget"
    least = f"tokens_per_head lies below context_tokens ({config.context_tokens})"
    yield from ((own >= config.context_tokens, f"{least}; got {own}") for own in config.tokens_per_head)
    for regime in config.regimes if {*config.policies} <= {*CONTROLS} else ():
        text = f"the policies are controls, and regime {regime!r} has no place for them"
        yield regime not in SHARED, f"{text}: leave it out, or name a policy"
    for name in with_all_tasks(config, suite) if config.first_item > 0 else ():
        yield (
            not indices_of(config, suite, name),
            f"task {name!r} has {suite.tasks[name].num_items} items, and `first_item` is "
            f"{config.first_item}: none is left; lower it, or leave the task out",
        )
    several = len(config.seeds) > 1 and suite.seeds is not None
    folders = {f"gate_sets.{name}.folder": own.folder for name, own in config.gate_sets.items()}
    for name, folder in {"gates": config.gates, **folders}.items():
        yield (
            several and folder and "{seed}" not in folder,
            f"`{name}` needs a {{seed}} in it, since there are {len(config.seeds)} seeds; got {folder!r}",
        )


def _made(config: CompareConfig, presets: Presets) -> dict[str, Policy]:
    """The policies that can be made."""
    known = {*presets, *config.variants, *CONTROLS}
    return {
        name: find_policy(config, name)
        for name in config.policies
        if name in known and _error_of(find_policy, config, name) is None
    }


def _bytes(config: CompareConfig, presets: Presets) -> Checked:
    """Settings that go with the bytes that caches hold."""
    again = [regime for regime in config.regimes if regime not in SHARED]
    yield (
        config.cache_dtype is not None and again,
        f"cache_dtype {config.cache_dtype!r} rounds a prefill that is evicted from once, and regimes "
        f"{', '.join(again)} hold what their models compute: leave cache_dtype out, or these regimes",
    )
    packing = [name for name, own in _made(config, presets).items() if own.precision is not None]
    yield (
        packing and config.tokens_per_head,
        f"{', '.join(packing)} hold entries in fewer bytes, and tokens_per_head counts entries, of which "
        "they would hold fewer bytes than others: state keep_ratios, which are ratios of bytes for them",
    )


def _devices(config: CompareConfig, processes: int) -> Checked:
    spread_over, refused = config.text.device_map, _error_of(resolve_device, config.device)
    yield refused, str(refused)
    on_gpu = refused is None and (spread_over or resolve_device(config.device).type == "cuda")
    yield (
        on_gpu and config.workers > 1 and processes == 1,
        f"each of {config.workers} workers would load a model onto the same GPU: take workers=0, or start a "
        "process for each GPU with `accelerate launch --num_processes N eval/compare.py ...`",
    )
    elsewhere = f"text.device_map spreads the model of suite 'text', and this is {config.suite!r}"
    yield spread_over and config.suite != "text", elsewhere


def _gates(config: CompareConfig, suite: Suite, notes: list[str]) -> list[str]:
    """Loads every seed's gates against its model, as the run will, and makes its controls of them; with those
    of the first seed, tries the caches of all lines."""
    if not gate_users(config) and all(regime in SHARED for regime in config.regimes):
        return []
    missing, broken = [], {}

    def look(seed: int, model: Any) -> None:
        problems, sets = [], {}
        folders: dict[str, list[str]] = {}
        for name in gate_names(config):
            folders.setdefault(config.gates_of(seed, name), []).append(name)
        for folder, names in folders.items():
            if not (Path(folder) / METADATA_FILE).is_file():
                command = suite.train_gates.format(seed=seed, gates=folder)
                missing.append(
                    f"there are no gates for seed {seed} in {folder}{_of_sets(names)}; train them first:"
                    f"\n      {command}"
                )
                continue
            try:
                read = {folder: load_gates(folder, model, allow_other_weights=config.allow_other_weights)}
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
            # Gates that are not there are said.
            if (name or shared) and name not in sets:
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


def shortest_of(config: CompareConfig, suite: Suite, task: str) -> tuple[tuple[int, int, int], int, int]:
    """The shortest of a task's contexts.

    Returns:
        Its tokens, with item and seed; how many items were made to find it, and how many there are.

    Raises:
        ValueError: An item that cannot be made.
    """
    places = [(index, seed) for index in indices_of(config, suite, task) for seed in config.seeds]
    found: list[tuple[int, int, int]] = []
    began = time.monotonic()
    for index, seed in places:
        item = suite.item(task, seed, index, config.context_tokens)
        found.append((len(item.context_ids), index, seed))
        took = time.monotonic() - began
        if took > MOST_SECONDS or (took > CHEAP_SECONDS and len(found) >= FIRST_ITEMS):
            break
    return min(found, key=lambda own: own[0]), len(found), len(places)


def _budgets(config: CompareConfig, suite: Suite, notes: list[str]) -> Iterator[str]:
    """Tries each policy's protection on a context of full length, and on the shortest of each task: a budget
    below what is protected is found here, not hours later."""
    shortest, some = [(config.context_tokens, "")], []
    for task in with_all_tasks(config, suite):
        try:
            (tokens, item, seed), looked, there = shortest_of(config, suite, task)
        except ValueError as error:
            yield f"task {task!r}: {error}"
            continue
        where = f", on item {item} of task {task!r} (seed {seed}), whose context has {tokens} tokens"
        shortest.append((tokens, where))
        if looked < there:
            some.append(f"{task} ({looked} of {there})")
    if some:
        notes.append(
            "budgets were tried on the shortest of the first items alone: a shorter one may stop the run. "
            + ", ".join(some)
        )
    # The full length first; then the shortest, of which one message is enough.
    shortest[1:] = sorted(shortest[1:], key=lambda own: own[0])
    for line in all_lines(config):
        policy = find_policy(config, line.policy, line.protection)
        for value in config.budgets:
            what = f"policy {line.name!r} at {'keep_ratio' if value < 1 else 'tokens_per_head'} {value:g}"
            for tokens, where in shortest:
                if refused := _error_of(_protect, policy, budget_of(value), tokens):
                    step = " Or leave the task out, or raise context_tokens." if where else ""
                    yield f"{what}{where}: {refused}{step}"
                    break


def _protect(policy: Policy, budget: Budget, tokens: int) -> None:
    """Makes a policy's protected mask of a context of so many tokens under a budget."""
    totals = spread(budget, [tokens], [LayerShape(1, 1)])
    protected_mask(policy.protection, torch.ones(1, tokens, dtype=torch.bool), totals.per_head_B)


def _error_of(call: Callable[..., object], *arguments: Any) -> Exception | None:
    """The error of a call that refuses its arguments."""
    try:
        call(*arguments)
    except (ValueError, FileNotFoundError) as error:
        return error
    return None


def _documents(config: CompareConfig, suite: Suite) -> Iterator[str]:
    """Whether there are documents for what is fitted on them."""
    if "token_identity" in config.policies and (refused := _error_of(_first, suite.documents, config)):
        yield f"token_identity: {refused}"


def _weights(config: CompareConfig) -> Iterator[str]:
    """Whether weights of heads are there, for policies that read them."""
    for line in all_lines(config):
        path = find_policy(config, line.policy, line.protection).weights
        if path is not None and (refused := _error_of(read_weights, path)):
            yield f"policy {line.name!r}: {refused}"


def _first(source: Callable[[int, int, int], Iterator[Any]], config: CompareConfig) -> object:
    """The first document of a source, or None."""
    return next(source(config.seeds[0], 1, config.context_tokens), None)
