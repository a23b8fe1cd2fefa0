"""Cuts a layer's store, and lets what stays make up for what goes.

The logarithm of what an entry counts, by the others that it stands for, is a side column, zero for new
entries: `LOG_WEIGHT` where attention adds it to logits, and else `MERGED`, as long as something may go again.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.cache.layer_store import Store
from retain.cache.layout import normal_tensors
from retain.cache.store import LOG_WEIGHT, RaggedStore
from retain.correction.merge import Merge, Merged, merge

# The logarithm of what each entry counts.
MERGED = "log_merged"


def forget_notes_(store: Store) -> None:
    """Drop side columns that only a later eviction reads."""
    store.drop_side_(*({*store.side} - {LOG_WEIGHT}))


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
        keep_BHT: what the store holds.
    """
    if torch.equal(keep_BHT, exists_BHT):  # nothing goes, and no side column is written
        return
    keys_RTD, values_RTV = keys_BHTD.flatten(0, 1), values_BHTD.flatten(0, 1)
    exists_RT, keep_RT = exists_BHT.flatten(0, 1), keep_BHT.flatten(0, 1)
    _write_(store, merge(keys_RTD, values_RTV, exists_RT, keep_RT, correction), correction.count)


def cut_(
    store: Store, keep_N: Bool[Tensor, " N"], correction: Merge | None, *, in_place: bool = False
) -> None:
    """Keep some entries of a store.

    Args:
        keep_N: True = kept, in the order of `flat()`.
        correction: None: what goes is lost.
        in_place: leave the store its size.

    """
    merged = None
    if correction is not None and not bool(keep_N.all()):
        # `retain.capability`: what is in fewer bits is cut without a correction.
        assert store.packed is None
        merged = _merged(store.plain, keep_N, correction)
    store.evict_(keep_N, in_place=in_place)
    if merged is not None and correction is not None:
        _write_(store.plain, merged, correction.count)


def _merged(store: RaggedStore, keep_N: Tensor, correction: Merge) -> Merged:
    """Computes what the entries that are kept become."""
    lengths_R1 = store.lengths_R.long()[:, None]
    place_T = torch.arange(int(lengths_R1.max()), device=lengths_R1.device)
    exists_RT = place_T < lengths_R1
    index_RT = torch.where(exists_RT, store.offsets_R1[:-1, None] + place_T, 0)
    keep_RT = torch.zeros_like(exists_RT).masked_scatter(exists_RT, keep_N)
    columns = [store.side[name] for name in (LOG_WEIGHT, MERGED) if name in store.side]
    weight_RT = columns[0][index_RT].exp() if columns else None
    keys_RTD, values_RTV = store.keys_CD[index_RT], store.values_CD[index_RT]
    return merge(keys_RTD, values_RTV, exists_RT, keep_RT, correction, weight_RT)


@normal_tensors()
def _write_(store: RaggedStore, merged: Merged, counted: bool) -> None:
    """Give entries what they became, and note what each counts."""
    store.values_CD.index_copy_(0, store.index_N(), merged.values_NV)
    store.write_side_(LOG_WEIGHT if counted else MERGED, merged.weight_N.log())
