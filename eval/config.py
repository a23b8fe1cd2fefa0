"""What a comparison is told, and everything about it that can be wrong before work starts.

In: a YAML file and `key=value` overrides. Out: a `CompareConfig` that is known to work: names exist, gates
are there, budgets hold what is protected. The one decision taken here: all problems are found first and told
at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from retain.budget import Budget, LayerShape, spread
from retain.eval.tasks import Suite
from retain.hf.gates import load_gates
from retain.presets import Policy, load_policy, policies
from retain.protection import protected_mask
from retain.registry import suggest

Regime = Literal["context_only", "query_aware"]

# Scores that no one could have at inference: they need context of the future, or none at all.
CONTROLS = ("token_identity", "oracle")
FULL = "full"


@dataclass(frozen=True)
class CompareConfig:
    """One comparison.

    Attributes:
        run: Name of the run; the results are written to `<results>/<run>`.
        seeds: Seeds of the models that answer.
        items_per_task: Items of each task, for each seed.
        gates: Folder of a seed's gates, with `{seed}` in it.
        suite: Suite of tasks.
        tasks: Names of tasks; empty for all of the suite.
        regimes: "context_only": the context is prefilled and evicted, the question arrives afterwards.
            "query_aware": scores have observed context and question.
        keep_ratios: Kept / seen, each in (0, 1). The full cache is always measured, once.
        policies: Presets of `configs/policy`, variants, and the controls "token_identity" and "oracle".
        variants: Policies of this comparison alone: name -> a preset, or one of a preset's own variants as in
            `"defensivekv:released"`, then `key=value` changes to it, e.g. `[snapkv, protection.sinks=0]`.
        context_tokens: Length of every context.
        control_documents: Documents that the token-identity control is fitted on, and head classes are
            measured on, for each seed.
        horizon: Distance, in entries, from which a document's own later tokens count in the control's target.
        batch_items: Items that are prefilled together.
        max_sequences: Most sequences that are decoded together; more memory, fewer steps.
        workers: Processes, each with one thread; 0 runs everything in this process, with its own threads.
        margin_points: Difference that would not matter, in points of 100, for the verdict "equivalent".
        resamples: Bootstrap resamples of an interval.
        results: Folder of all runs.
    """

    run: str
    seeds: tuple[int, ...]
    items_per_task: int
    gates: str
    suite: str = "reference"
    tasks: tuple[str, ...] = ()
    regimes: tuple[Regime, ...] = ("context_only", "query_aware")
    keep_ratios: tuple[float, ...] = (0.1, 0.2, 0.4)
    policies: tuple[str, ...] = (
        "random",
        "recency",
        "token_identity",
        "snapkv",
        "defensive",
        "defensivekv",
        "h2o",
        "gate",
        "fused",
        "oracle",
    )
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)
    context_tokens: int = 1000
    control_documents: int = 128
    horizon: int = 32
    batch_items: int = 8
    max_sequences: int = 128
    workers: int = 2
    margin_points: float = 2.0
    resamples: int = 5000
    results: str = "results"

    @property
    def folder(self) -> Path:
        """Where this run's results lie."""
        return Path(self.results) / self.run

    def gates_of(self, seed: int) -> str:
        """Folder of one seed's gates."""
        return self.gates.replace("{seed}", str(seed))


# Fields that do not change a row: a finished run may be reported again under others. Gates are identified by
# their weights, wherever they lie, and variants by the policies that they come to.
NOT_IDENTITY = ("results", "gates", "variants", "workers", "max_sequences", "margin_points", "resamples")


def find_policy(config: CompareConfig, name: str) -> Policy:
    """The policy of that name: a variant of this comparison, or a preset; a control is the gate's pipeline
    with the control's score in the gate's place."""
    return _resolved(name, config.variants.get(name))


@cache
def _resolved(name: str, variant: tuple[str, ...] | None) -> Policy:
    # What else a preset could be is no part of what it is here, nor of a run's identity.
    if variant is not None:
        preset, *changes = variant
        return replace(load_policy(preset, changes), name=name, variants={})
    if name not in CONTROLS:
        return replace(load_policy(name), variants={})
    gate = load_policy("gate")
    return replace(gate, name=name, learned=True, observed=None, fusion="learned", variants={})


def needs_gates(config: CompareConfig) -> bool:
    """Whether any policy asks for trained gates."""
    return any(find_policy(config, name).learned for name in config.policies if name not in CONTROLS)


def with_all_tasks(config: CompareConfig, suite: Suite) -> tuple[str, ...]:
    """Names of the tasks asked for, in the suite's order."""
    return tuple(name for name in suite.tasks if not config.tasks or name in config.tasks)


def check(config: CompareConfig, suite: Suite) -> None:
    """Find everything that is wrong with a config.

    Raises:
        ValueError: All problems in one message.
    """
    problems = _names(config, suite) + _numbers(config)
    if not problems:
        problems = _gates(config, suite) + _budgets(config)
    if problems:
        raise ValueError(
            "This comparison cannot start:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )


def _names(config: CompareConfig, suite: Suite) -> list[str]:
    presets = [preset.name for preset in policies()]
    known = [FULL, *presets, *config.variants, *CONTROLS]
    checks = [("policy", config.policies, known), ("task", config.tasks, list(suite.tasks))]
    problems = [
        f"unknown {what} {name!r}{suggest(name, names)}; known: {', '.join(dict.fromkeys(names))}"
        for what, given, names in checks
        for name in given
        if name not in names
    ]
    problems += [
        f"suite {suite.name!r} has no model of seed {seed}; it has {', '.join(map(str, suite.seeds))}"
        for seed in config.seeds
        if seed not in suite.seeds
    ]
    problems += _variants(config, {preset.name: preset.variants for preset in policies()})
    if FULL in config.policies:
        problems.append(f"{FULL!r} is always measured: leave it out of `policies`")
    repeatable = ("seeds", "tasks", "regimes", "keep_ratios", "policies")
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


def _numbers(config: CompareConfig) -> list[str]:
    problems = [
        f"`{name}` is empty"
        for name in ("seeds", "regimes", "keep_ratios", "policies")
        if not getattr(config, name)
    ]
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
    least |= {"max_sequences": 1, "workers": 0, "resamples": 100}
    problems += [
        f"`{name}` must be at least {low}, got {getattr(config, name)}"
        for name, low in least.items()
        if getattr(config, name) < low
    ]
    if config.margin_points <= 0:
        problems.append(f"`margin_points` must be positive, got {config.margin_points}")
    if len(config.seeds) > 1 and "{seed}" not in config.gates:
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
    for name in config.policies:
        policy = find_policy(config, name)
        if policy.protection.reads_turns:
            problems.append(
                f"policy {name!r} protects the turns of a conversation, and the contexts here are documents: "
                "set protection.turns, turn_prefix and turn_suffix to nothing in a variant"
            )
        for ratio in config.keep_ratios:
            try:
                totals = spread(Budget(keep_ratio=ratio), [config.context_tokens], [LayerShape(1, 1)])
                protected_mask(policy.protection, valid, totals.per_head_B)
            except ValueError as error:
                problems.append(f"policy {name!r} at keep_ratio {ratio}: {error}")
    return problems
