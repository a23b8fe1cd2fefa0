"""Packs entries (`retain.precision`): of a first prompt as its layers are cut, later ones after a read, or
once enough were decoded.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from retain.cache.tiered_store import Packing, Rows, TieredStore
from retain.evidence import Evidence
from retain.hf.cache.eviction_request import JointReEviction, LayerByLayer, OneByOne
from retain.hf.cache.state import State
from retain.hf.intercept.forward_call import Call
from retain.precision import Precision, balance_of, channels_of


def packing_of(
    precision: Precision | None,
    evidence: Evidence | None,
    keep_BHT: Tensor | None = None,
    eviction: LayerByLayer | OneByOne | JointReEviction | None = None,
    *,
    now: bool = True,
) -> Packing | None:
    """How a layer is packed once it is cut; None: it stays as it is.

    Args:
        precision: the policy's.
        evidence: of the layer, before anything of it went.
        keep_BHT: what is kept.
        eviction: that cuts it.
        now: False where it is decided on later.

    Raises:
        ValueError: its queries should say how keys are held, and there is no evidence.
    """
    if precision is None:
        return None
    rows = Rows()
    if precision.looks:
        if evidence is None:
            raise ValueError(
                "precision with balance or channels goes by the prompt's queries, and none are held: evict "
                "with evidence, or leave these settings out."
            )
        channels_RD = None
        if precision.channels < 1:
            kept_BHT = evidence.exists_BHT if keep_BHT is None else keep_BHT
            channels_RD = channels_of(evidence, precision, kept_BHT)
        rows = Rows(balance_of(evidence) if precision.balance else None, channels_RD)
    if not isinstance(eviction, LayerByLayer):
        return Packing(precision, rows, now=now)
    return Packing(precision, rows, eviction.full, now=not eviction.plan.shares.split.crosses_layers)


def with_fulls(packings: Sequence[Packing | None], fulls: Sequence[Tensor] | None) -> list[Packing | None]:
    """The same, for layers of which some entries stay as they are."""
    if fulls is None:
        return list(packings)
    return [
        None if packing is None else replace(packing, full_BHT=full_BHT, now=True)
        for packing, full_BHT in zip(packings, fulls, strict=True)
    ]


def decided_later(state: State, call: Call) -> bool:
    """Whether what a first forward read is still to be decided on, once it was read, or once all of a prompt
    was, so that nothing of it is packed before."""
    precision, bound = state.bound_policy.precision, state.bound_policy
    if precision is None or bound.keeps_all:
        return False
    return bool(precision.full) or state.due(call) or _prompt_comes(state, call.mask_BT.shape[1])


def _prompt_comes(state: State, seen: int) -> bool:
    """Whether a prompt is being read that is evicted from when it was."""
    open_ = state.prompt_B is None and seen < (state.width or 0)
    return open_ and state.regime.evicts_prompt and not state.bound_policy.keeps_all


def pack(state: State, *, read: bool) -> None:
    """Pack what came, but for the last entries of each row: after a read, and while decoding whenever a group
    has come. Where the best entries stay as they are, the moments of eviction alone say which; and what will
    be evicted from at the end of the prompt is packed then.

    Args:
        read: whether a prompt, a part of one or a turn was read, rather than a token decoded.
    """
    bound, regime = state.bound_policy, state.regime
    precision = bound.precision
    if precision is None or not precision.packs_what_came:
        return
    if "chunked" not in regime.parts and _prompt_comes(state, state.num_seen):
        return
    # What a later eviction wants to know of the last entries is noted where they came.
    noted = bound.keeps_all or not regime.again or state.noted == state.num_seen
    if noted and (read or state.num_seen - state.packed_at >= precision.every):
        with state.changing():
            for store in state.stores:
                if isinstance(store, TieredStore):
                    store.pack_()
        state.packed_at = state.num_seen
