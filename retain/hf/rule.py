"""What a cache keeps: the policy, the budget and the gates that a user named, resolved once into one
function.

In: names and numbers as typed. Out: a `Rule`, which decides for all layers at once or layer by layer. The one
decision taken here: everything that can be wrong about the request is found when the cache is made,
before any token is read.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxtyping import Bool
from torch import Tensor, nn

from retain import config
from retain.budget import Budget, LayerShape
from retain.cascade import Cascade, keep_sets
from retain.evidence import Evidence
from retain.head_classes import check_shape
from retain.hf.gates import gates_for
from retain.hf.given import Arriving, Given
from retain.hf.model import LayerSpec
from retain.policy import Plan, candidates_of, plan_of, score_entries
from retain.presets import Policy, load_policy
from retain.protection import spans_by_sequence
from retain.registry import suggest
from retain.scores import Score
from retain.scores.trial import try_settings
from retain.turns import TurnMarkers, turn_markers

Keep = Bool[Tensor, "B H T"]
# A scorer that is no score of ours (`retain.hf.press`), or stands in for one.
Scorer = Callable[[Evidence], Score]
# Settings of `Cache` itself, near which a misspelt one may lie.
KEYWORDS = (
    "keep_ratio",
    "tokens_per_head",
    "bytes",
    "bytes_total",
    "gates",
    "seeds",
    "pinned",
    "tokenizer",
    "slack",
)


class Eviction(Protocol):
    """Decides layer by layer while a model prefills."""

    def add(self, evidence: Evidence) -> tuple[Keep, Sequence[Tensor | None]]:
        """The next layer has come: its keep mask, and which of their entries lower layers still keep."""


@dataclass(frozen=True, eq=False)
class Rule:
    """How the evidence of layers becomes keep masks.

    Args:
        name: for reports.
        begin: starts an eviction layer by layer, and refuses what cannot be; None keeps everything.
        decide: keep masks of all layers at once; None keeps everything.
    """

    name: str
    begin: Callable[[Given, Arriving], Eviction] | None = None
    decide: Callable[[Sequence[Evidence], Given], list[Keep]] | None = None


def make_rule(
    model: nn.Module,
    policy: Any,
    *,
    layers: Sequence[LayerSpec],
    budget: Mapping[str, Any],
    gates: Any = None,
    tokenizer: Any = None,
    pinned: Any = None,
    overrides: dict[str, Any] | None = None,
) -> Rule:
    """Resolve a request.

    Args:
        model: whose cache it is (gates are checked against it).
        policy: a preset's name, a path to a YAML, a `Policy`, a function `evidence -> keep_BHT`, or None
            (keep all).
        layers: those that evict.
        budget: what was stated of `retain.budget.Budget`; None is not stated.
        gates: a `GateSet`, or a path or hub id of one.
        tokenizer: whose chat template shows where turns begin, for a protection of turns.
        pinned: spans that the caller wants kept; only their form is looked at here.
        overrides: fields of the policy to replace; a section given as a mapping is merged into the policy's;
            `observed` may be a function `evidence -> Score`, which then stands in for the policy's score.

    Raises:
        ValueError: unknown policy, fields that do not fit it (all at once), no budget or several, a learned
            policy without gates, with gates of another model, or with gates that were never trained on
            entries which it may evict; protected turns without a tokenizer; head classes of another model.
    """
    stated = {name: value for name, value in budget.items() if value is not None}
    overrides = dict(overrides or {})
    from_policies = policy is not None and (
        isinstance(policy, str | os.PathLike) or dataclasses.is_dataclass(policy)
    )
    if not from_policies:
        name = "everything" if policy is None else getattr(policy, "__name__", type(policy).__name__)
        if stated or overrides:
            extra = ", ".join([*stated, *overrides])
            raise ValueError(
                f"{extra} can only be given with a named policy; policy is {policy!r}, which decides alone."
            )
        if policy is None:
            return Rule(name)
        if not callable(policy):
            raise ValueError(
                f"policy is a name, a path, a Policy or a function of the evidence; got {policy!r}."
            )
        asked = {"gates": gates, "tokenizer": tokenizer, "pinned": pinned}
        if unread := [name for name, value in asked.items() if value is not None]:
            raise ValueError(
                f"{', '.join(unread)} would not be read: policy is the function {name}, which decides alone. "
                "Name a policy, or let the function do what they say."
            )
        return Rule(
            name,
            lambda given, call: _OneByOne(policy),
            lambda evidence, given: [policy(layer) for layer in evidence],
        )

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
    except ValueError as error:
        problems.append(str(error))
    if pinned is not None:
        try:
            spans_by_sequence(pinned)
        except ValueError as error:
            problems.append(f"pinned {error}")
    if problems:
        raise ValueError("\n".join(problems))
    if chosen.keeps_all and scorer is None:
        return Rule(chosen.name)
    request = _Request(
        chosen,
        keep,
        _gates(model, chosen, gates),
        scorer,
        _markers(chosen, tokenizer),
        tuple(layers),
    )
    if chosen.allocation.head_classes is not None:
        check_shape(chosen.allocation.head_classes, [layer.num_kv_heads for layer in layers])
    return Rule(chosen.name, lambda given, call: _LayerByLayer(request, given, call), request.decide)


@dataclass(frozen=True, eq=False)
class _Request:
    """A policy with everything that it needs, checked."""

    policy: Policy
    budget: Budget
    gates: Any
    scorer: Scorer | None
    markers: TurnMarkers | None
    layers: tuple[LayerSpec, ...]

    def score(self, evidence: Evidence, given: Given) -> Score:
        """The policy's score of one layer."""
        learned = self.gates.score(evidence) if self.policy.learned else None
        observed = None if self.scorer is None else self.scorer(evidence)
        return score_entries(self.policy, evidence, learned=learned, observed=observed, seeds_B=given.seeds_B)

    def plan(self, call: Arriving, given: Given) -> Plan:
        """What is settled before any layer ran, and what can be found to be wrong by then."""
        shapes = [
            LayerShape(layer.num_kv_heads, 2 * layer.head_dim * call.element_size) for layer in self.layers
        ]
        plan = plan_of(
            self.policy,
            self.budget,
            call.valid_BT,
            shapes,
            call.token_ids_BT,
            given.pinned_BT,
            self.markers,
        )
        if not plan.covers_all:
            self._check_window(plan.shares.totals.lengths_B)
        return plan

    def _check_window(self, lengths_B: Sequence[int]) -> None:
        """Refuse a sequence that the score cannot observe, before the model reads it."""
        if self.policy.observed is None or self.scorer is not None:
            return
        tried, _ = try_settings(self.policy.observed, self.policy.observed_settings)
        window = 0 if tried is None else tried.window
        for row, length in enumerate(lengths_B):
            if length < window:
                raise ValueError(
                    f"sequence {row} of {len(lengths_B)} has {length} tokens, which is shorter than the "
                    f"observation window of {window} of policy {self.policy.name!r}: pass a smaller window "
                    '(observed_settings={"window": ...}), or read this sequence in a batch of its own with '
                    "a policy that keeps everything."
                )

    def decide(self, evidence: Sequence[Evidence], given: Given) -> list[Keep]:
        """Keep masks of all layers at once."""
        first = evidence[0]
        call = Arriving(first.valid_BT, first.token_ids_BT, first.keys_BHTD.element_size())
        plan = self.plan(call, given)
        if plan.covers_all:
            return [_everything(layer) for layer in evidence]
        candidates = [candidates_of(plan, self.score(layer, given)) for layer in evidence]
        return keep_sets(plan.shares, candidates)


def _everything(evidence: Evidence) -> Keep:
    """All that exists."""
    B, T = evidence.valid_BT.shape
    return evidence.valid_BT[:, None].expand(B, evidence.num_heads, T)


class _OneByOne:
    """A function of one layer's evidence."""

    def __init__(self, keep: Callable[[Evidence], Keep]):
        self.keep = keep

    def add(self, evidence: Evidence) -> tuple[Keep, Sequence[Tensor | None]]:
        return self.keep(evidence), ()


class _LayerByLayer:
    """A policy, whose lower layers may shrink as layers come."""

    def __init__(self, request: _Request, given: Given, call: Arriving):
        self.request, self.given, self.call = request, given, call
        self.plan = request.plan(call, given)
        self.cascade = Cascade(self.plan.shares)

    def add(self, evidence: Evidence) -> tuple[Keep, Sequence[Tensor | None]]:
        element_size = evidence.keys_BHTD.element_size()
        if element_size != self.call.element_size and not self.cascade.num_added:
            # Keys come in another precision than weights are in (autocast): bytes hold other entries.
            self.call = replace(self.call, element_size=element_size)
            self.plan = self.request.plan(self.call, self.given)
            self.cascade = Cascade(self.plan.shares)
        if self.plan.covers_all:
            return _everything(evidence), ()
        return self.cascade.add(candidates_of(self.plan, self.request.score(evidence, self.given)))


def _gates(model: nn.Module, policy: Policy, gates: Any) -> Any:
    """The gates, checked against the model and the policy; None without any."""
    if policy.learned and gates is None:
        raise ValueError(
            f"policy {policy.name!r} needs gates: pass gates='path or hub id' (train/distill.py makes them), "
            "or choose a training-free policy such as 'snapkv'."
        )
    if gates is None:
        return None
    gates = gates_for(model, gates)
    # What else scores in a gate's place (a control of an evaluation) may have no metadata.
    window = (getattr(gates, "metadata", {}).get("protected_window") or 0) if policy.learned else 0
    if window > policy.protection.recent:
        raise ValueError(
            f"policy {policy.name!r} protects the last {policy.protection.recent} entries, and its gates "
            f"were trained for a protected window of {window}: of nearer entries they know nothing. Wanted: "
            f"protection.recent of at least {window}. Set protection.recent={window}, or train gates with a "
            f"smaller target.horizon (at most {policy.protection.recent})."
        )
    return gates


def _markers(policy: Policy, tokenizer: Any) -> TurnMarkers | None:
    """Where turns begin, if the policy protects them."""
    if not policy.protection.reads_turns:
        return None
    if tokenizer is None:
        raise ValueError(
            f"policy {policy.name!r} protects the turns of a conversation, and nothing says where they "
            "begin: pass tokenizer=, whose chat template shows it."
        )
    return turn_markers(tokenizer)


def _overridden(policy: Policy, overrides: dict[str, Any]) -> Policy:
    """The policy with these fields replaced, checked as its YAML would be.

    Settings belong to a score: where the override names another score, the policy's own are left behind.
    """
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
