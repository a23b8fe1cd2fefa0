"""Packs entries (`retain.cache.precision`): of a first prompt as its layers are cut, later ones after a read,
or once enough were decoded.
"""

from retain.cache.precision import GROUP
from retain.eviction import Eviction
from retain.hf.cache.state import State
from retain.hf.intercept.forward_call import Call


def packs_now(state: State, eviction: Eviction | None, call: Call) -> bool:
    """Whether a layer of a first forward is packed as soon as it is cut, or later, since entries of it may
    still go: as other layers come, once it was read, or once all of a prompt was.

    Args:
        eviction: that cuts it; None: it is kept whole.
    """
    if eviction is not None:
        return not eviction.crosses_layers
    if state.bound_policy.keeps_all:
        return True
    return not (state.due(call) or _prompt_comes(state, call.mask_BT.shape[1]))


def _prompt_comes(state: State, seen: int) -> bool:
    """Whether a prompt is being read that is evicted from when it was."""
    open_ = state.prompt_B is None and seen < (state.width or 0)
    return open_ and state.regime.evicts_prompt and not state.bound_policy.keeps_all


def pack(state: State, *, read: bool) -> None:
    """Pack what came, but for the last entries of each row: after a read, and while decoding whenever a group
    has come. What will be evicted from at the end of the prompt is packed then.

    Args:
        read: whether a prompt, a part of one or a turn was read, rather than a token decoded.
    """
    bound, regime = state.bound_policy, state.regime
    if bound.precision is None:
        return
    if "chunked" not in regime.parts and _prompt_comes(state, state.num_seen):
        return
    # What a later eviction wants to know of the last entries is noted where they came.
    noted = bound.keeps_all or not regime.again or state.noted == state.num_seen
    if noted and (read or state.num_seen - state.packed_at >= GROUP):
        with state.changing():
            for store in state.stores:
                store.pack_()
        state.packed_at = state.num_seen
