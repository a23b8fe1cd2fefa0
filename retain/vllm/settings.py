"""Reads settings of an engine and options of a request, and refuses policies that cannot be served.

Nothing here imports vLLM: settings are plain JSON, from `additional_config["retain"]` of the engine and the
flat extra arguments of a request (`retain.keep_ratio`, ...).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from retain.budget.statement import Budget
from retain.capability import problems
from retain.config import build
from retain.policy import Plan, Policy, load_policy, plan_of
from retain.shapes import LayerShape
from retain.vllm.packing.whole_pages import in_pages

# Extra arguments of a request all begin with this.
PREFIX = "retain."

# A sequence of at most so many tokens is held whole where its budget is too small, as in `retain.Cache`.
SHORT_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Options:
    """A budget, as a request or an engine states it; exactly one of the two.

    Args:
        keep_ratio: kept / seen of a prompt; at 1.0 it is served in full.
        tokens_per_head: entries per KV head.
    """

    keep_ratio: float | None = None
    tokens_per_head: int | None = None

    def __post_init__(self) -> None:
        _ = self.budget  # refuses what is none

    @property
    def budget(self) -> Budget:
        """The budget."""
        return Budget(self.keep_ratio, self.tokens_per_head)


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """Settings of an engine: `additional_config["retain"]`; its budget is that of requests that state none.

    Args:
        policy: a preset (`retain.policies()`) or the path of a YAML.
        overrides: of the policy, `key.sub=value`.
        gates: of a learned policy: a folder or a hub id.
        allow_other_weights: take gates whose base has other weights than the engine's model, as for a
            fine-tune.
    """

    policy: str = "learned"
    overrides: tuple[str, ...] = ()
    gates: str | None = None
    allow_other_weights: bool = False

    def load_policy(self) -> Policy:
        """The policy, with its overrides."""
        return load_policy(self.policy, self.overrides)


def settings_from(additional_config: Any) -> Settings | None:
    """Settings out of an engine's `additional_config`; None where it does not ask for this plug-in.

    Raises:
        ValueError: they do not fit; with all problems.
    """
    asked = additional_config.get("retain") if isinstance(additional_config, Mapping) else None
    if asked is None:
        return None
    settings = build(asked, Settings, "retain")
    policy = settings.load_policy()
    found = problems(policy, ["vllm"])
    if policy.learned and settings.gates is None:
        found.append("it takes gates: add 'gates', a folder or a hub id")
    elif settings.gates is not None and not policy.learned:
        found.append("it takes no gates: leave 'gates' out, or name a policy such as 'learned'")
    if found:
        raise ValueError(f"policy {settings.policy!r} cannot be served: {'; '.join(found)}.")
    return settings


def budget_of(settings: Settings, extra_args: Mapping[str, Any] | None) -> Budget:
    """The budget of a request's prompt.

    Args:
        settings: of the engine.
        extra_args: of the request; others than `retain.*` are left alone.

    Raises:
        ValueError: an unknown option, or one that does not fit; with all problems.
    """
    given = extra_args or {}
    stated = {str(name)[len(PREFIX) :]: given[name] for name in given if str(name).startswith(PREFIX)}
    if not stated:
        return settings.budget
    try:
        return build(stated, Options, "retain").budget
    except ValueError as error:
        raise ValueError(f"options of the request do not fit: {' '.join(str(error).split())}") from None


@dataclass(frozen=True)
class Rules:
    """A policy on the layers of one engine, without their tensors.

    Args:
        policy: the policy.
        page: entries of a block.
        shapes: of each layer that evicts, here.
    """

    policy: Policy
    page: int
    shapes: Sequence[LayerShape]

    @cached_property
    def window(self) -> int:
        """Last queries of a prompt that the policy observes."""
        return self.policy.window

    def plan(self, seen: int, budget: Budget) -> Plan:
        """The plan of a request of so many tokens, before any layer is scored.

        One that is shorter than the policy's observation window is held whole, and one of at most
        `SHORT_TOKENS` tokens whose budget cannot hold what is protected.

        Raises:
            ValueError: the budget cannot hold what is protected.
        """
        valid_BT = torch.ones(1, seen, dtype=torch.bool)
        plan = plan_of(self.policy, budget, valid_BT, self.shapes, short_tokens=SHORT_TOKENS)
        plan = plan.hold_whole([0], valid_BT) if seen < self.window else plan
        return in_pages(plan, self.page)

    def kept(self, seen: int, budget: Budget) -> int:
        """Pages a head, in the mean, that a budget keeps of a request's full ones.

        Raises:
            ValueError: as `plan`.
        """
        totals = self.plan(seen, budget).totals
        return (seen if self.policy.keeps_all else totals.total_B[0] // sum(totals.heads_L)) // self.page
