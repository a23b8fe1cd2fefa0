"""Evictions under a limit: a warning where more goes than can be afforded, and two ways of not letting it go.

In: a cache's guard (`retain.budget.capacity.CapacityGuard`) and its evictions, as they come. Out:
`cache.capacity`, what the last of them cost; a warning; a `CapacityError`; or a larger budget. The one
decision taken here: a guard that only warns reads along while layers are cut, at next to no cost, and one
that may change the decision holds the whole prompt until all layers have come, since what a budget costs is
not known before.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from retain.budget.capacity import (
    ACTIONS,
    Capacity,
    CapacityError,
    CapacityGuard,
    CapacityMeter,
    CapacityWarning,
    seen_of,
    stored_limit,
)
from retain.evidence import Evidence
from retain.fusion import IN_RISK
from retain.hf.cache.batch_context import Given
from retain.hf.cache.bound_policy import Rule
from retain.hf.cache.eviction_request import Again, LayerByLayer, OneByOne, unit_of
from retain.hf.cache.later_evidence import beside_of
from retain.hf.cache.state import Conversation
from retain.hf.warnings_at_caller import warn
from retain.kernels.backend import without_autocast
from retain.registry import lookup

AUTO = "auto"
# To `evict`: what the cache was made with.
OWN = "own"
# Fusions on whose scale the limit is that gates are stored with (`train/calibration/capacity_limit.py`): the
# learned score's own, which `max` and `sum` only raise.
ON_SCALE = ("learned", "max", "sum")


def make_guard(capacity: Any, rule: Rule) -> CapacityGuard | None:
    """What a cache does about evictions that cannot be afforded.

    Args:
        capacity: `auto` (warn, where the gates were stored with a limit and the policy is such as that limit
            was read off for, and else nothing), an action of `retain.budget.capacity.ACTIONS`, a
            `CapacityGuard` with a limit of its own, or None for nothing.
        rule: what is kept.

    Raises:
        ValueError: an unknown action, or one that is asked for where no limit means anything.
    """
    if capacity is None:
        return None
    if not isinstance(capacity, CapacityGuard):
        if not isinstance(capacity, str):
            raise ValueError(
                f"capacity is {AUTO!r}, one of {', '.join(map(repr, ACTIONS))}, a "
                f"retain.budget.capacity.CapacityGuard or None; got {capacity!r}."
            )
        if capacity != AUTO:
            lookup(capacity, {AUTO: "", **ACTIONS}, what="what capacity does")
    guard = (
        CapacityGuard()
        if capacity == AUTO
        else capacity
        if isinstance(capacity, CapacityGuard)
        else CapacityGuard(capacity)
    )
    problem = _not_in_risk(rule)
    limit = guard.limit if problem or guard.limit is not None else stored_limit(_gates(rule))
    if problem is None and limit is None:
        problem = (
            "its gates were stored without a limit: calibrate them with calibration.capacity true "
            "(train/distill.py), or state one, capacity=retain.budget.capacity.CapacityGuard("
            f"{guard.action!r}, limit=...)"
        )
    if capacity == AUTO and (problem is not None or not _as_read_off(rule)):
        return None
    if problem is None:
        return replace(guard, limit=limit)
    raise ValueError(
        f"capacity={guard.action!r} does not go with policy {rule.name!r}: {problem}; or pass capacity=None."
    )


def _gates(rule: Rule) -> Any:
    return None if rule.request is None else rule.request.gates


def _not_in_risk(rule: Rule) -> str | None:
    """Why no limit on risk says anything of this rule; None if one does."""
    request = rule.request
    if request is None:
        return "it has no score that could be held against a limit: name a policy with calibrated gates"
    if request.budget.threshold is not None:
        return "under a threshold no budget runs short, the threshold is the limit: state keep_ratio"
    if not request.policy.learned or request.scorer is not None:
        return "what it observes is past, and foretells no loss: take a policy with calibrated gates (fused)"
    how = request.policy.fusion_of(request.policy.observed is not None, True)
    unit = unit_of(request.gates)
    if unit != "risk" or how not in (*ON_SCALE, *IN_RISK):
        return (
            f"its score (fusion {how!r}, gates in {unit!r}) is not in risk: calibrate the gates to risk, and "
            "take a fusion that keeps it"
        )
    return None


def _as_read_off(rule: Rule) -> bool:
    """Whether a policy pays prices like those that the stored limit was read off: one budget, shared by the
    heads of all layers by the numbers as they are, and those on the learned score's scale. Where each head
    has a budget of its own its price is above a joint one by construction."""
    request = rule.request
    assert request is not None
    policy, own = request.policy, request.policy.allocation
    how = policy.fusion_of(policy.observed is not None, True)
    shared = (request.budget.scope or policy.scope) == "model"
    return shared and how in ON_SCALE and own.normalise is None and own.compete_by == "score"


class Guarded(Conversation):
    """A conversation whose evictions may be held against a limit."""

    # What the cache was made with: as stated, and what that comes to for its own rule.
    _given_guard: tuple[Any, CapacityGuard | None] = (None, None)
    guard: CapacityGuard | None = None

    def _forget(self) -> None:
        super()._forget()
        self.guard = self._given_guard[1]
        # What the last eviction cost, where it is held against a limit.
        self.capacity: Capacity | None = None
        self._told = False  # it was warned, which is done once
        self._refused: ValueError | None = None
        # Of a prompt that is held whole: who decides, and what stands beside its entries.
        self._moment: Again | None = None
        self._beside: list[dict[str, Tensor] | None] = []

    @property
    def _holds_back(self) -> bool:
        """Whether the first prompt is held whole until its price is known."""
        if self._moment is not None:
            return True
        decides = isinstance(self._eviction, LayerByLayer) and bool(self._eviction.rows)
        return decides and self.guard is not None and self.guard.holds_back

    def _watch(self) -> None:
        """Read along from now on, where a first prompt is cut layer by layer."""
        guard, eviction = self.guard, self._eviction
        self._moment, self._beside = None, []
        if guard is None or guard.limit is None or guard.holds_back:
            return
        # Also where all seems to fit: keys that come in another precision may settle it anew.
        if isinstance(eviction, LayerByLayer):
            split = eviction.plan.shares.split
            eviction.gauge = CapacityMeter(guard.limit, split, follows=split.crosses_layers)

    def _measure(self, evidence: Evidence) -> None:
        """Settle the eviction of a first prompt anew where its keys are not in the weights' precision, before
        anybody asks which sequences it decides on."""
        if isinstance(self._eviction, LayerByLayer):
            self._eviction.measure(evidence.keys_BHTD.element_size())

    def _hold_back(self, evidence: Evidence, again: bool) -> None:
        """Score a layer, and leave it as it is.

        Args:
            evidence: of the layer.
            again: whether a later eviction will ask what stands beside its entries.
        """
        eviction = self._eviction
        assert isinstance(eviction, LayerByLayer)
        if self._moment is None:
            call = replace(eviction.call, element_size=evidence.keys_BHTD.element_size())
            self._moment = Again(eviction.request, eviction.given, call, call.stock)
        self._moment.guard = self.guard
        self._moment.look(evidence, None)
        self._beside.append(beside_of(evidence) if again else None)

    def _cut_held_back(self) -> None:
        """Decide about a prompt that was held whole, and cut it.

        Raises:
            CapacityError: it cannot be afforded. Nothing was cut, and nothing is held any more: the prompt
                does not count as seen, so its keys and values could never be asked for.
        """
        call, moment = self._call, self._moment
        assert call is not None and moment is not None
        keeps, beside = moment.keeps(), self._beside
        self._moment, self._beside = None, []
        try:
            self._weigh(moment)
        except CapacityError:
            self.reset()
            raise
        for layer, keep_BHT, own in zip(self.ragged, keeps, beside, strict=True):
            layer.store = self._cut_dense(layer, keep_BHT, call.mask_BT, call.positions_BS, own)

    @without_autocast
    def _decide(
        self, rule: Rule, guard: CapacityGuard | None, evidence: Sequence[Evidence], given: Given
    ) -> Sequence[Tensor | None] | None:
        """Keep masks of all layers at once, of evidence that shows everything; None keeps it.

        Raises:
            CapacityError: it cannot be afforded, and the guard says that it must be.
        """
        if rule.request is None:
            self.capacity, self.held_whole = None, []
            return rule.decide(evidence, given)
        moment = rule.request.moment(evidence, given)
        moment.guard = guard
        if guard is None:
            self.capacity = None
            self._note_whole(moment)
            return moment.keeps()
        keeps, before = moment.keeps(), (self.rule, self.guard)
        self.rule, self.guard = rule, guard
        try:
            self._weigh(moment)
        except CapacityError:
            self.rule, self.guard = before
            raise
        self._note_whole(moment)
        return keeps

    def _note_whole(self, moment: Again | LayerByLayer | OneByOne | None) -> None:
        """Note which short sequences a moment leaves whole."""
        decides = isinstance(moment, Again | LayerByLayer)
        self.held_whole = moment.plan.shares.totals.whole if decides else []

    def _weigh(self, moment: Again | LayerByLayer | OneByOne) -> None:
        """Note what an eviction costs, before it is done where all layers are there at once.

        Raises:
            CapacityError: it cannot be afforded, and the guard says that it must be.
        """
        if self.guard is None:
            return
        if isinstance(moment, LayerByLayer) and moment.gauge is not None:
            if not moment.gauge.num_added:  # all that there was is kept
                return
            lengths_B = moment.call.valid_BT.sum(-1).tolist()
            heads = sum(spec.num_kv_heads for spec in self.specs)
            capacity = moment.gauge.read()
            capacity = capacity.placed(moment.rows, [length * heads for length in lengths_B])
        elif isinstance(moment, Again) and moment.capacity is not None:
            home = moment.whole[0].device
            entries_B = torch.stack([own.sum((1, 2)).to(home) for own in moment.whole]).sum(0).tolist()
            seen_B = seen_of(moment.plan.shares.totals)
            capacity = moment.capacity.placed(moment.rows, entries_B, seen_B)
        else:
            return
        if self.guard.action == "raise" and any(capacity.short_B):
            raise CapacityError(
                f"{self._asked()}: {capacity}. Nothing was evicted: state a larger budget, take "
                "capacity='keep', or capacity='warn' to evict all the same.",
                capacity,
            )
        self.capacity = capacity

    def _say(self) -> None:
        """Warn of what went, once; or raise what a later eviction was refused for, now that all is in order.

        Raises:
            ValueError: as it says.
        """
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        short = self.capacity is not None and any(self.capacity.short_B)
        if self.guard is not None and self.guard.action == "warn" and short and not self._told:
            self._told = True
            warn(f"{self._asked()}: {self.capacity}.", CapacityWarning)

    def _asked(self) -> str:
        """Policy and budget, in words."""
        request = self.rule.request
        assert request is not None
        names = ("keep_ratio", "tokens_per_head", "bytes", "bytes_total")
        stated = {name: getattr(request.budget, name) for name in names}
        budget = ", ".join(f"{name}={value:g}" for name, value in stated.items() if value is not None)
        return f"policy {self.rule.name!r} at {budget}"
