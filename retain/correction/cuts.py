"""Cuts a layer's store, and lets the entries that stay make up for those that go.

The logarithm of what an entry counts is the side column `LOG_WEIGHT`, zero for new entries.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.cache.layout import normal_tensors
from retain.cache.store import LOG_WEIGHT, RaggedStore
from retain.correction.merge import Merge, Merged, merge


def correct_(
    store: RaggedStore,
    keys_BHTD: Float[Tensor, "B H T D"],
    values_BHTD: Float[Tensor, "B H T V"],
    exists_BHT: Bool[Tensor, "B H T"],
    keep_BHT: Bool[Tensor, "B H T"],
    correction: Merge,
) -> None:
    """Let the entries of a store make up for those of a dense layer that it was cut from.

    Args:
        exists_BHT: False on padding.
        keep_BHT: entries that the store holds.
    """
    if torch.equal(keep_BHT, exists_BHT):  # nothing goes, and no side column is written
        return
    keys_RTD, values_RTV = keys_BHTD.flatten(0, 1), values_BHTD.flatten(0, 1)
    exists_RT, keep_RT = exists_BHT.flatten(0, 1), keep_BHT.flatten(0, 1)
    _write_(store, merge(keys_RTD, values_RTV, exists_RT, keep_RT, correction))


def cut_(
    store: RaggedStore, keep_N: Bool[Tensor, " N"], correction: Merge | None, *, in_place: bool = False
) -> None:
    """Keep some entries of a store.

    Args:
        keep_N: True = kept, in the order of `flat()`.
        correction: None: nothing makes up for the others.
        in_place: leave the store its size.
    """
    merged = None
    if correction is not None and not bool(keep_N.all()):
        assert store.packed is None, "entries in few bits are not merged (retain.capability)"
        merged = _merged(store, keep_N, correction)
    if in_place:
        store.compact_(keep_N)
    else:
        store.filter_(keep_N)
    if merged is not None:
        _write_(store, merged)


def _merged(store: RaggedStore, keep_N: Tensor, correction: Merge) -> Merged:
    """Compute the kept entries after the merge."""
    lengths_R1 = store.lengths_R.long()[:, None]
    place_T = torch.arange(int(lengths_R1.max()), device=lengths_R1.device)
    exists_RT = place_T < lengths_R1
    index_RT = torch.where(exists_RT, store.offsets_R1[:-1, None] + place_T, 0)
    keep_RT = torch.zeros_like(exists_RT).masked_scatter(exists_RT, keep_N)
    weight_RT = None if store.log_weight_C is None else store.log_weight_C[index_RT].exp()
    keys_RTD, values_RTV = store.keys_CD[index_RT], store.values_CD[index_RT]
    return merge(keys_RTD, values_RTV, exists_RT, keep_RT, correction, weight_RT)


@normal_tensors()
def _write_(store: RaggedStore, merged: Merged) -> None:
    """Write the merged values, and what each entry counts."""
    store.values_CD.index_copy_(0, store.index_N(), merged.values_NV)
    store.write_side_(LOG_WEIGHT, merged.weight_N.log())
