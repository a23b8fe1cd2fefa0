"""Merges what goes into what stays: a kept entry becomes a mean of itself and of those that were evicted with
keys like its key.

A query that would have attended to several entries with alike keys attends to the one that is left, and finds
their mean there. The logarithm of what an entry counts, itself and those that went into it, is added to its
logits from then on (`retain.cache.store.LOG_WEIGHT`), so that a query pays a mean what it would have paid all
of them: 4 bytes an entry, which are part of every budget.
"""

from collections.abc import Iterator
from itertools import accumulate
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
# Kept entries of a row that others are compared with at a time: rows that keep fewer cost less.
KEPT = 1024


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

    It costs `2 R T K D` operations for K kept entries a row, in blocks: no more than `COSINES` cosines exist.
    It waits for the device: how many entries each row keeps is data.

    Args:
        keys_RTD: of each row, a sequence's KV head; after norm and RoPE; in order of time.
        exists_RT: False where a row has no entry.
        keep_RT: which entries stay.
        weight_RT: what each counts; None: 1 each.
    """
    keep_RT = keep_RT & exists_RT
    if weight_RT is None:
        weight_RT = torch.ones_like(keep_RT, dtype=torch.float32)
    places = _Places.of(keep_RT, _takes(exists_RT, how.recent))
    cosine_RT, to_RT = _targets(keys_RTD, keep_RT, places)
    goes_RT = exists_RT & ~keep_RT & (cosine_RT >= how.threshold)
    row_M, column_M = goes_RT.nonzero(as_tuple=True)
    to_M = to_RT[row_M, column_M]
    added_M = weight_RT[row_M, column_M]
    count_N = weight_RT[places.row_N, places.column_N]
    weight_N = count_N.index_add(0, to_M, added_M)

    # The weighted means; an entry that nothing was added to stays as it was, to the bit.
    old_NV = values_RTV[places.row_N, places.column_N]
    exact = torch.promote_types(old_NV.dtype, torch.float32)
    sums_NV = old_NV.to(exact) * count_N[:, None]
    for here in _blocks(len(row_M), values_RTV.shape[-1]):
        added_mV = values_RTV[row_M[here], column_M[here]].to(exact) * added_M[here, None]
        sums_NV.index_add_(0, to_M[here], added_mV)
    new_NV = (sums_NV / weight_N[:, None]).to(old_NV.dtype)
    return Merged(torch.where((weight_N > count_N)[:, None], new_NV, old_NV), weight_N)


class _Places(NamedTuple):
    """Kept entries: row and column of each, row after row. And those that others may be merged into: column
    and number among all kept, a row, filled up with zeros, and how many a row."""

    row_N: Int[Tensor, " N"]
    column_N: Int[Tensor, " N"]
    column_RK: Int[Tensor, "R K"]
    number_RK: Int[Tensor, "R K"]
    counts: list[int]

    @classmethod
    def of(cls, keep_RT: Bool[Tensor, "R T"], takes_RT: Bool[Tensor, "R T"]) -> "_Places":
        row_N, column_N = keep_RT.nonzero(as_tuple=True)
        number_K = takes_RT[row_N, column_N].nonzero()[:, 0]
        row_K = row_N[number_K]
        counts = torch.bincount(row_K, minlength=len(keep_RT)).tolist()
        begins_R = torch.tensor([0, *accumulate(counts)][:-1], device=row_N.device)
        place_K = torch.arange(len(row_K), device=row_N.device) - begins_R[row_K]
        empty_RK = row_N.new_zeros(len(counts), max(counts, default=0))
        column_RK = empty_RK.index_put((row_K, place_K), column_N[number_K])
        return cls(row_N, column_N, column_RK, empty_RK.index_put((row_K, place_K), number_K), counts)


def _takes(exists_RT: Bool[Tensor, "R T"], recent: int) -> Bool[Tensor, "R T"]:
    """Which entries others may be merged into, if they stay."""
    number_RT = exists_RT.cumsum(-1)
    return exists_RT & (number_RT <= number_RT[:, -1:] - recent)


def _targets(
    keys_RTD: Float[Tensor, "R T D"],
    keep_RT: Bool[Tensor, "R T"],
    places: _Places,
) -> tuple[Float32[Tensor, "R T"], Int[Tensor, "R T"]]:
    """Finds for every entry the largest cosine with a kept one that it may go to (-inf: there is none), and
    that one's number among all kept."""
    cosine_RT = keys_RTD.new_full(keep_RT.shape, float("-inf"), dtype=torch.float32)
    to_RT = torch.zeros_like(cosine_RT, dtype=torch.int64)
    # Rows that keep most come first, so that those that are still compared are the first few.
    order = sorted(range(len(places.counts)), key=lambda row: -places.counts[row])
    order_R = torch.tensor(order, device=keep_RT.device, dtype=torch.int64)
    kept_RK = places.column_RK[order_R]
    kept_RKD = _directions(keys_RTD[order_R[:, None], kept_RK])
    counts = [places.counts[row] for row in order]
    for here in _blocks(keep_RT.shape[1], KEPT * max(1, len(order))):
        best_Rt, place_Rt = _nearest(_directions(keys_RTD[order_R, here]), kept_RKD, counts)
        cosine_RT[order_R, here] = best_Rt
        if places.column_RK.shape[1]:
            to_RT[order_R, here] = places.number_RK[order_R].gather(1, place_Rt)
    return cosine_RT, to_RT


def _directions(keys: Tensor) -> Tensor:
    """Keys of length 1, in the precision that they have."""
    return normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1).to(keys.dtype)


def _blocks(count: int, size: int) -> Iterator[slice]:
    """Parts of so many that no more than `COSINES` numbers exist, each having `size`."""
    step = max(1, COSINES // size)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _nearest(
    asked_RtD: Float[Tensor, "R t D"],
    kept_RKD: Float[Tensor, "R K D"],
    counts: list[int],
) -> tuple[Float32[Tensor, "R t"], Int[Tensor, "R t"]]:
    """Largest cosine with a kept entry of the row, and its place among the row's; -inf where there is none.

    Args:
        counts: kept entries of each row, descending.
    """
    best_Rt = asked_RtD.new_full(asked_RtD.shape[:2], float("-inf"), dtype=torch.float32)
    place_Rt = torch.zeros_like(best_Rt, dtype=torch.int64)
    count_R11 = torch.tensor(counts, device=asked_RtD.device)[:, None, None]
    for start in range(0, max(counts, default=0), KEPT):
        rows = slice(sum(count > start for count in counts))
        kept_rkD = kept_RKD[rows, start : start + KEPT]
        cosine_rtk = (asked_RtD[rows] @ kept_rkD.mT).float()
        number_k = torch.arange(start, start + kept_rkD.shape[1], device=asked_RtD.device)
        barred_rtk = number_k >= count_R11[rows]
        top_rt, number_rt = cosine_rtk.masked_fill_(barred_rtk, float("-inf")).max(-1)
        better_rt = top_rt > best_Rt[rows]
        place_Rt[rows] = torch.where(better_rt, number_rt + start, place_Rt[rows])
        best_Rt[rows] = torch.where(better_rt, top_rt, best_Rt[rows])
    return best_Rt, place_Rt
