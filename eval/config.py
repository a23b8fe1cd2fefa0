"""The config of a comparison: a grid of policies, protections, budgets, settings, tasks and seeds.

A YAML file, or options of `retain compare`, and `key=value` overrides become a `CompareConfig`. Whether it
can work is checked by `retain.eval.run.checks` before anything is measured.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from retain.attention.head_weights import read_weights
from retain.budget.statement import Budget
from retain.config import Count, Many, ProperShare, Whole, key_help, load, meanings_of
from retain.presets import Policy, load_policy

When = Literal["prefill", "chunk", "decode", "prefill+decode", "chunk+decode"]
Question = Literal["unknown", "known"]
# Label of the full cache, which is always measured, and its budget.
FULL = "full"
FULL_BUDGET = Budget(keep_ratio=1.0)
# Policies that no one could have at inference: they need to know the future.
CONTROLS = ("oracle",)
# Label of a policy's protection where it is the one of its preset.
PRESET = "own"
MODEL = "reference:0"
# Begins a variant's change of where its gates come from.
GATES = "gates="
# Where gates come from that no setting names.
SHIPPED = "those that ship"
AT_LEAST_ONE = Field(min_length=1)
# Configs that ship, in a checkout and in a wheel.
_PACKAGED = Path(__file__).parent.parent / "comparisons"
CONFIGS = _PACKAGED if _PACKAGED.is_dir() else _PACKAGED.parent / "configs" / "compare"


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
        first_item: Number of the first row: a choice made on low numbers can be confirmed on others.
        seeds: Seeds of the rows.
        context_tokens: Length of a context in tokens; of natural text the most that it may have.
        gates: Folder or hub id of the gates that policies take; empty: those that ship for the model.
        allow_other_weights: Take gates whose base has other weights than the model, as for a fine-tune of it.
        when: When entries are evicted: "prefill" (once, behind the prompt), "chunk" (behind each chunk),
            "decode" (every `every` tokens), "prefill+decode" or "chunk+decode".
        question: Whether an eviction behind the prompt has seen the question: "known", "unknown" or both.
        every: Tokens between evictions while decoding.
        chunk_tokens: Tokens of a chunk.
        variants: Policies of this comparison alone: name -> a preset or its variant as in `snapkv:paper`,
            then `key=value` changes, e.g. `[snapkv, protection.sinks=0]`, or `[learned, gates=runs/other]`.
        protections: Other protections that every policy is measured under too: label -> `key=value` changes
            of `protection` or `scope`, e.g. `none: [protection.sinks=0, protection.prefix_fraction=0]`.
        task_settings: Task or group -> settings of it, e.g. `facts: {haystack: "file:TEXT"}`.
        chat: Whether a chat template is used, where tokenizer and task have one.
        dtype: Of the model's weights, as torch calls it; "auto": as the checkpoint says.
        revision: Of a hub model.
        trust_remote_code: Run code that comes with the checkpoint.
        device_map: How the model is spread over devices ("auto"), in place of `device`.
        device: Where the model runs: "cpu", "cuda" (each process on one GPU), or "auto".
        max_sequences: Most candidates that are decoded together; fewer take less memory, and more steps.
        baseline: Policy that the report compares every other one with; None: it compares each policy with
            gates to the best one without.
        margin_points: Difference that would not matter, in points of 100, for the verdict "equivalent".
        resamples: Sign flips of a paired test, at least.
        results: Folder of all runs.
    """

    run: str
    tasks: Annotated[tuple[str, ...], AT_LEAST_ONE]
    policies: Annotated[tuple[str, ...], AT_LEAST_ONE]
    model: str = MODEL
    keep_ratios: tuple[ProperShare, ...] = (0.1, 0.2)
    tokens_per_head: tuple[Annotated[int, Field(ge=2)], ...] = ()
    items_per_task: Many = 20
    first_item: Whole = 0
    seeds: Annotated[tuple[Whole, ...], AT_LEAST_ONE] = (0,)
    context_tokens: Annotated[int, Field(ge=64, le=2**24)] = 1000
    gates: str = ""
    allow_other_weights: bool = False
    when: Annotated[tuple[When, ...], AT_LEAST_ONE] = ("prefill",)
    question: Annotated[tuple[Question, ...], AT_LEAST_ONE] = ("unknown",)
    every: Count = 32
    chunk_tokens: Count = 256
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)
    protections: dict[str, tuple[str, ...]] = field(default_factory=dict)
    task_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    chat: bool = True
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    device_map: str | None = None
    device: str = "cpu"
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
    """The policy of a candidate: a variant or a preset, under its protection; a control is the gate's
    pipeline. ValueError: there is no such policy, or it cannot be changed so."""
    protection = config.protections[candidate.protection] if candidate.protection != PRESET else ()
    name, *changes = (part for part in _parts(config, candidate.policy) if not part.startswith(GATES))
    return replace(load_policy(name, [*changes, *protection]), name=candidate.label, variants={})


def _parts(config: CompareConfig, name: str) -> tuple[str, ...]:
    return config.variants.get(name) or ("gate" if name in CONTROLS else name,)


def policy_settings(policy: Policy) -> dict[str, Any]:
    """Settings that decide which entries a policy keeps; files by what they hold, not by where they are."""
    settings = asdict(replace(policy, paper="", evaluated="any", variants={}))
    if (path := policy.weights) is not None:
        settings["allocation"]["weights"] = {str(layer): [*row] for layer, row in read_weights(path).items()}
    if (path := settings["observed_settings"].get("centres")) is not None:
        settings["observed_settings"]["centres"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return settings


def gates_identity(gates: Any) -> dict[str, Any] | None:
    """Metadata of gates that decides their scores; None without gates."""
    names = ("sha256", "family", "layers", "inputs", "unit")
    return None if gates is None else {name: gates.metadata.get(name) for name in names}


def gates_of(config: CompareConfig, name: str) -> str | None:
    """Where a policy's gates come from; None if it takes none, as controls do."""
    if name in CONTROLS or not find_policy(config, Candidate(name)).learned:
        return None
    stated = [part.removeprefix(GATES) for part in _parts(config, name) if part.startswith(GATES)]
    return [config.gates or SHIPPED, *stated][-1]


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
    """Device ("cpu", "cuda", "cuda:1" or "auto") of the model of the process `local_rank` of a machine.

    Raises:
        ValueError: It is no device, or there is none of that kind here.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        device = torch.device(kind)
    except RuntimeError:
        raise ValueError(f"device is {name!r}, and must be 'cpu', 'cuda', 'cuda:1', or 'auto'.") from None
    if device.type == "cuda":
        if (device.index or 0) >= (count := torch.cuda.device_count()):
            raise ValueError(f"device is {name!r}, and torch sees {count} GPUs: take device=cpu, or auto.")
        if ":" not in kind:
            device = torch.device("cuda", local_rank % count)
    return device


# Keys that are options of `retain compare` too: lists, as A,B, and single values.
LISTS = ("policies", "tasks", "keep_ratios", "tokens_per_head", "when", "question")
SINGLE = ("gates", "items_per_task", "context_tokens", "device", "run")


def compare_parser() -> argparse.ArgumentParser:
    """The command line of a comparison, for `parse_intermixed_args`; its help lists every key with type,
    default and meaning."""
    about = meanings_of(CompareConfig)
    parser = argparse.ArgumentParser(
        os.path.relpath(sys.argv[0]),
        description="Compare KV-cache eviction policies at equal achieved memory.",
        epilog="\n  ".join(["Keys of a config (type; default): meaning", *key_help(CompareConfig)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="MODEL or key=value", help="model, and other keys")
    configs = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    parser.add_argument("--config", metavar="YAML", help=f"a file, or one that ships: {configs}")
    for key in (*LISTS, *SINGLE):
        meaning = about[key].partition(". ")[0].rstrip(".")
        parser.add_argument(
            f"--{key.replace('_', '-')}", metavar="A,B" if key in LISTS else "X", help=meaning
        )
    return parser


def config_of(given: argparse.Namespace, check: Callable[[Any], object] | None = None) -> CompareConfig:
    """The config that a command line asks for; a ValueError with everything that does not fit."""
    models = [word for word in given.words if "=" not in word]
    if len(models) > 1:
        raise ValueError(f"one model is compared at a time, got {', '.join(models)}.")
    changes = [f"model={json.dumps(name)}" for name in models]
    if models and given.config is None:
        changes.append(f"run={json.dumps(re.sub(r'[^-.0-9A-Z_a-z]+', '-', models[0]).strip('-.'))}")
    stated = ((key, getattr(given, key)) for key in (*LISTS, *SINGLE))
    changes += [f"{key}=[{x}]" if key in LISTS else f"{key}={x}" for key, x in stated if x is not None]
    changes += [word for word in given.words if "=" in word]
    if given.config is None and not changes:
        raise ValueError("state a model with --policies and --tasks, or --config YAML; --help says more.")
    path = given.config
    if path is not None and (CONFIGS / f"{path}.yaml").is_file():
        path = CONFIGS / f"{path}.yaml"
    return load(path, CompareConfig, changes, check=check)
