"""Holds a whole first prompt until all layers have come, where no layer can be cut before.

A correction wants the final sets where layers share a budget: cut again and again while layers come, an entry
would be merged into one that goes later, and from there into one that is unlike it. Every other eviction cuts
layer by layer.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from retain.evidence import Evidence
from retain.hf.cache.batch_context import BatchContext
from retain.hf.cache.bound_policy import BoundPolicy, Eviction, EvictionStep
from retain.hf.cache.eviction_request import JointReEviction, LayerByLayer
from retain.hf.cache.later_evidence import beside_of
from retain.hf.cache.state import State
from retain.kernels.backend import without_autocast


class HeldBack:
    """A prompt that is held whole, and who decides about it.

    Args:
        state: of the cache.
    """

    def __init__(self, state: State):
        self.state = state
        self.reset()

    def reset(self) -> None:
        """Forget all of it."""
        self.refused: ValueError | None = None  # why a later eviction did not happen; to be raised
        self.forget()

    def forget(self) -> None:
        """Forget the prompt."""
        self.waiting: JointReEviction | None = None
        self.beside: list[dict[str, Tensor] | None] = []

    def fork(self, state: State) -> "HeldBack":
        """The same for a copy of the cache."""
        other = copy.copy(self)
        other.state = state
        return other

    def holds(self, eviction: Eviction | None) -> bool:
        """Whether the first prompt is held whole until all layers have come."""
        if self.waiting is not None:
            return True
        if not isinstance(eviction, LayerByLayer) or not eviction.rows:
            return False
        bound = self.state.bound_policy
        return bound.correction is not None and eviction.plan.shares.split.crosses_layers

    def add(self, eviction: Eviction | None, evidence: Evidence, again: bool) -> None:
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
        self.waiting.look(evidence, None)
        self.beside.append(beside_of(evidence) if again else None)

    def cut(self) -> None:
        """Decide about a prompt that was held whole, if there is one, and cut it."""
        call, step, beside = self.state.call, self.waiting, self.beside
        if step is None:
            return
        assert call is not None
        keeps, bound = step.keeps(), self.state.bound_policy
        self.forget()
        where = call.mask_BT, call.positions_BS
        for layer, keep_BHT, own in zip(self.state.ragged, keeps, beside, strict=True):
            layer.store = self.state.cut_dense(
                layer, keep_BHT, *where, own, bound.correction, bound.precision
            )

    def say(self) -> None:
        """Raises what a later eviction was refused for, now that all is in order.

        Raises:
            ValueError: as it says.
        """
        refused, self.refused = self.refused, None
        if refused is not None:
            raise refused


@without_autocast
def decide(
    state: State, bound: BoundPolicy, evidence: Sequence[Evidence], batch: BatchContext
) -> Sequence[Tensor | None] | None:
    """Keep masks of all layers at once, of evidence that shows everything; None keeps it."""
    if bound.request is None:
        state.held_whole = []
        return bound.decide(evidence, batch)
    step = bound.request.joint_eviction(evidence, batch)
    note_whole(state, step)
    return step.keeps()


def note_whole(state: State, step: Eviction | EvictionStep | None) -> None:
    """Note which short sequences an eviction leaves whole."""
    decides = isinstance(step, JointReEviction | LayerByLayer)
    state.held_whole = step.plan.shares.totals.whole if decides else []
