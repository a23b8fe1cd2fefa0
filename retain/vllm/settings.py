"""What an engine is asked to serve: settings of the engine, options of a request, and what cannot be served.

Nothing here imports vLLM: settings are plain JSON, from `additional_config["retain"]` of the engine and the
flat extra arguments of a request (`retain.keep_ratio`, ...).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from retain.budget.allocation import Allocation
from retain.budget.statement import Budget, LayerShape
from retain.config import build, plain_numbers
from retain.gates.base import GateSet
from retain.gone import hint_of
from retain.policy import Plan, Policy, load_policy, plan_of
from retain.registry import suggest
from retain.scores import SCORES
from retain.scores.trial import entries_read
from retain.vllm.packing.whole_pages import in_pages

# Extra arguments of a request all begin with this.
PREFIX = "retain."
OPTIONS = ("keep_ratio", "tokens_per_head", "seed", "off")

# What gates may look at: all that a step of the engine shows of its own tokens.
SEEN = frozenset({"hidden", "queries", "keys", "values", "queries_before", "keys_before"})

# A policy that cannot be served -> the nearest one that can.
NEAREST = {
    "h2o": "snapkv",
    "lru": "tova",
    "lazy_eviction": "tova",
    "keyformer": "snapkv",
    "expected_attention": "keydiff",
    "triattention": "keydiff",
}

# A sequence of at most so many tokens is held whole where its budget is too small, as in `retain.Cache`.
SHORT_TOKENS = 256


@dataclass(frozen=True)
class Settings:
    """Settings of an engine: `additional_config["retain"]`.

    Args:
        policy: a preset (`retain.policies()`) or the path of a YAML.
        overrides: of the policy, `key.sub=value`.
        gates: of a learned policy: a folder or a hub id.
        allow_other_weights: take gates whose base has other weights than the engine's model, as for a
            fine-tune.
        keep_ratio: kept / seen of every prompt, unless its request says otherwise.
        tokens_per_head: entries per KV head, in place of `keep_ratio`.
    """

    policy: str = "fused"
    overrides: tuple[str, ...] = ()
    gates: str | None = None
    allow_other_weights: bool = False
    keep_ratio: float | None = None
    tokens_per_head: int | None = None

    def load_policy(self) -> Policy:
        """The policy, with its overrides."""
        return load_policy(self.policy, self.overrides)

    @property
    def stated(self) -> str:
        """The budget of a request that states none, in words."""
        own = {name: getattr(self, name) for name in ("keep_ratio", "tokens_per_head")}
        return " ".join(f"{name} {value}" for name, value in own.items() if value is not None)

    @property
    def budget(self) -> Budget:
        """The budget of a request that states none."""
        return Budget(keep_ratio=self.keep_ratio, tokens_per_head=self.tokens_per_head)


def settings_from(additional_config: Any) -> Settings | None:
    """Settings out of an engine's `additional_config`; None where it does not ask for this plug-in.

    Raises:
        ValueError: they do not fit; with all problems.
    """
    asked = additional_config.get("retain") if isinstance(additional_config, Mapping) else None
    if asked is None:
        return None
    if not isinstance(asked, Mapping):
        raise ValueError(
            f"additional_config['retain'] holds settings, such as {{'policy': 'snapkv', 'keep_ratio': 0.2}}; "
            f"got {asked!r}."
        )
    settings = build(plain_numbers(dict(asked)), Settings, "retain")
    try:
        _ = settings.budget
    except ValueError as error:
        raise ValueError(
            f"additional_config['retain'] states the budget of requests that state none: {error}"
        ) from None
    problems = problems_of_policy(settings.load_policy(), settings.gates)
    if problems:
        raise ValueError(f"policy {settings.policy!r} cannot be served: {'; '.join(problems)}.")
    return settings


def problems_of_ranks(policy: Policy) -> list[str]:
    """List what a policy states for each head of the model, where a rank has some of them."""
    if policy.allocation.weights is None:
        return []
    return [
        "allocation.weights is stated for all heads of the model, of which a rank has some: take "
        "tensor_parallel_size 1, or leave it out"
    ]


def problems_of_policy(policy: Policy, gates: str | None = None) -> list[str]:
    """List why a policy cannot decide from what the engine shows of a prompt: its keys and values, and the
    queries of its last tokens."""
    problems = []
    if policy.observed is not None:
        needs = SCORES[policy.observed].needs_with(policy.observed_settings)
        nearest = NEAREST.get(policy.observed, "snapkv")
        if all_queries := sorted({"queries", "running"} & needs):
            problems.append(
                f"its score {policy.observed!r} reads {' and '.join(all_queries)} of all tokens, and the "
                f"engine keeps the queries of the last ones only: take {nearest!r}"
            )
        elif "rotary" in needs:
            problems.append(
                f"its score {policy.observed!r} reads frequencies of RoPE, and the engine shows tables "
                f"alone: take {nearest!r}"
            )
    if policy.correction is not None:
        problems.append("its correction changes values, which packing does not do yet: set correction=null")
    if policy.precision is not None:
        problems.append("the engine holds entries in its own types: set precision=null")
    if policy.learned and gates is None:
        problems.append("it takes gates: add 'gates', a folder or a hub id")
    if gates is not None and not policy.learned:
        problems.append("it takes no gates: leave 'gates' out, or name a policy such as 'fused'")
    return problems


def problems_of_gates(gates: GateSet, *, ranks: int = 1, rotary: bool = True) -> list[str]:
    """List why gates cannot score what a step of the engine shows of its own tokens.

    Args:
        gates: loaded.
        ranks: of tensor parallelism, each of which has some of the heads.
        rotary: whether the model's rotary embedding is understood.
    """
    problems = []
    if gates.contextual or gates.extension is not None:
        problems.append(
            f"gates of family {gates.family!r} look from one token at others, and a prompt comes in chunks: "
            "take 'linear', 'mlp', 'lowrank', 'qkv' or 'decay'"
        )
    elif unseen := sorted(gates.inputs - SEEN):
        problems.append(
            f"gates of family {gates.family!r} look at {', '.join(unseen)}, which the engine does not show: "
            f"take gates that look at some of {', '.join(sorted(SEEN))}"
        )
    elif "hidden" in gates.inputs and len(gates.inputs) > 1:
        problems.append(
            f"gates of family {gates.family!r} look at {', '.join(sorted(gates.inputs))} together, and the "
            "engine shows hidden states apart from queries, keys and values: take gates that look at either"
        )
    elif "hidden" not in gates.inputs and ranks > 1:
        problems.append(
            f"gates of family {gates.family!r} look at all heads, of which each of {ranks} ranks has some: "
            "take tensor_parallel_size 1, or gates that look at hidden states"
        )
    elif gates.ages and gates.calibrators and ranks > 1:
        problems.append(
            f"gates of family {gates.family!r} are calibrated by the age of entries, all heads at once: take "
            "tensor_parallel_size 1, or gates without calibrators"
        )
    elif {"queries_before", "keys_before"} & gates.inputs and not rotary:
        problems.append(
            f"gates of family {gates.family!r} look at queries and keys before RoPE, and this model's rotary "
            "embedding is not understood: take gates with rope 'after'"
        )
    return problems


def reads_output(policy: Policy) -> bool:
    """Whether a policy's score looks at the output projection."""
    name, settings = policy.observed, policy.observed_settings
    return name is not None and "output_weight" in entries_read(name, settings)


@dataclass(frozen=True)
class Options:
    """Options of one request.

    Args:
        budget: of its prompt; None: the request is served in full.
        seed: of the policy's draw.
    """

    budget: Budget | None
    seed: int = 0


def options_of(settings: Settings, extra_args: Mapping[str, Any] | None, seed: int | None) -> Options:
    """Options out of the extra arguments of a request.

    Args:
        settings: of the engine.
        extra_args: of the request; others than `retain.*` are left alone.
        seed: of the request's sampling, which seeds the draw too unless `retain.seed` does.

    Raises:
        ValueError: an unknown option, or one that does not fit; with all problems.
    """
    stated = {
        name.removeprefix(PREFIX): value
        for name, value in (extra_args or {}).items()
        if isinstance(name, str) and name.startswith(PREFIX)
    }
    problems = [
        f"there is no option {PREFIX}{name}{hint_of(PREFIX + name) or suggest(name, OPTIONS)}"
        for name in stated
        if name not in OPTIONS
    ]
    off = _flag(stated.get("off", False))
    if off is None:
        problems.append(f"{PREFIX}off is true or false; got {stated['off']!r}")
    own = stated.get("seed", seed)
    if own is not None and (isinstance(own, bool) or not isinstance(own, int)):
        problems.append(f"{PREFIX}seed is a whole number; got {own!r}")
    budget = None
    amounts = {name: stated[name] for name in ("keep_ratio", "tokens_per_head") if name in stated}
    for name, value in amounts.items():
        amounts[name] = _number(value, whole=name == "tokens_per_head")
        if amounts[name] is None:
            kind = "whole number" if name == "tokens_per_head" else "number"
            problems.append(f"{PREFIX}{name} is a {kind}; got {value!r}")
    try:
        if None not in amounts.values():
            budget = Budget(**amounts) if amounts else settings.budget
    except ValueError as error:
        problems.append(str(error).rstrip("."))
    if problems:
        raise ValueError(f"options of the request do not fit: {'; '.join(problems)}.")
    return Options(None if off else budget, own or 0)


def _number(value: Any, *, whole: bool) -> float | int | None:
    """A number as JSON, or a client that sends text, writes it; None if it is none."""
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    if number is None or not math.isfinite(number):
        return None
    if not whole:
        return number
    return int(number) if number.is_integer() else None


def _flag(value: Any) -> bool | None:
    """A flag as JSON, or an HTTP client that sends numbers and text alone, writes it; None if it is none."""
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.lower())
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


@dataclass(frozen=True, eq=False)
class Rules:
    """A policy on the layers of one engine, without their tensors.

    Args:
        policy: the policy.
        page: entries of a block.
        heads_L: KV heads of each layer that evicts, here.
        entry_bytes: bytes of one key and value.
        parts: processes that have as many heads each of the model's (tensor parallelism).
    """

    policy: Policy
    page: int
    heads_L: tuple[int, ...]
    entry_bytes: int
    parts: int = 1

    @cached_property
    def last_resort(self) -> "Rules":
        """Rules that need no score, and keep as many pages of a request: the last entries of every head.

        They stand in where a request's own scores are not finite: blocks that were announced to be free have
        to be, and one request may not stop an engine.
        """
        policy = replace(
            self.policy,
            observed="recency",
            observed_settings={},
            learned=False,
            fusion=None,
            floor=None,
            scope="head",
            first_stage=None,
            draw=None,
            allocation=Allocation(),
        )
        return replace(self, policy=policy)

    @cached_property
    def window(self) -> int:
        """Last queries of a prompt that the policy observes."""
        if self.policy.observed is None:
            return 0
        needs = SCORES[self.policy.observed].needs_with(self.policy.observed_settings)
        return max(int("window" in needs), self.policy.window)

    def plan(self, seen: int, budget: Budget) -> Plan:
        """What is settled about a request before any layer is scored.

        One that is shorter than the policy's observation window is held whole, and one of at most
        `SHORT_TOKENS` tokens whose budget cannot hold what is protected.

        Args:
            seen: its tokens.
            budget: of them.

        Raises:
            ValueError: the budget cannot hold what is protected.
        """
        valid_BT = torch.ones(1, seen, dtype=torch.bool)
        shapes = [LayerShape(heads, self.entry_bytes, self.parts) for heads in self.heads_L]
        plan = plan_of(self.policy, budget, valid_BT, shapes, short_tokens=SHORT_TOKENS)
        plan = plan.hold_whole([0], valid_BT) if seen < self.window else plan
        return in_pages(plan, self.page)

    @lru_cache(maxsize=4096)  # noqa: B019 - one object an engine
    def kept(self, seen: int, budget: Budget) -> int:
        """Pages a head, in the mean, that a budget keeps of a request's full ones.

        It goes by the request's length alone, so that scheduler and workers agree.

        Raises:
            ValueError: as `plan`.
        """
        totals = self.plan(seen, budget).shares.totals
        whole = self.policy.keeps_all
        return (seen if whole else totals.total_B[0] // sum(totals.heads_L)) // self.page
