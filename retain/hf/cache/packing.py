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
from retain.precision import Precision, balance_of, channels_of


def packing_of(
    precision: Precision | None,
    evidence: Evidence | None,
    keep_BHT: Tensor | None = None,
    eviction: LayerByLayer | OneByOne | JointReEviction | None = None,
) -> Packing | None:
    """How a layer is packed once it is cut; None: it stays as it is.

    Args:
        precision: the policy's.
        evidence: of the layer, before anything of it went.
        keep_BHT: what is kept.
        eviction: that cuts it.

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
        channels = None
        if precision.channels < 1:
            kept_BHT = evidence.exists_BHT if keep_BHT is None else keep_BHT
            channels = tuple(channels_of(evidence, precision, kept_BHT))
        rows = Rows(balance_of(evidence) if precision.balance else None, channels)
    if not isinstance(eviction, LayerByLayer):
        return Packing(precision, rows)
    return Packing(precision, rows, eviction.full, now=not eviction.plan.shares.split.crosses_layers)


def with_fulls(packings: Sequence[Packing | None], fulls: Sequence[Tensor] | None) -> list[Packing | None]:
    """The same, for layers of which some entries stay as they are."""
    if fulls is None:
        return list(packings)
    return [
        None if packing is None else replace(packing, full_BHT=full_BHT)
        for packing, full_BHT in zip(packings, fulls, strict=True)
    ]


def pack(state: State, *, read: bool) -> None:
    """Pack what came, but for the last entries of each row: after a read, and while decoding whenever a group
    has come. Where the best entries stay as they are, the moments of eviction alone say which.

    Args:
        read: whether a prompt, a part of one or a turn was read, rather than a token decoded.
    """
    precision = state.bound_policy.precision
    if precision is None or not precision.packs_what_came:
        return
    # What a later eviction wants to know of the last entries is noted where they came.
    noted = not state.regime.again or state.noted == state.num_seen
    if noted and (read or state.num_seen - state.packed_at >= int(precision.group)):
        with state.changing():
            for store in state.stores:
                if isinstance(store, TieredStore):
                    store.pack_()
        state.packed_at = state.num_seen
