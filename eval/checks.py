"""Everything about a comparison that can be wrong before work starts.

In: a config and its suite. Out: nothing, where names exist, gates are there, budgets hold what is protected,
and every policy goes with every regime. The one decision taken here: all problems are found first and told at
once.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from retain.budget import LayerShape, spread
from retain.eval.by_cache import open_cache
from retain.eval.config import (
    CONTROLS,
    FULL,
    PRESET,
    REGIMES,
    SHARED,
    CompareConfig,
    all_lines,
    budget_of,
    find_policy,
    lines_of,
    needs_gates,
    resolve_device,
)
from retain.eval.tasks import Suite
from retain.hf.gates import load_gates
from retain.presets import policies
from retain.protection import protected_mask
from retain.registry import suggest


def check(config: CompareConfig, suite: Suite) -> None:
    """Find everything that is wrong with a config.

    Raises:
        ValueError: All problems in one message.
    """
    problems = _names(config, suite) + _numbers(config, suite)
    if not problems:
        problems = _gates(config, suite) + _budgets(config) + _documents(config, suite)
    if not problems:
        problems = _caches(config, suite)
    if problems:
        raise ValueError(
            "This comparison cannot start:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )


def _names(config: CompareConfig, suite: Suite) -> list[str]:
    presets = [preset.name for preset in policies()]
    known = [FULL, *presets, *config.variants, *CONTROLS]
    groups = [name.partition("/")[0] for name in suite.tasks]
    checks = [
        ("policy", config.policies, known),
        ("task", config.tasks, [*suite.tasks, *groups]),
        ("regime", config.regimes, list(REGIMES)),
    ]
    problems = [
        f"unknown {what} {name!r}{suggest(name, names)}; known: {', '.join(dict.fromkeys(names))}"
        for what, given, names in checks
        for name in given
        if name not in names
    ]
    problems += [
        f"suite {suite.name!r} has no model of seed {seed}; it has {', '.join(map(str, suite.seeds))}"
        for seed in config.seeds
        if suite.seeds is not None and seed not in suite.seeds
    ]
    problems += _variants(config, {preset.name: preset.variants for preset in policies()})
    problems += _protections(config)
    if FULL in config.policies:
        problems.append(f"{FULL!r} is always measured: leave it out of `policies`")
    repeatable = ("seeds", "tasks", "regimes", "keep_ratios", "tokens_per_head", "policies")
    problems += [
        f"`{field}` names something twice: {getattr(config, field)}"
        for field in repeatable
        if len(set(getattr(config, field))) < len(getattr(config, field))
    ]
    if Path(config.run).name != config.run or config.run in ("", ".", ".."):
        problems.append(f"`run` is the name of a folder under {config.results}, got {config.run!r}")
    return problems


def _variants(config: CompareConfig, presets: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What is wrong with variants; `presets` says which variants each preset has of its own."""
    problems = []
    for name, variant in config.variants.items():
        first = variant[0] if variant else ""
        preset, colon, own = first.partition(":")
        if name in (FULL, *presets, *CONTROLS):
            problems.append(f"variant {name!r} has the name of a policy that there is: give it another")
        elif preset == FULL or preset not in presets:
            problems.append(
                f"variant {name!r} begins with the preset that it changes, got "
                f"{first or 'nothing'!r}{suggest(preset, presets)}; then `key=value`, as in "
                "[snapkv, protection.sinks=0]"
            )
        elif colon and own not in presets[preset]:
            problems.append(
                f"variant {name!r} begins with {first!r}, and preset {preset!r} has no variant "
                f"{own!r}{suggest(own, presets[preset])}; it has {', '.join(presets[preset]) or 'none'}"
            )
        else:
            try:
                find_policy(config, name)
            except ValueError as error:
                problems.append(f"variant {name!r}: {error}")
    return problems


def _protections(config: CompareConfig) -> list[str]:
    """What is wrong with protections: tried on a policy, since every one has the same fields."""
    problems = []
    for name, changes in config.protections.items():
        others = [change for change in changes if not change.startswith("protection.")]
        if name == PRESET or "+" in name:
            problems.append(f"protection {name!r}: take a name that is not {PRESET!r} and has no '+' in it")
        elif others or not changes:
            problems.append(
                f"protection {name!r} is a list of `protection.field=value`, got {list(changes)}; what else "
                "a policy changes belongs in a variant"
            )
        else:
            try:
                find_policy(config, "random", name)
            except ValueError as error:
                problems.append(f"protection {name!r}: {error}")
    if not config.protections and not config.preset_protection:
        problems.append("`preset_protection` is false and `protections` is empty: nothing would be measured")
    return problems


def _numbers(config: CompareConfig, suite: Suite) -> list[str]:
    problems = [
        f"`{name}` is empty" for name in ("seeds", "regimes", "policies") if not getattr(config, name)
    ]
    if not config.budgets:
        problems.append("`keep_ratios` is empty, and so is `tokens_per_head`: state a budget")
    problems += [
        f"tokens_per_head is from 2 up to below context_tokens ({config.context_tokens}); got {tokens}"
        for tokens in config.tokens_per_head
        if not 2 <= tokens < config.context_tokens
    ]
    problems += [
        f"the policies are controls, and regime {regime!r} has no place for them: leave it out, or name a "
        "policy"
        for regime in config.regimes
        if regime not in SHARED and {*config.policies} <= {*CONTROLS}
    ]
    try:
        resolve_device(config.device)
    except ValueError as error:
        problems.append(str(error))
    problems += [
        f"a keep_ratio is kept / seen, above 0 and below 1 (the full cache is measured anyway); got {ratio}"
        for ratio in config.keep_ratios
        if not 0 < ratio < 1
    ]
    least = {
        "items_per_task": 1,
        "context_tokens": 64,
        "control_documents": 1,
        "horizon": 1,
        "batch_items": 1,
    }
    least |= {"max_sequences": 1, "workers": 0, "resamples": 100, "every": 1, "chunk_tokens": 1}
    problems += [
        f"`{name}` must be at least {low}, got {getattr(config, name)}"
        for name, low in least.items()
        if getattr(config, name) < low
    ]
    if config.margin_points <= 0:
        problems.append(f"`margin_points` must be positive, got {config.margin_points}")
    if len(config.seeds) > 1 and suite.seeds is not None and "{seed}" not in config.gates:
        problems.append(
            f"`gates` needs a {{seed}} in it, since there are {len(config.seeds)} seeds; got {config.gates!r}"
        )
    return problems


def _gates(config: CompareConfig, suite: Suite) -> list[str]:
    """Load every seed's gates against its model, as the run will."""
    if not needs_gates(config):
        return []
    problems = []
    for seed in config.seeds:
        folder = config.gates_of(seed)
        if not (Path(folder) / "gates.json").is_file():
            command = suite.train_gates.format(seed=seed, gates=folder)
            problems.append(
                f"there are no gates for seed {seed} in {folder}; train them first:\n      {command}"
            )
            continue
        try:
            load_gates(folder, suite.load_model(seed))
        except ValueError as error:
            problems.append(f"gates of seed {seed}: {error}")
    return problems


def _budgets(config: CompareConfig) -> list[str]:
    """Try each policy's protection on a context: a budget below what is protected is found here, not hours
    later."""
    valid = torch.ones(1, config.context_tokens, dtype=torch.bool)
    problems = []
    for line in all_lines(config):
        policy = find_policy(config, line.policy, line.protection)
        if policy.protection.reads_turns:
            problems.append(
                f"policy {line.name!r} protects the turns of a conversation, and the contexts here are "
                "documents: set protection.turns, turn_prefix and turn_suffix to nothing in a variant"
            )
        for value in config.budgets:
            try:
                totals = spread(budget_of(value), [config.context_tokens], [LayerShape(1, 1)])
                protected_mask(policy.protection, valid, totals.per_head_B)
            except ValueError as error:
                what = "keep_ratio" if value < 1 else "tokens_per_head"
                problems.append(f"policy {line.name!r} at {what} {value:g}: {error}")
    return problems


def _documents(config: CompareConfig, suite: Suite) -> list[str]:
    """Whether there are documents for what is fitted on them."""
    readers = [name for name in config.policies if name == "token_identity"]
    readers += [
        name for name in config.policies if find_policy(config, name).allocation.head_classes is not None
    ]
    if not readers:
        return []
    try:
        suite.documents(config.seeds[0], 1, config.context_tokens)
    except ValueError as error:
        return [f"{', '.join(readers)}: {error}"]
    return []


def _caches(config: CompareConfig, suite: Suite) -> list[str]:
    """Make the cache of every line in every regime that evicts again: what a policy or its gates cannot do
    there is said when a cache is made."""
    again = [regime for regime in config.regimes if regime not in SHARED]
    if not again:
        return []
    seed = config.seeds[0]
    model = suite.load_model(seed)
    gates: Any = load_gates(config.gates_of(seed), model) if needs_gates(config) else None
    problems = []
    for regime in again:
        for line in lines_of(config, regime):
            policy = find_policy(config, line.policy, line.protection)
            if policy.allocation.head_classes is not None:
                continue  # its table is measured when the run begins
            try:
                open_cache(model, config, regime, policy, config.budgets[0], gates)
            except ValueError as error:
                problems.append(f"policy {line.name!r} in regime {regime!r}: {error}")
    return problems
