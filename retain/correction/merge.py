"""Merges what goes into what stays: a kept entry becomes a mean of itself and of those that were evicted with
keys like its key.

A query that would have attended to several entries with alike keys attends to the one that is left, and finds
their mean there; with `count`, it pays that one what it would have paid them all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor
from torch.nn.functional import normalize

from retain.config import Range, Whole, check_fields

# Cosines that exist at a time.
COSINES = 1 << 24
# Kept entries of a row that others are compared with at a time: rows that keep fewer cost less.
KEPT = 1024
# Share of its last value in a moving threshold (D2O as released).
INERTIA = 0.5


@dataclass(frozen=True)
class Merge:
    """Settings.

    Args:
        threshold: least cosine of two keys, after RoPE, at which the entry that goes is merged; -1 merges
            all. `moving`: the mean, over what goes of a row, of each one's largest cosine; of a row that was
            evicted from before, the mean of that and of its last threshold (D2O, arXiv 2406.13035).
        among: kept entries that an entry may go to: `all` of its row, or those of its `run`, in which the
            keys of neighbours have at least the threshold, and which is then all that is asked of the two
            (KVMerger, arXiv 2407.08454).
        weighting: what an entry that goes counts, where the kept one counts 1: `count`, 1; `cosine`,
            `exp(cosine - 1)` (D2O); `distance`, `exp(-d^2 / (2 s^2))` with d the distance of the two keys and
            s the mean of d over what goes to the kept one (KVMerger).
        keys: whether keys become means too.
        count: whether the logarithm of what an entry counts, itself and what went into it, is added to its
            logits from then on (`retain.cache.store.LOG_WEIGHT`): a query pays a mean what it would have paid
            all of them. A number of 4 bytes stands beside each entry, and is part of every budget.
        recent: last entries of a row that nothing is merged into. They may be a question, whose keys are like
            those of what it asks for: a mean in the place of its values is another question.
    """

    threshold: Annotated[float, Range(least=-1, most=1)] | Literal["moving"] = 0.8
    among: Literal["all", "run"] = "all"
    weighting: Literal["count", "cosine", "distance"] = "count"
    keys: bool = False
    count: bool = False
    recent: Whole = 32

    @property
    def beside_bytes(self) -> int:
        """Bytes that attention reads beside each entry."""
        return torch.float32.itemsize if self.count else 0

    def __post_init__(self) -> None:
        check_fields(self, "merge")
        if self.among == "run" and self.threshold == "moving":
            raise ValueError(
                "merge: runs end where a cosine is below the threshold, and a moving one is not known before "
                "they are: take a number, or among 'all'."
            )


class Merged(NamedTuple):
    """What kept entries become, row after row, in order of time.

    Attributes:
        keys_ND: None: they stay as they are.
        values_NV: in the precision of the values.
        weight_N: what each counts, by the entries that it stands for, itself included.
        threshold_R: of each row, where it moves.
    """

    keys_ND: Float[Tensor, "N D"] | None
    values_NV: Float[Tensor, "N V"]
    weight_N: Float32[Tensor, " N"]
    threshold_R: Float32[Tensor, " R"] | None


def merge(
    keys_RTD: Float[Tensor, "R T D"],
    values_RTV: Float[Tensor, "R T V"],
    exists_RT: Bool[Tensor, "R T"],
    keep_RT: Bool[Tensor, "R T"],
    how: Merge,
    weight_RT: Float32[Tensor, "R T"] | None = None,
    threshold_R: Float32[Tensor, " R"] | None = None,
) -> Merged:
    """Merge evicted entries into kept ones.

    An evicted entry e goes to the kept entry of its row, or run, with the largest `cos(k_e, k_j)`, the first
    of equal ones, if that is at least the threshold; else it is lost. The last `recent` entries
    of a row take none. With `E_j` those that go to j, `f_e`
    their factor by `weighting`, and `w` what an entry counts by earlier merges (nothing counts twice),
    `v_j <- (w_j v_j + sum_{e in E_j} f_e w_e v_e) / (w_j + sum_{e in E_j} f_e w_e)`, and the denominator
    becomes `w_j`. Keys alike, if they are merged.

    It costs `2 R T K D` operations for K kept entries a row, in blocks: no more than `COSINES` cosines exist.
    It waits for the device: how many entries each row keeps is data.

    Args:
        keys_RTD: of each row, a sequence's KV head; after norm and RoPE; in order of time.
        exists_RT: False where a row has no entry.
        keep_RT: which entries stay.
        weight_RT: what each counts; None: 1 each.
        threshold_R: the last one of each row, where it moves; NaN or None: none yet.
    """
    keep_RT = keep_RT & exists_RT
    if weight_RT is None:
        weight_RT = torch.ones_like(keep_RT, dtype=torch.float32)
    places = _Places.of(keep_RT, _takes(exists_RT, how.recent))
    cosine_RT, to_RT = _targets(keys_RTD, exists_RT, keep_RT, how, places)
    goes_RT = exists_RT & ~keep_RT & (cosine_RT > float("-inf"))
    if how.threshold == "moving":
        threshold_R = _moved(cosine_RT, goes_RT, threshold_R)
        goes_RT = goes_RT & (cosine_RT >= threshold_R[:, None])
    elif how.among == "all":
        goes_RT = goes_RT & (cosine_RT >= how.threshold)
    row_M, column_M = goes_RT.nonzero(as_tuple=True)
    to_M = to_RT[row_M, column_M]
    added_M = weight_RT[row_M, column_M]
    if how.weighting == "cosine":
        added_M = added_M * (cosine_RT[row_M, column_M] - 1).exp()
    elif how.weighting == "distance":
        kept_MD = keys_RTD[places.row_N[to_M], places.column_N[to_M]]
        added_M = added_M * _nearness(keys_RTD[row_M, column_M], kept_MD, to_M, len(places.row_N))
    own_N = weight_RT[places.row_N, places.column_N]
    weight_N = own_N.index_add(0, to_M, added_M)

    def means(of_RTX: Tensor) -> Tensor:
        """The weighted means; an entry that nothing was added to stays as it was, to the bit."""
        old_NX = of_RTX[places.row_N, places.column_N]
        exact = torch.promote_types(old_NX.dtype, torch.float32)
        sums_NX = old_NX.to(exact) * own_N[:, None]
        for here in _blocks(len(row_M), of_RTX.shape[-1]):
            added_mX = of_RTX[row_M[here], column_M[here]].to(exact) * added_M[here, None]
            sums_NX.index_add_(0, to_M[here], added_mX)
        new_NX = (sums_NX / weight_N[:, None]).to(old_NX.dtype)
        return torch.where((weight_N > own_N)[:, None], new_NX, old_NX)

    keys_ND = means(keys_RTD) if how.keys else None
    return Merged(keys_ND, means(values_RTV), weight_N, threshold_R if how.threshold == "moving" else None)


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
    exists_RT: Bool[Tensor, "R T"],
    keep_RT: Bool[Tensor, "R T"],
    how: Merge,
    places: _Places,
) -> tuple[Float32[Tensor, "R T"], Int[Tensor, "R T"]]:
    """Of every entry, the largest cosine with a kept one that it may go to (-inf: there is none), and that
    one's number among all kept."""
    cosine_RT = keys_RTD.new_full(keep_RT.shape, float("-inf"), dtype=torch.float32)
    to_RT = torch.zeros_like(cosine_RT, dtype=torch.int64)
    # Rows that keep most come first, so that those that are still compared are the first few.
    order = sorted(range(len(places.counts)), key=lambda row: -places.counts[row])
    order_R = torch.tensor(order, device=keep_RT.device, dtype=torch.int64)
    kept_RK = places.column_RK[order_R]
    kept_RKD = _directions(keys_RTD[order_R[:, None], kept_RK])
    run_RT = _runs(keys_RTD, exists_RT, float(how.threshold)) if how.among == "run" else None
    counts = [places.counts[row] for row in order]
    for here in _blocks(keep_RT.shape[1], KEPT * max(1, len(order))):
        apart = None
        if run_RT is not None:
            apart = run_RT[order_R, here], run_RT[order_R[:, None], kept_RK]
        best_Rt, place_Rt = _nearest(_directions(keys_RTD[order_R, here]), kept_RKD, counts, apart)
        cosine_RT[order_R, here] = best_Rt
        if places.column_RK.shape[1]:
            to_RT[order_R, here] = places.number_RK[order_R].gather(1, place_Rt)
    return cosine_RT, to_RT


def _directions(keys: Tensor) -> Tensor:
    """Keys of length 1, in their own precision."""
    return normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1).to(keys.dtype)


def _blocks(count: int, size: int) -> Iterator[slice]:
    """Parts of so many that no more than `COSINES` numbers exist, each having `size`."""
    step = max(1, COSINES // size)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _runs(
    keys_RTD: Float[Tensor, "R T D"], exists_RT: Bool[Tensor, "R T"], threshold: float
) -> Int[Tensor, "R T"]:
    """Number of the run that each entry is in: the cosine of its key and that of the entry before it is at
    least the threshold, or it begins another."""
    unit_RTD = _directions(keys_RTD)
    place_T = torch.arange(keys_RTD.shape[1], device=keys_RTD.device)
    last_RT = torch.where(exists_RT, place_T, 0).cummax(-1).values
    before_RT = torch.nn.functional.pad(last_RT[:, :-1], (1, 0))
    before_RTD = unit_RTD.gather(1, before_RT[..., None].expand_as(unit_RTD))
    cosine_RT = (unit_RTD * before_RTD).float().sum(-1)
    return (exists_RT & ~(cosine_RT >= threshold)).cumsum(-1)


def _nearest(
    asked_RtD: Float[Tensor, "R t D"],
    kept_RKD: Float[Tensor, "R K D"],
    counts: list[int],
    runs: tuple[Int[Tensor, "R t"], Int[Tensor, "R K"]] | None,
) -> tuple[Float32[Tensor, "R t"], Int[Tensor, "R t"]]:
    """Largest cosine with a kept entry of the row, or run, and its place among the row's; -inf where there is
    none.

    Args:
        counts: kept entries of each row, descending.
        runs: of both sides; None: they do not matter.
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
        if runs is not None:
            barred_rtk = barred_rtk | (runs[0][rows, :, None] != runs[1][rows, None, start : start + KEPT])
        top_rt, number_rt = cosine_rtk.masked_fill_(barred_rtk, float("-inf")).max(-1)
        better_rt = top_rt > best_Rt[rows]
        place_Rt[rows] = torch.where(better_rt, number_rt + start, place_Rt[rows])
        best_Rt[rows] = torch.where(better_rt, top_rt, best_Rt[rows])
    return best_Rt, place_Rt


def _moved(
    cosine_RT: Float32[Tensor, "R T"], goes_RT: Bool[Tensor, "R T"], last_R: Float32[Tensor, " R"] | None
) -> Float32[Tensor, " R"]:
    """The moving threshold of each row; where nothing goes, the last one."""
    count_R = goes_RT.sum(-1)
    now_R = cosine_RT.masked_fill(~goes_RT, 0.0).sum(-1) / count_R
    if last_R is None:
        return now_R
    moved_R = torch.where(last_R.isnan(), now_R, INERTIA * last_R + (1 - INERTIA) * now_R)
    return torch.where(count_R > 0, moved_R, last_R)


def _nearness(
    gone_MD: Float[Tensor, "merged D"],
    kept_MD: Float[Tensor, "merged D"],
    to_M: Int[Tensor, " merged"],
    num_kept: int,
) -> Float32[Tensor, " merged"]:
    """`exp(-d^2 / (2 s^2))`, with s the mean of d over what goes to one kept entry."""
    distance_M = (gone_MD.float() - kept_MD.float()).norm(dim=-1)
    count_N = torch.bincount(to_M, minlength=num_kept)
    mean_N = distance_M.new_zeros(num_kept).index_add(0, to_M, distance_M) / count_N
    # Keys that are all the same are at distance 0.
    return (-0.5 * (distance_M / mean_N[to_M].clamp_min(torch.finfo(torch.float32).tiny)) ** 2).exp()
