"""Binds a policy, a budget and gates, as a user named them, to a model (`BoundPolicy`), and checks what is
stated for a batch: seeds, pinned spans.

Everything that can be wrong about the request is found when the cache is made, before any token is read.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from retain import config
from retain.attention.head_weights import check_weights
from retain.budget.statement import Budget
from retain.capability import Use, check_gates, refuse
from retain.eviction import BoundPolicy, Scorer
from retain.hf.model.decoder import rotary_of
from retain.hf.model.layout import LayerSpec
from retain.models.named_gates import gates_for, shipped_gates
from retain.policy import check_budget
from retain.presets import Policy, load_policy
from retain.process.registry import check_choice, suggest
from retain.protection import spans_by_sequence
from retain.scores.triattention import stored_centres

# Settings of `Cache` itself, near which a misspelt one may lie.
KEYWORDS = (
    *("keep_ratio", "tokens_per_head", "bytes", "byte_ratio", "threshold", "when", "every"),
    *("gates", "seeds", "pinned", "short"),
)
# Tokens up to which a sequence that the policy cannot evict from within its budget is held whole, by what
# `Cache` is told (`short=`).
SHORT = {"keep": 256, "raise": 0}


def bind_policy(
    model: nn.Module,
    policy: Any,
    *,
    layers: Sequence[LayerSpec],
    budget: Mapping[str, Any],
    gates: Any = None,
    pinned: Any = None,
    overrides: Mapping[str, Any] | None = None,
    short: str = "raise",
) -> BoundPolicy:
    """Resolve a request.

    Args:
        model: whose cache it is (gates are checked against it).
        policy: a preset's name, a path to a YAML, a `Policy`, a function `evidence -> keep_BHT`, or None
            (keep all).
        layers: those that evict.
        budget: as for `retain.budget.statement.Budget`; None is not stated.
        gates: a `GateSet`, or a path or hub id of one.
        pinned: spans that the caller wants kept; only their form is looked at here.
        overrides: fields of the policy to replace; a section given as a mapping is merged into the policy's;
            `observed` may be a function `evidence -> Score`, which then stands in for the policy's score.
        short: `keep` or `raise` (`SHORT`).

    Raises:
        ValueError: unknown policy, fields that do not fit it (all at once), no budget or several, a learned
            policy without gates, with gates of another model, or with gates that were never trained on
            entries which it may evict; weights of another model's heads.
    """
    check_choice("short", short, list(SHORT))
    stated = {name: value for name, value in budget.items() if value is not None}
    overrides = dict(overrides or {})
    if not isinstance(policy, str | os.PathLike | Policy):
        return _bind_function(policy, [*stated, *overrides], gates=gates, pinned=pinned)

    chosen: Policy = policy if isinstance(policy, Policy) else load_policy(os.fspath(policy))
    scorer: Scorer | None = overrides.pop("observed") if callable(overrides.get("observed")) else None
    problems, keep = [], Budget(keep_ratio=1.0)
    try:
        chosen = _overridden(chosen, overrides) if overrides else chosen
    except ValueError as error:
        problems.append(str(error))
    try:
        # A policy that keeps everything needs none, but one that is stated must be one.
        keep = Budget(**stated) if stated or not chosen.keeps_all or scorer is not None else keep
        if stated:
            # The unit of a gate is asked below, once it is loaded.
            unknown = scorer is not None or (chosen.learned and chosen.fusion != "rank_blend")
            check_budget(chosen, keep, None if unknown else chosen.unit)
        if pinned is not None:
            spans_by_sequence(pinned)
    except ValueError as error:
        problems.append(str(error))
    if gates is not None and not chosen.learned:
        problems.append(
            f"gates would not be read: policy {chosen.name!r} takes none. Leave them out, or name a policy "
            "that takes gates, such as 'learned' or 'gate'."
        )
    if problems:
        raise ValueError("\n".join(problems))
    if chosen.keeps_all and scorer is None:
        return BoundPolicy(chosen.name, precision=chosen.precision)
    if chosen.learned:
        gates = shipped_gates(model, chosen.name) if gates is None else gates_for(model, gates)
        check_gates(chosen, keep, gates, scored_elsewhere=scorer is not None)
    rope: tuple[Use, ...] = ("unknown_rope",) if rotary_of(model) is None else ()
    refuse(chosen, rope, gates=gates, scorer=scorer)
    if (centres := chosen.observed_settings.get("centres")) is not None:
        for layer in layers:
            stored_centres(centres, layer.layer_idx, layer.num_heads, layer.head_dim)
    if (weights := chosen.weights) is not None:
        check_weights(
            weights, [layer.num_kv_heads for layer in layers], [layer.layer_idx for layer in layers]
        )
    sizes = tuple((layer.num_kv_heads, layer.entry_width) for layer in layers)
    parts = chosen, keep, gates, scorer, sizes, SHORT[short]
    return BoundPolicy(chosen.name, *parts, precision=chosen.precision)


def _bind_function(policy: Any, extra: Sequence[str], **asked: Any) -> BoundPolicy:
    """Bind a function of the evidence, or None, which keeps everything; neither reads settings.

    Args:
        policy: the function, or None.
        extra: names of budgets and policy settings that were given.
        **asked: what else was given; None is not.

    Raises:
        ValueError: something was given that would not be read, or the policy is no policy.
    """
    if policy is not None and not callable(policy):
        raise ValueError(f"policy is a name, a path, a Policy or a function of the evidence; got {policy!r}.")
    name = "everything" if policy is None else getattr(policy, "__name__", type(policy).__name__)
    given = [] if policy is None else [key for key, value in asked.items() if value is not None]
    if unread := [*extra, *given]:
        raise ValueError(
            f"{', '.join(unread)} can only be given with a named policy, and would not be read: policy is "
            f"{'None' if policy is None else f'the function {name}'}."
        )
    return BoundPolicy(name, function=policy)


def _overridden(policy: Policy, overrides: Mapping[str, Any]) -> Policy:
    """The policy with these fields replaced, checked as its YAML would be.

    Settings belong to a score: where the override names another score, the policy's are left behind.
    """
    mapping = config.stated_of(policy) | {"scope": policy.scope}
    overrides = config.plain_numbers(overrides)
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
        first, _, problems = str(error).partition("\n")
        problems = problems or f"  - {first}"
        raise ValueError(f"unfit settings of Cache or of policy {policy.name!r}:\n{problems}{also}") from None
