"""What a cache keeps: the policy, the budget and the gates that a user named, resolved once into one
function.

In: names and numbers as typed. Out: a `Rule`, whose `keep(evidence, seeds)` gives one layer's keep mask. The
one decision taken here: everything that can be wrong about the request is found when the cache is made,
before any token is read.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Bool
from torch import Tensor, nn

from retain.evidence import Evidence
from retain.registry import suggest

if TYPE_CHECKING:
    from retain.policy import Policy

Keep = Bool[Tensor, "B H T"]
# Settings of `Cache` itself, near which a misspelt one may lie.
KEYWORDS = ("keep_ratio", "tokens_per_head", "bytes", "gates", "seeds", "slack")


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
        overrides: fields of the policy to replace; a section given as a mapping is merged into the policy's.

    Raises:
        ValueError: unknown policy, fields that do not fit it (all at once), no budget or several, a learned
            policy without gates, with gates of another model, or with gates that were never trained on
            entries which it may evict.
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
        chosen = _overridden(chosen, overrides)
    _check_settings(chosen)
    if chosen.observed is None and not chosen.learned:
        return Rule(chosen.name)
    budget = Budget(keep_ratio=keep_ratio, tokens_per_head=tokens_per_head, bytes=num_bytes)
    if chosen.learned and gates is None:
        raise ValueError(
            f"policy {chosen.name!r} needs gates: pass gates='path or hub id' (train/distill.py makes them), "
            "or choose a "
            "training-free policy such as 'snapkv'."
        )
    if gates is not None:
        from retain.hf.gates import gates_for

        gates = gates_for(model, gates)
    # What else scores in a gate's place (a control of an evaluation) may have no metadata.
    window = (getattr(gates, "metadata", {}).get("protected_window") or 0) if chosen.learned else 0
    if window > chosen.protection.recent:
        raise ValueError(
            f"policy {chosen.name!r} protects the last {chosen.protection.recent} entries, and its gates "
            f"were trained for a protected window of {window}: of nearer entries they know nothing. Wanted: "
            f"protection.recent of at least {window}. Set protection.recent={window}, or train gates with a "
            f"smaller target.horizon (at most {chosen.protection.recent})."
        )

    def keep(evidence: Evidence, seeds: Sequence[int] | None) -> Keep:
        entry_bytes = 2 * evidence.keys_BHTD.shape[-1] * evidence.keys_BHTD.element_size()
        share = layer_budget(budget, evidence.layer_idx, num_layers, entry_bytes)
        learned = gates.score(evidence) if chosen.learned else None
        return decide(chosen, evidence, share, learned=learned, seeds_B=seeds).keep_BHT

    return Rule(chosen.name, keep)


def _overridden(policy: "Policy", overrides: dict[str, Any]) -> "Policy":
    """The policy with these fields replaced, checked as its YAML would be.

    Settings belong to a score: where the override names another score, the policy's own are left behind.
    """
    from retain import config
    from retain.policy import Policy

    mapping = config.to_mapping(policy)
    if overrides.get("observed", policy.observed) != policy.observed:
        mapping["observed_settings"] = {}
    for name, value in overrides.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = config.to_mapping(value)
        merged = isinstance(value, Mapping) and isinstance(mapping.get(name), dict)
        mapping[name] = {**mapping[name], **value} if merged else value
    try:
        return config.build(mapping, Policy)
    except ValueError as error:
        near = [f"{name!r}{suggest(name, KEYWORDS)}" for name in overrides if not hasattr(policy, name)]
        also = "".join(f"\n  - of Cache itself: {hint}" for hint in near if "did you mean" in hint)
        problems = str(error).partition("\n")[2]
        raise ValueError(f"unfit settings of Cache or of policy {policy.name!r}:\n{problems}{also}") from None


def _check_settings(policy: "Policy") -> None:
    """What can be known of a score's settings before there is evidence."""
    settings, problems = policy.observed_settings, []
    for name in ("window", "pool_size"):
        value = settings.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{name} is a whole number of at least 1, got {value!r}")
        elif name == "pool_size" and value % 2 == 0:
            problems.append(f"pool_size is odd, so that the pool is centred, got {value!r}")
    if settings.get("pool") not in (None, "avg", "max"):
        problems.append(f"pool is 'avg', 'max' or None, got {settings['pool']!r}")
    if problems:
        raise ValueError(f"observed_settings of policy {policy.name!r}: {'; '.join(problems)}.")
