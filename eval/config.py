"""The config of a comparison: a grid of policies, protections, budgets, regimes, tasks and seeds.

A YAML file and `key=value` overrides become a `CompareConfig`; here too is what follows from one: the suite,
the lines of a table, the policy of each. Whether it can work is `retain.eval.run.checks`. All that a score
depends on is in the config, and the fields that it does not depend on are listed (`NOT_IDENTITY`).
"""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field

from retain.budget.statement import Budget
from retain.config import Count, Many, ProperShare, Tokens, Whole
from retain.eval.tasks.suite import Suite
from retain.eval.tasks.suites import load_suite
from retain.gates.hub import fetch
from retain.presets import Policy, load_policy

Regime = Literal[
    "context_only",
    "query_aware",
    "chunked",
    "decode",
    "prefill+decode",
    "chunked+decode",
]
# One prefill serves every policy and budget: the context is read once, and forks of it are cut.
SHARED: tuple[Regime, ...] = ("context_only", "query_aware")
REGIMES: tuple[str, ...] = get_args(Regime)

# Scores that no one could have at inference: they need context of the future, or none at all.
CONTROLS = ("token_identity", "oracle")
FULL = "full"
# The shipped reference model.
MODEL = "reference:0"
# The protection that a policy has of itself.
PRESET = "preset"
# The gates that a policy takes where `uses` says nothing of it: those of the folder `gates`.
OWN_GATES = "gates"
GateControl = Literal["none", "random", "other_layer"]
# The resolved config of a run, in its folder: for every command that takes the config of a comparison, also
# where a study or a program made it.
RESOLVED = "compare.yaml"


@dataclass(frozen=True)
class GateSource:
    """Where a set of gates comes from, and what is done to them before they score.

    Attributes:
        folder: Of a seed's gates, with `{seed}` in it, or a repository as in `gates`; empty: that of `gates`.
        control: "none": the gates as they were trained. "random": the same family and sizes with fresh
            weights, which follow from the run's seed and the set's name. "other_layer": layer `l` is scored
            by the gate, and its calibrator, of the next layer that has one; the last by the first's
            (`retain.eval.run.gate_sources`).
    """

    folder: str = ""
    control: GateControl = "none"


@dataclass(frozen=True)
class TextOptions:
    """How tasks in text are asked, beside the model's name: fields of
    `retain.eval.tasks.text_suite.TextSettings`.

    Attributes:
        chat: Whether a chat template is used where card and tokenizer have one.
        template: More keyword arguments of the chat template.
        changes: Per task or group, settings of its generator that differ from the card's.
        dtype: Of the model's weights, as torch calls it; "auto": as the checkpoint says.
        revision: Of a hub model.
        trust_remote_code: Run code that comes with the checkpoint.
        device_map: How the model is spread over devices, as transformers takes it ("auto"); the config's
            `device` moves nothing then.
    """

    chat: bool = True
    template: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    device_map: str | None = None


@dataclass(frozen=True)
class CompareConfig:
    """One comparison.

    Attributes:
        run: Name of the run; the results are written to `<results>/<run>`.
        seeds: Seeds of the items, and of the models that answer where a suite has several.
        items_per_task: Items of each task, for each seed; fewer where a task has no more.
        first_item: Index of the first of them in its task and seed: what was chosen on low indices is
            confirmed on others.
        gates: Folder of a seed's gates, with `{seed}` in it; or a repository of the hub with its revision,
            which tells it from a folder: `owner/gates@main`.
        allow_other_weights: Take gates whose base has other weights than the model, as for a fine-tune of it.
        gate_sets: Other gates that policies may take, by name.
        uses: Name of a preset or variant -> the gates that it takes: a name in `gate_sets`, or "gates", which
            all others take.
        suite: Suite of tasks: in the reference model's own vocabulary "reference" or "reference_more"
            (further tasks); "text", for any model.
        model: The model that answers, for all seeds: a name of the catalogue, a hub name, a folder, or
            `reference:0`; of the suite `reference` and those built on it that one.
        tasks: Names of tasks, or of groups of tasks in text; empty for all of the suite.
        text: How tasks in text are asked.
        regimes: "context_only": the context is prefilled and evicted, the question arrives afterwards.
            "query_aware": scores have observed context and (first) question. The others are those of
            `retain.Cache`: "chunked", "decode", "prefill+decode", "chunked+decode".
        keep_ratios: Kept / seen, each in (0, 1). The full cache is always measured, once.
        tokens_per_head: Budgets in entries per KV head, each at least 2, beside the keep_ratios.
        policies: Presets of `configs/policy`, variants, and the controls "token_identity" and "oracle", which
            stand in the regimes "context_only" and "query_aware" alone.
        variants: Policies of this comparison alone: name -> a preset, or one of a preset's own variants as in
            `"snapkv:paper"`, then `key=value` changes to it, e.g. `[snapkv, protection.sinks=0]`.
        protections: Other protections (or scopes of a budget) that policies are measured under: name ->
            `key=value` changes, e.g. `none: [protection.sinks=0, protection.prefix_fraction=0]`.
        under: Name of a protection -> the policies that are measured under it; all, where it is not named.
        preset_protection: Whether every policy is measured under its preset's protection too.
        every: Tokens between evictions, in the regimes that evict while decoding.
        chunk_tokens: Tokens of a chunk, in the regimes that evict behind every chunk.
        cache_dtype: Precision of the keys and values that every cache holds, the full one too, in the regimes
            that evict once: "bfloat16" is what a model of 16 bits holds, whatever it computes in here. None:
            the model's own.
        temperature: Of sampling; 0 takes the likeliest token. The noise depends on the item, the question,
            the place in the answer and the token alone: all policies draw alike.
        context_tokens: Length of every context; of tasks in text the most that it may have.
        control_documents: Documents that the token-identity control is fitted on, and head classes are
            measured on, for each seed.
        horizon: Distance, in entries, from which a document's own later tokens count in the control's target.
        unit_items: Items of a unit of work: it is written whole, and what a killed run loses.
        batch_items: Items of a unit that are read together; fewer take less memory, and more steps.
        max_sequences: Most sequences that are decoded together; more memory, fewer steps.
        workers: Processes, each with one thread and a model of its own; 0 runs everything in this process,
            with its own threads. More than one only on the CPU. Under `accelerate launch` the processes are
            the launcher's.
        device: Where models run: "cpu", "cuda" (under `accelerate launch` each process on its own), "auto".
        margin_points: Difference that would not matter, in points of 100, for the verdict "equivalent".
        resamples: Sign flips of a paired test, at least.
        results: Folder of all runs.
    """

    run: str
    seeds: tuple[Whole, ...]
    items_per_task: Many
    gates: str
    first_item: Whole = 0
    allow_other_weights: bool = False
    gate_sets: dict[str, GateSource] = field(default_factory=dict)
    uses: dict[str, str] = field(default_factory=dict)
    suite: str = "reference"
    model: str = MODEL
    tasks: tuple[str, ...] = ()
    text: TextOptions = TextOptions()
    regimes: tuple[Regime, ...] = ("context_only", "query_aware")
    keep_ratios: tuple[ProperShare, ...] = (0.1, 0.2, 0.4)
    tokens_per_head: tuple[Annotated[int, Field(ge=2)], ...] = ()
    policies: tuple[str, ...] = (
        *("random", "recency", "token_identity", "snapkv", "defensive", "defensivekv", "h2o"),
        *("gate", "fused", "merge", "oracle"),
    )
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)
    protections: dict[str, tuple[str, ...]] = field(default_factory=dict)
    under: dict[str, tuple[str, ...]] = field(default_factory=dict)
    preset_protection: bool = True
    every: Count = 32
    chunk_tokens: Count = 256
    cache_dtype: Literal["bfloat16"] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    context_tokens: Annotated[int, Field(ge=64, le=2**24)] = 1000
    control_documents: Many = 128
    horizon: Tokens = 32
    unit_items: Count = 8
    batch_items: Count = 8
    max_sequences: Count = 128
    workers: Annotated[int, Field(ge=0, le=1024)] = 2
    device: str = "cpu"
    margin_points: Annotated[float, Field(ge=1e-6, le=100)] = 2.0
    resamples: Annotated[int, Field(ge=100, le=10**6)] = 5000
    results: str = "results"

    @property
    def folder(self) -> Path:
        """Where this run's results lie."""
        return Path(self.results) / self.run

    @property
    def budgets(self) -> tuple[float, ...]:
        """Keep_ratios, then tokens per head; the full cache's is 1."""
        return (*self.keep_ratios, *map(float, self.tokens_per_head))

    def source_of(self, name: str = OWN_GATES) -> GateSource:
        """Where a set of gates comes from; its folder is never empty."""
        if name == OWN_GATES:
            return GateSource(self.gates)
        own = self.gate_sets[name]
        return own if own.folder else replace(own, folder=self.gates)

    def gates_of(self, seed: int, name: str = OWN_GATES) -> str:
        """Folder of one seed's gates; a repository of the hub that is named with its revision is fetched.

        Raises:
            ValueError: There is no such repository or revision, or the hub cannot be reached.
        """
        place = self.source_of(name).folder.replace("{seed}", str(seed))
        return _fetched(place) if "@" in place and not Path(place).is_dir() else place


@cache
def _fetched(hub_id: str) -> str:
    """A repository of gates is asked for once: a branch that moves meanwhile is not followed."""
    return str(fetch(hub_id))


def asks_shipped(config: Mapping[str, Any]) -> bool:
    """Whether the shipped reference model answered, as the config of a manifest says: that of any suite of
    its own, and of tasks in text if it is named. Manifests of earlier versions name no model."""
    suite = str(config["suite"])
    theirs = suite.startswith("reference")
    model = str(config.get("model") or (MODEL if theirs else ""))
    return (theirs or suite == "text") and model.partition(":")[0] == MODEL.partition(":")[0] and ":" in model


# Fields that do not change a row: a finished run may be reported again under others. Gates are identified by
# their weights, wherever they lie, and variants and protections by the policies that they come to. How many
# items are read together is what one lowers when memory runs out, and then goes on.
NOT_IDENTITY = (
    *("results", "gates", "allow_other_weights", "gate_sets", "uses", "variants", "protections", "under"),
    *("workers", "batch_items", "max_sequences", "margin_points", "resamples"),
)


@dataclass(frozen=True)
class Line:
    """A policy (as the config names it) under a protection ("preset", or one of `protections`): a line of a
    table, with its label."""

    name: str
    policy: str
    protection: str = PRESET


def lines_of(config: CompareConfig, regime: str) -> tuple[Line, ...]:
    """The lines of a regime beside the full cache; controls where their prefill is."""
    names = [name for name in config.policies if regime in SHARED or name not in CONTROLS]
    preset = [Line(name, name) for name in names if config.preset_protection]
    others = [
        Line(f"{name}+{protection}", name, protection)
        for protection in config.protections
        for name in names
        if name in config.under.get(protection, names)
    ]
    return (*preset, *others)


def all_lines(config: CompareConfig) -> tuple[Line, ...]:
    """The lines of all regimes, each once."""
    return tuple(dict.fromkeys(line for regime in config.regimes for line in lines_of(config, regime)))


def budget_of(value: float, policy: Policy | None = None) -> Budget:
    """A budget as rows name it: below 1 a keep_ratio, from 2 on tokens per head. Of a policy that
    holds entries in fewer bytes a ratio is one of bytes, so that all hold equally many."""
    if value <= 1 and policy is not None and policy.precision is not None:
        return Budget(byte_ratio=value)
    if value <= 1:
        return Budget(keep_ratio=value)
    return Budget(tokens_per_head=int(value))


def config_parser(cls: type[Any], example: str, **about: Any) -> argparse.ArgumentParser:
    """A command line that names a YAML of a config and overrides of it; its help says the keys."""
    keys = "Keys: " + ", ".join(field.name for field in fields(cls))
    # As it was typed: a path, or the name that `retain` gives a command.
    parser = argparse.ArgumentParser(os.path.relpath(sys.argv[0]), epilog=keys, **about)
    parser.add_argument("--config", required=True, help=f"YAML, e.g. {example}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config")
    return parser


def compare_parser() -> argparse.ArgumentParser:
    """The command line of a comparison."""
    about = "Compare KV-cache eviction policies at equal achieved memory."
    return config_parser(CompareConfig, "configs/compare/reference.yaml", description=about)


def suite_of(config: CompareConfig) -> Suite:
    """The suite that a config names.

    Raises:
        ValueError: If there is none of that name, or of tasks in text an unknown one.
    """
    if config.suite == "text":
        return load_suite("text", model=config.model, tasks=config.tasks, **vars(config.text))
    # Only what was asked for is passed on: a suite that has one model needs to know of no other.
    return load_suite(config.suite, **({} if config.model == MODEL else {"model": config.model}))


def find_policy(config: CompareConfig, name: str, protection: str = PRESET) -> Policy:
    """The policy of that name: a variant of this comparison, or a preset; a control is the gate's pipeline
    with the control's score in the gate's place."""
    parts = config.variants.get(name) or ("gate" if name in CONTROLS else name,)
    if protection == PRESET:
        return labelled_policy(name, parts)
    return labelled_policy(f"{name}+{protection}", (*parts, *config.protections[protection]))


@cache
def labelled_policy(label: str, parts: tuple[str, ...]) -> Policy:
    """A preset with `key=value` changes behind it, under a label of its own."""
    # What else a preset could be is no part of what it is here, nor of a run's identity.
    return replace(load_policy(parts[0], parts[1:]), name=label, variants={})


def gate_users(config: CompareConfig) -> dict[str, str]:
    """Policies that ask for gates -> the name of the set that each takes; controls bring their own score."""
    return {
        name: config.uses.get(name, OWN_GATES)
        for name in config.policies
        if name not in CONTROLS and find_policy(config, name).learned
    }


def gate_names(config: CompareConfig) -> tuple[str, ...]:
    """Names of the sets of gates that are taken by any policy."""
    return tuple(dict.fromkeys(gate_users(config).values()))


def fits_table(config: CompareConfig) -> bool:
    """Whether anything is fitted on documents before a unit can be run."""
    return "token_identity" in config.policies


def with_all_tasks(config: CompareConfig, suite: Suite) -> tuple[str, ...]:
    """Names of the tasks asked for, in the suite's order."""
    return tuple(
        name
        for name in suite.tasks
        if not config.tasks or name in config.tasks or name.partition("/")[0] in config.tasks
    )


def indices_of(config: CompareConfig, suite: Suite, task: str) -> range:
    """Indices of the items of a task that each seed is asked: as many as there are from the first on, at
    most."""
    stop, there = config.first_item + config.items_per_task, suite.tasks[task].num_items
    return range(config.first_item, stop if there is None else min(stop, max(config.first_item, there)))


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Where this process's model runs.

    Args:
        local_rank: Of the process on its machine, where a launcher started several.

    Raises:
        ValueError: If it is no device, or none of that kind is here.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        device = torch.device(kind)
    except RuntimeError:
        raise ValueError(f"device is {name!r}, and must be 'cpu', 'cuda', 'cuda:1', or 'auto'.") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device is {name!r}, and torch sees no GPU here: take device=cpu, or auto.")
        if ":" not in kind:
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
    return device
