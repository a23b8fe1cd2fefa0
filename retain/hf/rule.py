"""What a cache keeps: the policy, the budget and the gates that a user named, resolved once into one
function.

In: names and numbers as typed. Out: a `Rule`, whose `keep(evidence, seeds)` gives one layer's keep mask. The
one decision taken here: everything that can be wrong about the request is found when the cache is made,
before any token is read.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool
from torch import Tensor, nn

from retain.evidence import Evidence
from retain.registry import suggest

Keep = Bool[Tensor, "B H T"]


@dataclass(frozen=True, eq=False)
class Rule:
    """How one layer's evidence becomes a keep mask.

    Args:
        name: for reports.
        keep: `(evidence, seeds per sequence or None) -> keep_BHT`; None keeps everything.
    """

    name: str
    keep: Callable[[Evidence, Sequence[int] | None], Keep] | None = None


def make_rule(
    model: nn.Module,
    policy: Any,
    *,
    num_layers: int,
    keep_ratio: float | None = None,
    tokens_per_head: int | None = None,
    num_bytes: int | None = None,
    gates: Any = None,
    overrides: dict[str, Any] | None = None,
) -> Rule:
    """Resolve a request.

    Args:
        model: whose cache it is (gates are checked against it).
        policy: a preset's name, a path to a YAML, a `Policy`, a function `evidence -> keep_BHT`, or None
            (keep all).
        num_layers: layers that share a budget in bytes.
        keep_ratio: kept / seen.
        tokens_per_head: entries per KV head.
        num_bytes: bytes of keys and values per sequence, over all layers.
        gates: a `GateSet`, or a path or hub id of one.
        overrides: fields of the policy to replace.

    Raises:
        ValueError: unknown policy or field, no budget or several, a learned policy without gates.
    """
    stated = {"keep_ratio": keep_ratio, "tokens_per_head": tokens_per_head, "bytes": num_bytes}
    given = [name for name, value in stated.items() if value is not None]
    from_policies = policy is not None and (
        isinstance(policy, str | os.PathLike) or dataclasses.is_dataclass(policy)
    )
    if not from_policies:
        name = "everything" if policy is None else getattr(policy, "__name__", type(policy).__name__)
        if given or overrides:
            extra = ", ".join([*given, *(overrides or {})])
            raise ValueError(
                f"{extra} can only be given with a named policy; policy is {policy!r}, which decides alone."
            )
        if policy is None:
            return Rule(name)
        if not callable(policy):
            raise ValueError(
                f"policy is a name, a path, a Policy or a function of the evidence; got {policy!r}."
            )
        return Rule(name, lambda evidence, seeds: policy(evidence))

    from retain.budget import Budget, layer_budget
    from retain.policy import Policy, decide, load_policy

    chosen: Policy = policy if isinstance(policy, Policy) else load_policy(policy)
    if overrides:
        known = [field.name for field in dataclasses.fields(chosen)]
        unknown = [name for name in overrides if name not in known]
        if unknown:
            hints = ", ".join(f"{name}{suggest(name, known)}" for name in unknown)
            raise ValueError(
                f"unknown setting of Cache and of policy {chosen.name!r}: {hints}. Known: {', '.join(known)}."
            )
        chosen = dataclasses.replace(chosen, **overrides)
    if chosen.observed is None and not chosen.learned:
        return Rule(chosen.name)
    budget = Budget(keep_ratio=keep_ratio, tokens_per_head=tokens_per_head, bytes=num_bytes)
    if chosen.learned and gates is None:
        raise ValueError(
            f"policy {chosen.name!r} needs gates: pass gates='path or hub id' (train/distill.py makes them), "
            "or choose a "
            "training-free policy such as 'snapkv'."
        )
    if isinstance(gates, str | os.PathLike):
        from retain.hf.gates import load_gates

        gates = load_gates(gates, model)

    def keep(evidence: Evidence, seeds: Sequence[int] | None) -> Keep:
        entry_bytes = 2 * evidence.keys_BHTD.shape[-1] * evidence.keys_BHTD.element_size()
        share = layer_budget(budget, evidence.layer_idx, num_layers, entry_bytes)
        learned = gates.score(evidence) if chosen.learned else None
        return decide(chosen, evidence, share, learned=learned, seeds_B=seeds).keep_BHT

    return Rule(chosen.name, keep)
