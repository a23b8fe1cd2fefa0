"""Merges what goes into what stays: a kept entry's value becomes the mean of its own and of those that were
evicted with keys like its key.

A query that would have attended to several entries with alike keys attends to the one that is left, and finds
their mean there. Keys are not changed, so no logit of a kept entry is.

D2O (arXiv 2406.13035) and KVMerger (arXiv 2407.08454) merge keys too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor
from torch.nn.functional import normalize

from retain.config import Range, check_fields

# Cosines that exist at a time.
COSINES = 1 << 24
# Kept entries of a row that others are compared with at a time: rows that keep fewer cost less.
KEPT = 1024


@dataclass(frozen=True)
class Merge:
    """Settings.

    Args:
        threshold: least cosine of two keys, after RoPE, at which the value of the one that goes is merged; -1
            merges all.
    """

    threshold: Annotated[float, Range(least=-1, most=1)] = 0.8

    def __post_init__(self) -> None:
        check_fields(self, "merge")


class Merged(NamedTuple):
    """What kept entries become, row after row, in order of time.

    Attributes:
        values_NV: in the precision of the values.
        weight_N: entries that each stands for, itself included.
    """

    values_NV: Float[Tensor, "N V"]
    weight_N: Float32[Tensor, " N"]


def merge(
    keys_RTD: Float[Tensor, "R T D"],
    values_RTV: Float[Tensor, "R T V"],
    exists_RT: Bool[Tensor, "R T"],
    keep_RT: Bool[Tensor, "R T"],
    threshold: float,
    weight_RT: Float32[Tensor, "R T"] | None = None,
) -> Merged:
    """Merge the values of evicted entries into kept ones.

    An evicted entry e goes to the kept entry of its row with the largest `cos(k_e, k_j)`, the first of equal
    ones, if that is at least the threshold; else it is lost. With `E_j` those that go to j and weights `w`
    (entries that an entry stands for, of earlier merges: nothing counts twice),
    `v_j <- (w_j v_j + sum_{e in E_j} w_e v_e) / (w_j + sum_{e in E_j} w_e)` and `w_j <- w_j + sum w_e`.

    It costs `2 R T K D` operations for K kept entries a row, in blocks: no more than `COSINES` cosines exist.
    It waits for the device: how many entries each row keeps is data.

    Args:
        keys_RTD: of each row, a sequence's KV head; after norm and RoPE.
        exists_RT: False where a row has no entry.
        keep_RT: which entries stay.
        weight_RT: entries that each stands for; None: one each.
    """
    keep_RT = keep_RT & exists_RT
    R, T, _ = keys_RTD.shape
    counts = keep_RT.sum(-1).tolist()
    row_N, column_N = keep_RT.nonzero(as_tuple=True)
    values_NV = values_RTV[row_N, column_N]
    own_N = values_NV.new_ones(len(row_N), dtype=torch.float32)
    if weight_RT is not None:
        own_N = weight_RT[row_N, column_N]
    exact = torch.promote_types(values_NV.dtype, torch.float32)
    if not len(row_N):
        return Merged(values_NV, own_N)
    # Rows that keep most come first, so that those that are still compared are the first few.
    order = sorted(range(R), key=lambda row: -counts[row])
    order_R = torch.tensor(order, device=row_N.device)
    begins_R = torch.tensor([0, *accumulate(counts)][:-1], device=row_N.device)
    place_N = torch.arange(len(row_N), device=row_N.device) - begins_R[row_N]
    kept_RK = row_N.new_zeros(R, max(counts)).index_put((row_N, place_N), column_N)
    kept_RKD = _directions(keys_RTD[order_R[:, None], kept_RK[order_R]])
    sums_NV, weight_N = values_NV.to(exact) * own_N[:, None], own_N.clone()
    for here in _blocks(T, R):
        cosine_Rt, place_Rt = _nearest(_directions(keys_RTD[order_R, here]), kept_RKD, sorted(counts)[::-1])
        merged_Rt = (exists_RT[:, here] & ~keep_RT[:, here])[order_R] & (cosine_Rt >= threshold)
        added_Rt = merged_Rt.float() if weight_RT is None else weight_RT[order_R, here] * merged_Rt
        # Where a row keeps nothing, nothing is merged, anywhere.
        to_N = (begins_R[order_R, None] + place_Rt).clamp_max(len(row_N) - 1).flatten()
        # What is not merged may be anything where no entry is, and 0 x NaN is NaN.
        values_RtV = values_RTV[order_R, here].to(exact).masked_fill(~merged_Rt[..., None], 0.0)
        sums_NV.index_add_(0, to_N, (values_RtV * added_Rt[..., None]).flatten(0, 1))
        weight_N.index_add_(0, to_N, added_Rt.flatten())
    # An entry that nothing was added to stays as it was, to the bit.
    merged_NV = (sums_NV / weight_N[:, None]).to(values_NV.dtype)
    return Merged(torch.where((weight_N > own_N)[:, None], merged_NV, values_NV), weight_N)


def _directions(keys: Tensor) -> Tensor:
    """Keys of length 1, in their own precision."""
    return normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1).to(keys.dtype)


def _blocks(num_entries: int, num_rows: int) -> Iterator[slice]:
    """Entries that are compared at a time."""
    size = max(1, COSINES // (KEPT * max(1, num_rows)))
    for start in range(0, num_entries, size):
        yield slice(start, min(start + size, num_entries))


def _nearest(
    asked_RtD: Float[Tensor, "R t D"], kept_RKD: Float[Tensor, "R K D"], counts: list[int]
) -> tuple[Float32[Tensor, "R t"], Int[Tensor, "R t"]]:
    """Largest cosine with a kept entry of the row, and its place among them; -inf where the row keeps none.

    Args:
        counts: kept entries of each row, descending.
    """
    best_Rt = asked_RtD.new_full(asked_RtD.shape[:2], float("-inf"), dtype=torch.float32)
    place_Rt = torch.zeros_like(best_Rt, dtype=torch.int64)
    count_R11 = torch.tensor(counts, device=asked_RtD.device)[:, None, None]
    for start in range(0, max(counts), KEPT):
        rows = slice(sum(count > start for count in counts))
        kept_rkD = kept_RKD[rows, start : start + KEPT]
        cosine_rtk = (asked_RtD[rows] @ kept_rkD.mT).float()
        number_k = torch.arange(start, start + kept_rkD.shape[1], device=asked_RtD.device)
        top_rt, number_rt = cosine_rtk.masked_fill_(number_k >= count_R11[rows], float("-inf")).max(-1)
        better_rt = top_rt > best_Rt[rows]
        place_Rt[rows] = torch.where(better_rt, number_rt + start, place_Rt[rows])
        best_Rt[rows] = torch.where(better_rt, top_rt, best_Rt[rows])
    return best_Rt, place_Rt
