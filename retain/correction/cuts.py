"""Cuts a layer's store, and lets what stays make up for what goes.

The logarithm of what an entry counts, by the others that it stands for, is a side column, zero for new
entries: `LOG_WEIGHT` where attention adds it to logits, and else `MERGED`, as long as something may go again.
A row's moving threshold is one too, which all of its entries carry that were there.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.cache.store import LOG_WEIGHT, RaggedStore, normal_tensors
from retain.cache.tiered_store import Store, TieredStore, plain_of
from retain.correction import Correction
from retain.correction.merge import Merge, Merged, merge
from retain.correction.refit import Refit, refit
from retain.evidence import Evidence

# The logarithm of what each entry counts; and 2 + the last moving threshold of its row.
MERGED, THRESHOLD = COLUMNS = ("log_merged", "merge_threshold")


NO_QUERIES = (
    "a refit asks by the queries of the whole prompt, which are not held: read the prompt in one forward, in "
    "regime 'prefill' (within a layer's sliding window), or with evict=False, hold_evidence=True and evict() "
    "it then; or merge, which asks nothing (correction={threshold: 0.8})."
)


PACKED = (
    "entries that are held in fewer bits cannot be merged into any more: take a regime that evicts once "
    "('prefill', of a prompt read in one forward), or leave correction or precision out."
)


def forget_notes_(store: Store) -> None:
    """Let go of what stands beside entries for a later eviction, and not for attention."""
    store.forget_beside_(*({*store.beside} - {LOG_WEIGHT}))


def correct_(
    store: RaggedStore,
    keys_BHTD: Float[Tensor, "B H T D"],
    values_BHTD: Float[Tensor, "B H T V"],
    exists_BHT: Bool[Tensor, "B H T"],
    keep_BHT: Bool[Tensor, "B H T"],
    correction: Correction,
    evidence: Evidence | None = None,
) -> None:
    """Let the entries of a store make up for those of a dense layer that it was cut from.

    Args:
        exists_BHT: False on padding.
        keep_BHT: what the store holds.
        evidence: of the layer, with the queries of the whole prompt, for a refit.

    Raises:
        ValueError: a refit, and there is no evidence.
    """
    if torch.equal(keep_BHT, exists_BHT):  # nothing goes, and nothing is written beside what stays
        return
    keys_RTD, values_RTV = keys_BHTD.flatten(0, 1), values_BHTD.flatten(0, 1)
    exists_RT, keep_RT = exists_BHT.flatten(0, 1), keep_BHT.flatten(0, 1)
    if isinstance(correction, Refit):
        if evidence is None:
            raise ValueError(NO_QUERIES)
        fitted = refit(keys_RTD, values_RTV, exists_RT, keep_RT, evidence, correction)
        with normal_tensors():
            store.values_CD.index_copy_(0, store.index_N(), fitted.values_NV)
            if fitted.log_weight_N is not None:
                store.write_beside_(LOG_WEIGHT, fitted.log_weight_N)
        return
    _write_(store, merge(keys_RTD, values_RTV, exists_RT, keep_RT, correction), correction.count)


def cut_(
    store: Store, keep_N: Bool[Tensor, " N"], correction: Correction | None, *, in_place: bool = False
) -> None:
    """Keep some entries of a store.

    Args:
        keep_N: True = kept, in the order of `flat()`.
        correction: None: what goes is lost.
        in_place: leave the store its size (`compact_`, else `filter_`).

    Raises:
        ValueError: a refit, for which there are no queries any more, or entries that are packed already.
    """
    if isinstance(correction, Refit):
        raise ValueError(NO_QUERIES)
    merged = None
    if correction is not None and not bool(keep_N.all()):
        if isinstance(store, TieredStore) and store.packed:
            raise ValueError(PACKED)
        merged = _merged(plain_of(store), keep_N, correction)
    if in_place:
        store.compact_(keep_N)
    else:
        store.filter_(keep_N)
    if merged is not None and correction is not None:
        _write_(plain_of(store), merged, correction.count)


def _merged(store: RaggedStore, keep_N: Tensor, correction: Merge) -> Merged:
    """What the entries that are kept become."""
    lengths_R1 = store.lengths_R.long()[:, None]
    place_T = torch.arange(int(lengths_R1.max()), device=lengths_R1.device)
    exists_RT = place_T < lengths_R1
    index_RT = torch.where(exists_RT, store.offsets_R1[:-1, None] + place_T, 0)
    keep_RT = torch.zeros_like(exists_RT).masked_scatter(exists_RT, keep_N)
    weight_RT = threshold_R = None
    noted = [store.beside[name] for name in (LOG_WEIGHT, MERGED) if name in store.beside]
    if noted:
        weight_RT = noted[0][index_RT].exp()
    if THRESHOLD in store.beside:
        threshold_R = store.beside[THRESHOLD][index_RT].masked_fill(~exists_RT, 0.0).amax(-1) - 2
        threshold_R = threshold_R.masked_fill(threshold_R < -1.5, torch.nan)
    keys_RTD, values_RTV = store.keys_CD[index_RT], store.values_CD[index_RT]
    return merge(keys_RTD, values_RTV, exists_RT, keep_RT, correction, weight_RT, threshold_R)


@normal_tensors()
def _write_(store: RaggedStore, merged: Merged, counted: bool) -> None:
    """Give entries what they became, and note what each counts."""
    index_N = store.index_N()
    store.values_CD.index_copy_(0, index_N, merged.values_NV)
    if merged.keys_ND is not None:
        store.keys_CD.index_copy_(0, index_N, merged.keys_ND)
    store.write_beside_(LOG_WEIGHT if counted else MERGED, merged.weight_N.log())
    if merged.threshold_R is not None:
        store.write_beside_(THRESHOLD, 2 + merged.threshold_R.nan_to_num(-2)[store.rows_N()])
