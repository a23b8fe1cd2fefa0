"""The config of a comparison: a grid of policies, protections, budgets, settings, tasks and seeds.

A YAML file, or options of `retain compare`, and `key=value` overrides become a `CompareConfig`. Whether it
can work is checked by `retain.eval.run.checks` before anything is measured.
"""

import argparse
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import yaml
from pydantic import Field

from retain.budget.statement import Budget
from retain.config import Count, Many, ProperShare, Whole, build, load
from retain.presets import Policy, load_policy

When = Literal["prefill", "chunk", "decode", "prefill+decode", "chunk+decode"]
Question = Literal["unknown", "known"]
WHEN: tuple[str, ...] = get_args(When)
# Label of the full cache, which is always measured, and its budget.
FULL = "full"
FULL_BUDGET = Budget(keep_ratio=1.0)
# Policies that no one could have at inference: they need to know the future.
CONTROLS = ("oracle",)
# Label of a policy's protection where it is the one of its preset.
PRESET = "own"
# Label of the gates that `gates` names.
GATES = "gates"
MODEL = "reference:0"


@dataclass(frozen=True)
class CompareConfig:
    """A comparison.

    Attributes:
        run: Name of the run; results are written to `<results>/<run>`.
        tasks: Names of tasks or of groups of them; a file `mine.jsonl`, `mine.parquet` or `mine.py`; a data
            set of the hub as `hub:owner/name`.
        policies: Presets (`retain policies`), variants, and the control "oracle", which knows the question
            and the answer and is measured where entries are evicted once, behind the prompt.
        model: Model that answers: `reference:0`, a name of the catalogue, a hub name, or a folder.
        keep_ratios: Budgets as kept / seen, each in (0, 1). The full cache is always measured.
        tokens_per_head: Budgets in entries per KV head, each at least 2.
        items_per_task: Rows of each task, for each seed; fewer where a task has no more.
        first_item: Number of the first row in its task and seed, so that a choice made on low numbers can be
            confirmed on others.
        seeds: Seeds of the rows.
        context_tokens: Length of a context in tokens; of natural text the most that it may have.
        gates: Folder or hub id of the gates that policies take, or the name of a model that gates ship for;
            empty: the gates that ship for the model.
        gate_sets: Other gates, by label: a folder, hub id or name each.
        uses: Policy -> label in `gate_sets` of the gates that it takes; all others take `gates`.
        allow_other_weights: Take gates whose base has other weights than the model, as for a fine-tune of it.
        when: When entries are evicted: "prefill" (once, behind the prompt), "chunk" (behind each chunk),
            "decode" (every `every` tokens), "prefill+decode" or "chunk+decode".
        question: Whether an eviction behind the prompt has seen the question: "known", "unknown" or both.
            Elsewhere it is unknown: the question comes after the context.
        every: Tokens between evictions while decoding.
        chunk_tokens: Tokens of a chunk.
        variants: Policies of this comparison alone: name -> a preset or its variant as in `snapkv:paper`,
            then `key=value` changes, e.g. `[snapkv, protection.sinks=0]`.
        protections: Other protections that every policy is measured under too: label -> `key=value` changes
            of `protection` or `scope`, e.g. `none: [protection.sinks=0, protection.prefix_fraction=0]`.
        task_settings: Task or group -> settings of it, e.g. `facts: {haystack: "file:TEXT"}`.
        chat: Whether a chat template is used, where tokenizer and task have one.
        template: More keyword arguments of the chat template.
        dtype: Of the model's weights, as torch calls it; "auto": as the checkpoint says.
        revision: Of a hub model.
        trust_remote_code: Run code that comes with the checkpoint.
        device_map: How the model is spread over devices, as transformers takes it ("auto"); `device` moves
            nothing then.
        device: Where the model runs: "cpu", "cuda" (under `accelerate launch` each process on its own GPU),
            or "auto".
        batch_items: Contexts that are read together; fewer take less memory, and more steps.
        max_sequences: Most sequences that are decoded together.
        baseline: Policy that the report compares every other one with; None: it compares each policy with
            gates to the best one without.
        margin_points: Difference that would not matter, in points of 100, for the verdict "equivalent".
        resamples: Sign flips of a paired test, at least.
        results: Folder of all runs.
    """

    run: str
    tasks: tuple[str, ...]
    policies: tuple[str, ...]
    model: str = MODEL
    keep_ratios: tuple[ProperShare, ...] = (0.1, 0.2)
    tokens_per_head: tuple[Annotated[int, Field(ge=2)], ...] = ()
    items_per_task: Many = 20
    first_item: Whole = 0
    seeds: tuple[Whole, ...] = (0,)
    context_tokens: Annotated[int, Field(ge=64, le=2**24)] = 1000
    gates: str = ""
    gate_sets: dict[str, str] = field(default_factory=dict)
    uses: dict[str, str] = field(default_factory=dict)
    allow_other_weights: bool = False
    when: tuple[When, ...] = ("prefill",)
    question: tuple[Question, ...] = ("unknown",)
    every: Count = 32
    chunk_tokens: Count = 256
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)
    protections: dict[str, tuple[str, ...]] = field(default_factory=dict)
    task_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    chat: bool = True
    template: dict[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    device_map: str | None = None
    device: str = "cpu"
    batch_items: Count = 8
    max_sequences: Count = 128
    baseline: str | None = None
    margin_points: Annotated[float, Field(ge=1e-6, le=100)] = 2.0
    resamples: Annotated[int, Field(ge=100, le=10**6)] = 5000
    results: str = "results"

    @property
    def folder(self) -> Path:
        """Folder of this run's results."""
        return Path(self.results) / self.run

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Stated budgets, without the full cache's."""
        ratios = (Budget(keep_ratio=ratio) for ratio in self.keep_ratios)
        return (*ratios, *(Budget(tokens_per_head=tokens) for tokens in self.tokens_per_head))


@dataclass(frozen=True)
class Candidate:
    """A policy, as the config names it, under a protection: "own" or a label of `protections`."""

    policy: str
    protection: str = PRESET

    @property
    def label(self) -> str:
        """Name in messages and of the resolved policy."""
        return self.policy if self.protection == PRESET else f"{self.policy}+{self.protection}"


FULL_CANDIDATE = Candidate(FULL)


def candidates_of(config: CompareConfig, when: str) -> tuple[Candidate, ...]:
    """Candidates that are measured at a time of eviction, without the full cache."""
    names = [name for name in config.policies if when == "prefill" or name not in CONTROLS]
    return tuple(Candidate(name, label) for label in (PRESET, *config.protections) for name in names)


def all_candidates(config: CompareConfig) -> tuple[Candidate, ...]:
    """Candidates of all times of eviction, each once."""
    return tuple(dict.fromkeys(one for when in config.when for one in candidates_of(config, when)))


def find_policy(config: CompareConfig, candidate: Candidate) -> Policy:
    """The policy of a candidate: a variant or a preset, under its protection. A control is the gate's
    pipeline, and its score stands in the gate's place.

    Raises:
        ValueError: There is no such policy, or it cannot be changed so.
    """
    name = candidate.policy
    parts = config.variants.get(name) or ("gate" if name in CONTROLS else name,)
    if candidate.protection != PRESET:
        parts = (*parts, *config.protections[candidate.protection])
    return _policy(candidate.label, tuple(parts))


@cache
def _policy(label: str, parts: tuple[str, ...]) -> Policy:
    return replace(load_policy(parts[0], parts[1:]), name=label, variants={})


def gate_users(config: CompareConfig) -> dict[str, str]:
    """Policies that take gates -> label of the set that each takes. Controls take none."""
    return {
        name: config.uses.get(name, GATES)
        for name in config.policies
        if name not in CONTROLS and find_policy(config, Candidate(name)).learned
    }


def budget_label(budget: Budget) -> str:
    """Name of a budget in the table."""
    if budget.keep_ratio is None:
        return f"tokens_per_head={budget.tokens_per_head}"
    return f"keep_ratio={budget.keep_ratio:g}"


def budget_for(budget: Budget, policy: Policy | None) -> Budget:
    """A budget as a policy takes it. For a policy that holds entries in fewer bytes a keep_ratio is a ratio
    of bytes, so that all policies hold equally many."""
    if policy is not None and policy.precision is not None and budget.keep_ratio is not None:
        return Budget(byte_ratio=budget.keep_ratio)
    return budget


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Device of this process's model.

    Args:
        name: "cpu", "cuda", "cuda:1" or "auto".
        local_rank: Number of the process on its machine.

    Raises:
        ValueError: It is no device, or there is none of that kind here.
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


# Options of `retain compare`: what a key is called, and that it is a list.
OPTIONS = {
    "--policies": ("policies", True),
    "--tasks": ("tasks", True),
    "--keep-ratios": ("keep_ratios", True),
    "--tokens-per-head": ("tokens_per_head", True),
    "--when": ("when", True),
    "--question": ("question", True),
    "--gates": ("gates", False),
    "--items": ("items_per_task", False),
    "--context-tokens": ("context_tokens", False),
    "--device": ("device", False),
    "--run": ("run", False),
}


class _Parser(argparse.ArgumentParser):
    """Takes `key=value` behind options too."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)


def compare_parser() -> argparse.ArgumentParser:
    """The command line of a comparison; its help lists every key with type, default and meaning."""
    parser = _Parser(
        os.path.relpath(sys.argv[0]),
        description="Compare KV-cache eviction policies at equal achieved memory.",
        epilog="Keys of a config:\n" + key_help(CompareConfig),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("given", nargs="*", metavar="MODEL or key=value", help="model, and other keys")
    parser.add_argument("--config", help="YAML, e.g. configs/compare/reference.yaml; options go over it")
    meanings = _meanings(CompareConfig)
    for option, (key, several) in OPTIONS.items():
        about = meanings[key].partition(". ")[0].rstrip(".")
        parser.add_argument(option, metavar="A,B" if several else "X", help=f"{key}: {about}")
    return parser


def config_of(given: argparse.Namespace) -> CompareConfig:
    """The config that a command line asks for.

    Raises:
        ValueError: With everything that does not fit.
        FileNotFoundError: There is no such file.
    """
    models = [word for word in given.given if "=" not in word]
    overrides = [f"model={json_of(name)}" for name in models]
    for option, (key, several) in OPTIONS.items():
        value = getattr(given, option.removeprefix("--").replace("-", "_"))
        if value is not None:
            overrides.append(f"{key}={'[' + value + ']' if several else value}")
    overrides += [word for word in given.given if "=" in word]
    if len(models) > 1:
        raise ValueError(f"one model is compared at a time, got {', '.join(models)}.")
    if given.config is not None:
        return load(given.config, CompareConfig, overrides)
    if models and given.run is None:
        overrides.insert(0, "run=" + re.sub(r"[^\w.-]+", "-", models[0]).strip("-."))
    if not overrides:
        raise ValueError(
            "nothing is said of what to compare: pass a model with --policies and --tasks, or --config FILE."
        )
    return build(nested(overrides), CompareConfig)


def json_of(text: str) -> str:
    """A text as YAML reads it back, whatever it holds."""
    return yaml.safe_dump(text, default_style='"').strip()


def nested(overrides: Sequence[str]) -> dict[str, Any]:
    """Mapping that `key.part=value` overrides describe, values read as YAML.

    Raises:
        ValueError: A value is no YAML, or a key is given a value and parts.
    """
    mapping: dict[str, Any] = {}
    for override in overrides:
        path, _, text = override.partition("=")
        *parents, last = path.split(".")
        inner = mapping
        for name in parents:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{override!r}: {name!r} has a value already, which is no mapping.")
        try:
            inner[last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{override!r} is no YAML: {error}") from error
    return mapping


def key_help(config: type[Any]) -> str:
    """Keys of a config with type, default and meaning, which the docstring's `Attributes` say."""
    about = _meanings(config)
    lines = []
    for one in fields(config):
        hint = str(one.type) if "[" in str(one.type) else getattr(one.type, "__name__", str(one.type))
        kind = re.sub(r"typing\.|Annotated\[(\w+), FieldInfo\(.*?\]\)\]", r"\1", hint)
        value = one.default_factory() if one.default_factory is not MISSING else one.default
        default = "required" if value is MISSING else f"default {value!r}"
        lines.append(f"  {one.name} ({kind}, {default})\n      {about.get(one.name, '')}")
    return "\n".join(lines)


def _meanings(config: type[Any]) -> Mapping[str, str]:
    _, _, attributes = (inspect.getdoc(config) or "").partition("Attributes:\n")
    pairs = re.findall(r"^    (\w+): ((?:.*\n?)(?:^        .*\n?)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in pairs}
