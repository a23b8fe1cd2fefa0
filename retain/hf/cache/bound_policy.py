"""Binds a policy, a budget and gates, as a user named them, to a model (`BoundPolicy`).

Everything that can be wrong about the request is found when the cache is made, before any token is read.
"""

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from retain import config
from retain.budget.head_weights import check_weights
from retain.budget.statement import Budget
from retain.cache.precision import Precision
from retain.capability import BEFORE_ROPE, Use, check_gates, refuse
from retain.eviction import BoundPolicy, Scorer
from retain.hf.model.decoder import rotary_of
from retain.hf.model.gates import gates_for, shipped_gates
from retain.hf.model.layout import LayerSpec
from retain.policy import check_budget
from retain.presets import Policy, load_policy
from retain.process.registry import lookup, suggest
from retain.protection import spans_by_sequence
from retain.scores.triattention import check_centres

# Settings of `Cache` itself, near which a misspelt one may lie.
KEYWORDS = (
    *("keep_ratio", "tokens_per_head", "bytes", "byte_ratio", "threshold", "regime", "every"),
    *("gates", "seeds", "pinned", "slack", "short", "short_tokens"),
)

# What is done with a short sequence that the policy cannot evict from within its budget.
SHORT = {"keep": "it is held whole", "raise": "it is refused, as a longer one is"}


def short_limit(short: str, short_tokens: int) -> int:
    """Up to how many tokens a sequence is held whole rather than refused, as `Cache` is told.

    Raises:
        ValueError: an unknown way, or no number of tokens.
    """
    lookup(short, SHORT, what="what is done with short sequences (short=)")
    if isinstance(short_tokens, bool) or not isinstance(short_tokens, int) or short_tokens < 1:
        raise ValueError(
            f"short_tokens is {short_tokens!r}: pass a whole number of tokens, at least 1 (or short='raise')."
        )
    return short_tokens if short == "keep" else 0


def bind_policy(
    model: nn.Module,
    policy: Any,
    *,
    layers: Sequence[LayerSpec],
    budget: Mapping[str, Any],
    gates: Any = None,
    pinned: Any = None,
    overrides: dict[str, Any] | None = None,
    short_tokens: int = 0,
) -> BoundPolicy:
    """Resolve a request.

    Args:
        model: whose cache it is (gates are checked against it).
        policy: a preset's name, a path to a YAML, a `Policy`, a function `evidence -> keep_BHT`, or None
            (keep all).
        layers: those that evict.
        budget: what was stated of `retain.budget.statement.Budget`; None is not stated.
        gates: a `GateSet`, or a path or hub id of one.
        pinned: spans that the caller wants kept; only their form is looked at here.
        overrides: fields of the policy to replace; a section given as a mapping is merged into the policy's;
            `observed` may be a function `evidence -> Score`, which then stands in for the policy's score.
        short_tokens: sequences of at most so many tokens are held whole where it is that or an error.

    Raises:
        ValueError: unknown policy, fields that do not fit it (all at once), no budget or several, a learned
            policy without gates, with gates of another model, or with gates that were never trained on
            entries which it may evict; weights of another model's heads.
    """
    stated = {name: value for name, value in budget.items() if value is not None}
    overrides = dict(overrides or {})
    from_policies = policy is not None and (
        isinstance(policy, str | os.PathLike) or dataclasses.is_dataclass(policy)
    )
    if not from_policies:
        return _bind_function(policy, [*stated, *overrides], gates=gates, pinned=pinned)

    chosen: Policy = policy if isinstance(policy, Policy) else load_policy(policy)
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
    except ValueError as error:
        problems.append(str(error))
    if pinned is not None:
        try:
            spans_by_sequence(pinned)
        except ValueError as error:
            problems.append(f"pinned {error}")
    if gates is not None and not chosen.learned:
        problems.append(
            f"gates would not be read: policy {chosen.name!r} takes none. Leave them out, or name a policy "
            "that takes gates, such as 'learned' or 'gate'."
        )
    if problems:
        raise ValueError("\n".join(problems))
    check_precision(chosen.precision, layers)
    if chosen.keeps_all and scorer is None:
        return BoundPolicy(chosen.name, precision=chosen.precision)
    gates = _gates(model, chosen, gates)
    if chosen.learned and (caution := check_gates(chosen, keep, gates, scored_elsewhere=scorer is not None)):
        warnings.warn(caution, stacklevel=3)
    before = BEFORE_ROPE & set(getattr(gates, "inputs", ())) if chosen.learned else ()
    rope: tuple[Use, ...] = ("unknown_rope",) if before and rotary_of(model) is None else ()
    refuse(chosen, rope, gates=gates, scorer=scorer)
    _check_files(chosen, layers)
    sizes = tuple((layer.num_kv_heads, layer.entry_width) for layer in layers)
    of_policy = chosen, keep, gates, scorer, sizes, short_tokens
    return BoundPolicy(chosen.name, *of_policy, precision=chosen.precision)


def check_precision(precision: Precision | None, layers: Sequence[LayerSpec]) -> None:
    """Refuse to hold rows in fewer bits that would grow.

    Raises:
        ValueError: a precision, and heads of a few channels.
    """
    for layer in layers if precision is not None else ():
        packed, _ = precision.cost(layer.head_dim, layer.head_dim, layer.dtype.itemsize)
        if packed >= (whole := 2 * layer.head_dim * layer.dtype.itemsize):
            raise ValueError(
                f"precision makes entries larger: {float(packed):.4g} bytes with what stands beside them, "
                f"and {whole} as they are, of heads of {layer.head_dim} channels: take fewer bits, or "
                "precision=None."
            )


def _check_files(policy: Policy, layers: Sequence[LayerSpec]) -> None:
    """Refuse weights of heads and centres of another model."""
    if (centres := policy.observed_settings.get("centres")) is not None:
        check_centres(centres, [(layer.layer_idx, layer.num_heads, layer.head_dim) for layer in layers])
    if (weights := policy.weights) is not None:
        check_weights(weights, [own.num_kv_heads for own in layers], [own.layer_idx for own in layers])


def _bind_function(policy: Any, extra: Sequence[str], **asked: Any) -> BoundPolicy:
    """Bind a function of the evidence, or None, which keeps everything; neither reads settings.

    Args:
        policy: the function, or None.
        extra: names of budgets and policy settings that were given.
        **asked: what else was given; None is not.

    Raises:
        ValueError: something was given that would not be read, or the policy is no policy.
    """
    name = "everything" if policy is None else getattr(policy, "__name__", type(policy).__name__)
    if extra:
        raise ValueError(
            f"{', '.join(extra)} can only be given with a named policy; policy is {policy!r}, which decides "
            "alone."
        )
    if policy is None:
        return BoundPolicy(name)
    if not callable(policy):
        raise ValueError(f"policy is a name, a path, a Policy or a function of the evidence; got {policy!r}.")
    if unread := [name for name, value in asked.items() if value is not None]:
        raise ValueError(
            f"{', '.join(unread)} would not be read: policy is the function {name}, which decides alone. "
            "Name a policy, or let the function do what they say."
        )
    return BoundPolicy(name, function=policy)


def _gates(model: nn.Module, policy: Policy, gates: Any) -> Any:
    """The gates, checked against the model, or those that ship for it; None without any."""
    if gates is None:
        return shipped_gates(model, policy.name) if policy.learned else None
    return gates_for(model, gates)


def _overridden(policy: Policy, overrides: dict[str, Any]) -> Policy:
    """The policy with these fields replaced, checked as its YAML would be.

    Settings belong to a score: where the override names another score, the policy's own are left behind.
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
