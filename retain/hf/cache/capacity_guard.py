"""Holds evictions against a limit: warns of what cannot be afforded, refuses it, or enlarges budgets.

A guard that only warns reads along while layers are cut, at next to no cost. One that may change the decision
holds the whole prompt until all layers have come, since what a budget costs is not known before. Budgets in
whole pages hold it too, with or without a guard, since they are rounded over all layers at once.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from retain.budget.capacity import (
    ACTIONS,
    Capacity,
    CapacityError,
    CapacityMeter,
    CapacityWarning,
    Guard,
    seen_of,
    stored_limit,
)
from retain.correction.refit import Refit
from retain.evidence import Evidence
from retain.fusion import IN_RISK
from retain.gate_fit import unit_of
from retain.hf.cache.batch_context import BatchContext
from retain.hf.cache.bound_policy import BoundPolicy, Eviction, EvictionStep
from retain.hf.cache.eviction_request import JointReEviction, LayerByLayer
from retain.hf.cache.later_evidence import beside_of
from retain.hf.cache.packing import packing_of, with_fulls
from retain.hf.cache.state import State
from retain.hf.warnings_at_caller import warn
from retain.kernels.backend import without_autocast
from retain.registry import lookup

AUTO = "auto"
# To `evict`: what the cache was made with.
OWN = "own"
# Fusions on whose scale the limit is that gates are stored with (`train/calibration/capacity_limit.py`): the
# learned score's own, which `max` and `sum` only raise.
ON_SCALE = ("learned", "max", "sum")


def make_guard(capacity: Any, bound: BoundPolicy) -> Guard | None:
    """What a cache does about evictions that cannot be afforded.

    Args:
        capacity: `auto` (warn, where the gates were stored with a limit and the policy is such as that limit
            was read off for, and else nothing), an action of `retain.budget.capacity.ACTIONS`, a `Guard` with
            a limit of its own, or None for nothing.
        bound: what is kept.

    Raises:
        ValueError: an unknown action, or one that is asked for where no limit means anything.
    """
    if capacity is None:
        return None
    if not isinstance(capacity, Guard):
        if not isinstance(capacity, str):
            raise ValueError(
                f"capacity is {AUTO!r}, one of {', '.join(map(repr, ACTIONS))}, a "
                f"retain.budget.capacity.Guard or None; got {capacity!r}."
            )
        if capacity != AUTO:
            lookup(capacity, {AUTO: "", **ACTIONS}, what="what capacity does")
    guard = Guard() if capacity == AUTO else capacity if isinstance(capacity, Guard) else Guard(capacity)
    problem = _not_in_risk(bound)
    limit = (
        guard.limit
        if problem or guard.limit is not None
        else stored_limit(getattr(bound.request, "gates", None))
    )
    if problem is None and limit is None:
        problem = (
            "its gates were stored without a limit: calibrate them with calibration.capacity true "
            "(train/distill.py), or state one, capacity=retain.budget.capacity.Guard("
            f"{guard.action!r}, limit=...)"
        )
    if capacity == AUTO and (problem is not None or not _as_read_off(bound)):
        return None
    if problem is None:
        return replace(guard, limit=limit)
    raise ValueError(
        f"capacity={guard.action!r} does not go with policy {bound.name!r}: {problem}; or pass capacity=None."
    )


def _not_in_risk(bound: BoundPolicy) -> str | None:
    """Why no limit on risk says anything of this rule; None if one does."""
    request = bound.request
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


def _as_read_off(bound: BoundPolicy) -> bool:
    """Whether a policy pays prices like those that the stored limit was read off: one budget, shared by the
    heads of all layers by the numbers as they are, and those on the learned score's scale. Where each head
    has a budget of its own its price is above a joint one by construction."""
    request = bound.request
    assert request is not None
    policy, own = request.policy, request.policy.allocation
    how = policy.fusion_of(policy.observed is not None, True)
    shared = (request.budget.scope or policy.scope) == "model"
    return shared and how in ON_SCALE and own.normalise is None and own.compete_by == "score"


class CapacityGuard:
    """A cache's guard at work.

    Args:
        state: of the cache.
        stated: what the cache was made with, as stated, and what that comes to for its own rule.
    """

    def __init__(self, state: State, stated: tuple[Any, Guard | None]):
        self.state, self.stated = state, stated
        self.reset()

    def reset(self) -> None:
        """Forget what evictions cost, and a guard that a later `evict` brought."""
        self.guard = self.stated[1]
        # What the last eviction cost, where it is held against a limit.
        self.capacity: Capacity | None = None
        self.warned = False
        self.refused: ValueError | None = None  # why a later eviction did not happen; to be raised
        # Of a prompt that is held whole: who decides, and what stands beside its entries.
        self.waiting: JointReEviction | None = None
        self.beside: list[dict[str, Tensor] | None] = []
        self.evidence: list[Evidence | None] = []

    def fork(self, state: State) -> "CapacityGuard":
        """The same for a copy of the cache."""
        other = copy.copy(self)
        other.state = state
        return other

    def select_batch(self, rows: list[int]) -> None:
        """Keep these sequences, in this order."""
        if self.capacity is not None:
            self.capacity = self.capacity.select_batch(rows)

    def holds_back(self, eviction: Eviction | None) -> bool:
        """Whether the first prompt is held whole until all layers have come: its price is known then, or how
        many whole pages each head keeps."""
        if self.waiting is not None:
            return True
        if not isinstance(eviction, LayerByLayer) or not eviction.rows:
            return False
        guarded = self.guard is not None and self.guard.holds_back
        bound = self.state.bound_policy
        refits = isinstance(bound.correction, Refit)
        return guarded or bound.rounds_to is not None or refits or bound.packs_over_layers

    def watch(self, eviction: Eviction | None) -> None:
        """Read along from now on, where a first prompt is cut layer by layer."""
        guard = self.guard
        self.waiting, self.beside, self.evidence = None, [], []
        if guard is None or guard.limit is None or guard.holds_back:
            return
        # Also where all seems to fit: keys that come in another precision may settle it anew.
        if isinstance(eviction, LayerByLayer):
            split = eviction.plan.shares.split
            eviction.gauge = CapacityMeter(guard.limit, split, follows=split.crosses_layers)

    def hold_back(self, eviction: Eviction | None, evidence: Evidence, again: bool) -> None:
        """Score a layer, and leave it as it is.

        Args:
            eviction: of the first prompt.
            evidence: of the layer.
            again: whether a later eviction will ask what stands beside its entries.
        """
        assert isinstance(eviction, LayerByLayer)
        if self.waiting is None:
            call = replace(eviction.call, element_size=evidence.keys_BHTD.element_size())
            self.waiting = JointReEviction(eviction.request, eviction.batch, call)
        self.waiting.guard = self.guard
        self.waiting.look(evidence, None)
        self.beside.append(beside_of(evidence) if again else None)
        # Queries of all layers are held for a refit, and where they say how keys are held.
        bound = self.state.bound_policy
        looks = bound.precision is not None and bound.precision.looks
        asked = looks or isinstance(bound.correction, Refit)
        self.evidence.append(evidence if asked else None)

    def cut_held_back(self) -> None:
        """Decide about a prompt that was held whole, if there is one, and cut it.

        Raises:
            CapacityError: it cannot be afforded. Nothing was cut.
        """
        call, step, beside = self.state.call, self.waiting, self.beside
        if step is None:
            return
        assert call is not None
        keeps, evidence, bound = step.keeps(), self.evidence, self.state.bound_policy
        self.waiting, self.beside, self.evidence = None, [], []
        self.weigh(step)
        made = [packing_of(bound.precision, *own) for own in zip(evidence, keeps, strict=True)]
        packings = with_fulls(made, step.fulls)
        parts = zip(self.state.ragged, keeps, beside, evidence, packings, strict=True)
        for layer, keep_BHT, own, shown, packing in parts:
            where, correction = (call.mask_BT, call.positions_BS), bound.correction
            layer.store = self.state.cut_dense(layer, keep_BHT, *where, own, correction, shown, packing)

    @without_autocast
    def decide(
        self, bound: BoundPolicy, guard: Guard | None, evidence: Sequence[Evidence], batch: BatchContext
    ) -> tuple[Sequence[Tensor | None] | None, Sequence[Tensor] | None]:
        """Keep masks of all layers at once, of evidence that shows everything, None keeps it; and of what is
        kept what stays as it is, None where no score says that.

        Raises:
            CapacityError: it cannot be afforded, and the guard says that it must be.
        """
        if bound.request is None:
            self.capacity, self.state.held_whole = None, []
            return bound.decide(evidence, batch), None
        step = bound.request.joint_eviction(evidence, batch)
        step.guard = guard
        if guard is None:
            self.capacity = None
            self.note_whole(step)
            keeps = step.keeps()
            return keeps, step.fulls
        keeps, before = step.keeps(), (self.state.bound_policy, self.guard)
        self.state.bound_policy, self.guard = bound, guard
        try:
            self.weigh(step)
        except CapacityError:
            self.state.bound_policy, self.guard = before
            raise
        self.note_whole(step)
        return keeps, step.fulls

    def note_whole(self, step: Eviction | EvictionStep | None) -> None:
        """Note which short sequences an eviction leaves whole."""
        decides = isinstance(step, JointReEviction | LayerByLayer)
        self.state.held_whole = step.plan.shares.totals.whole if decides else []

    def weigh(self, step: Eviction | EvictionStep) -> None:
        """Note what an eviction costs, before it is done where all layers are there at once.

        Raises:
            CapacityError: it cannot be afforded, and the guard says that it must be.
        """
        if self.guard is None:
            return
        if isinstance(step, LayerByLayer) and step.gauge is not None:
            if not step.gauge.num_added:  # all that there was is kept
                return
            held_B = list(map(sum, step.plan.shares.totals.capacity_BL))
            capacity = step.gauge.read().placed(step.rows, held_B)
        elif isinstance(step, JointReEviction) and step.capacity is not None:
            home = step.whole[0].device
            entries_B = torch.stack([own.sum((1, 2)).to(home) for own in step.whole]).sum(0)
            seen_B = seen_of(step.plan.shares.totals)
            capacity = step.capacity.placed(step.rows, entries_B.tolist(), seen_B)
        else:
            return
        if self.guard.action == "raise" and any(capacity.short_B):
            raise CapacityError(
                f"{self._asked()}: {capacity}. Nothing was evicted: state a larger budget, take "
                "capacity='keep', or capacity='warn' to evict all the same.",
                capacity,
            )
        self.capacity = capacity

    def say(self) -> None:
        """Warn of what went, once; or raise what a later eviction was refused for, now that all is in order.

        Raises:
            ValueError: as it says.
        """
        refused, self.refused = self.refused, None
        if refused is not None:
            raise refused
        short = self.capacity is not None and any(self.capacity.short_B)
        if self.guard is not None and self.guard.action == "warn" and short and not self.warned:
            self.warned = True
            warn(f"{self._asked()}: {self.capacity}.", CapacityWarning)

    def _asked(self) -> str:
        """Policy and budget, in words."""
        bound = self.state.bound_policy
        assert bound.request is not None
        names = ("keep_ratio", "tokens_per_head", "bytes", "bytes_total", "byte_ratio")
        stated = {name: getattr(bound.request.budget, name) for name in names}
        budget = ", ".join(f"{name}={value:g}" for name, value in stated.items() if value is not None)
        return f"policy {bound.name!r} at {budget}"
