"""Merges what goes into what stays: a kept entry becomes a mean of itself and of those that were evicted with
keys like its key.

A query that would have attended to several entries with alike keys attends to the one that is left, and finds
their mean there. The logarithm of what an entry counts, itself and those that went into it, is added to its
logits from then on (`retain.cache.store.LOG_WEIGHT`), so that a query pays a mean what it would have paid all
of them: 4 bytes an entry, which are part of every budget.
"""

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import normalize

from retain.config import STRICT, Whole

# Cosines that exist at a time.
COSINES = 1 << 24
# Bytes of what is added to the logits of an entry.
METADATA_BYTES = torch.float32.itemsize


@dataclass(frozen=True, config=STRICT)
class Merge:
    """Settings.

    Args:
        threshold: least cosine of two keys, after RoPE, at which the entry that goes is merged; -1 merges
            all.
        recent: last entries of a row that nothing is merged into. They may be a question, whose keys are like
            those of what it asks for: a mean in the place of its values is another question.
    """

    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.8
    recent: Whole = 32


class Merged(NamedTuple):
    """Holds what kept entries become, row after row, in order of time.

    Attributes:
        values_NV: in the precision of the values.
        weight_N: what each counts, by the entries that it stands for, itself included.
    """

    values_NV: Float[Tensor, "N V"]
    weight_N: Float32[Tensor, " N"]


def merge(
    keys_RTD: Float[Tensor, "R T D"],
    values_RTV: Float[Tensor, "R T V"],
    exists_RT: Bool[Tensor, "R T"],
    keep_RT: Bool[Tensor, "R T"],
    how: Merge,
    weight_RT: Float32[Tensor, "R T"] | None = None,
) -> Merged:
    """Merge evicted entries into kept ones.

    An evicted entry e goes to the kept entry of its row with the largest `cos(k_e, k_j)`, the first of equal
    ones, if that is at least the threshold; else it is lost. The last `recent` entries of a row take none.
    With `E_j` those that go to j, and `w` what an entry counts by earlier merges (nothing counts twice),
    `v_j <- (w_j v_j + sum_{e in E_j} w_e v_e) / (w_j + sum_{e in E_j} w_e)`, and the denominator becomes
    `w_j`.

    It costs `2 M K D` operations for M evicted entries that are compared with K kept ones each, in blocks: no
    more than `COSINES` cosines exist. It waits for the device: how many entries each row keeps is data.

    Args:
        keys_RTD: of each row, a sequence's KV head; after norm and RoPE; in order of time.
        exists_RT: False where a row has no entry.
        keep_RT: which entries stay.
        weight_RT: what each counts; None: 1 each.
    """
    keep_RT = keep_RT & exists_RT
    if weight_RT is None:
        weight_RT = torch.ones_like(keep_RT, dtype=torch.float32)
    row_N, column_N = keep_RT.nonzero(as_tuple=True)
    number_RT = exists_RT.cumsum(-1)
    takes_RT = number_RT <= number_RT[:, -1:] - how.recent
    number_K = takes_RT[row_N, column_N].nonzero()[:, 0]  # of kept entries that others may be merged into
    row_M, column_M = (exists_RT & ~keep_RT).nonzero(as_tuple=True)
    cosine_M, place_M = _nearest(keys_RTD, row_M, column_M, row_N[number_K], column_N[number_K])
    goes_M = cosine_M >= how.threshold
    row_M, column_M, to_M = row_M[goes_M], column_M[goes_M], number_K[place_M[goes_M]]
    added_M = weight_RT[row_M, column_M]
    count_N = weight_RT[row_N, column_N]
    weight_N = count_N.index_add(0, to_M, added_M)

    # The weighted means; an entry that nothing was added to stays as it was, to the bit.
    old_NV = values_RTV[row_N, column_N]
    exact = torch.promote_types(old_NV.dtype, torch.float32)
    sums_NV = old_NV.to(exact) * count_N[:, None]
    for here in _blocks(len(row_M), values_RTV.shape[-1]):
        added_mV = values_RTV[row_M[here], column_M[here]].to(exact) * added_M[here, None]
        sums_NV.index_add_(0, to_M[here], added_mV)
    new_NV = (sums_NV / weight_N[:, None]).to(old_NV.dtype)
    return Merged(torch.where((weight_N > count_N)[:, None], new_NV, old_NV), weight_N)


def _nearest(
    keys_RTD: Float[Tensor, "R T D"],
    row_M: Int[Tensor, " M"],
    column_M: Int[Tensor, " M"],
    row_K: Int[Tensor, " K"],
    column_K: Int[Tensor, " K"],
) -> tuple[Float32[Tensor, " M"], Int[Tensor, " M"]]:
    """Finds for each of M entries, row after row, the largest cosine with one of the K of its row, the first
    of equal ones (-inf: the row has none), and that one's number among the K."""
    cosine_M = keys_RTD.new_full(row_M.shape, float("-inf"), dtype=torch.float32)
    place_M = torch.zeros_like(row_M)
    counts = torch.stack([torch.bincount(row, minlength=len(keys_RTD)) for row in (row_M, row_K)], 1).tolist()
    asked, first = 0, 0
    for row_TD, (num_asked, num_kept) in zip(keys_RTD, counts, strict=True):
        kept_kD = _directions(row_TD[column_K[first : first + num_kept]])
        for here in _blocks(num_asked, num_kept) if num_kept else ():
            block = slice(asked + here.start, asked + here.stop)
            cosine_mk = (_directions(row_TD[column_M[block]]) @ kept_kD.mT).float()
            cosine_M[block], place_m = cosine_mk.max(-1)
            place_M[block] = place_m + first
        asked, first = asked + num_asked, first + num_kept
    return cosine_M, place_M


def _directions(keys: Tensor) -> Tensor:
    """Keys of length 1, in the precision that they have."""
    return normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1).to(keys.dtype)


def _blocks(count: int, size: int) -> Iterator[slice]:
    """Parts of so many that no more than `COSINES` numbers exist, each having `size`."""
    step = max(1, COSINES // size)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
