"""Copies the entries of ragged rows along indices, piece by piece.

Of a column no more than a piece exists twice, so that rows are packed in place and a store is laid out anew
column by column. Every bit of every type comes through.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

# Bytes copied at a time: on a CPU what stays in a core's cache; elsewhere every piece is a launch.
PIECE, LARGE_PIECE = 1 << 20, 1 << 26


def spans(starts_R: Int[Tensor, " R"], lengths_R: Int[Tensor, " R"]) -> Int[Tensor, " N"]:
    """`starts[r] .. starts[r] + lengths[r]` of every row, one after another (int64).

    Examples:
        >>> spans(torch.tensor([0, 64]), torch.tensor([2, 3])).tolist()
        [0, 1, 64, 65, 66]
    """
    lengths_R = lengths_R.to(torch.int64)
    rows_N = torch.repeat_interleave(lengths_R)
    before_R = lengths_R.cumsum(0) - lengths_R
    return torch.arange(rows_N.shape[0], device=rows_N.device) + (starts_R - before_R)[rows_N]


def copy_(
    target_C: Tensor, index_N: Int[Tensor, " N"], source: Tensor, where: tuple[Tensor, ...] | None = None
) -> None:
    """`target[index[n]] = source[where[0][n], ...]`, piece by piece (`source[n]` without `where`).

    Target and source may be one tensor if both indices ascend and no entry moves to a later place: entries
    that a piece overwrites were moved before, or are moved with it.
    """
    width = max(1, target_C[:1].numel()) * target_C.element_size()
    step = max(1, (PIECE if target_C.device.type == "cpu" else LARGE_PIECE) // width)
    for start in range(0, index_N.shape[0], step):
        some = slice(start, start + step)
        if where is None:
            piece = source[some]
        elif len(where) == 1:
            piece = source.index_select(0, where[0][some])
        else:
            piece = source[tuple(axis[some] for axis in where)]
        target_C.index_copy_(0, index_N[some], piece.detach().to(target_C.dtype))


def packing(
    keep_N: Bool[Tensor, " N"], offsets_R1: Int[Tensor, " R1"], lengths_R: Int[Tensor, " R"]
) -> tuple[Int[Tensor, " moved"], Int[Tensor, " moved"], Int[Tensor, " freed"], Int[Tensor, " R"]]:
    """Plans the packing of every row in place: only entries behind a row's first hole move.

    Args:
        keep_N: which entries stay, row after row.
        offsets_R1: where each row's room begins and ends.
        lengths_R: entries held by each row.

    Returns:
        where moved entries lie, where they go, the slots that become free, and how many entries each row
        loses.

    Examples:
        >>> keep = torch.tensor([True, False, True, True, True])
        >>> [index.tolist() for index in packing(keep, torch.tensor([0, 64, 128]), torch.tensor([3, 2]))]
        [[2], [1], [2], [1, 0]]
    """
    held_R = lengths_R.to(torch.int64)
    starts_R = offsets_R1[:-1]
    gone_N1 = pad((~keep_N).cumsum(0), (1, 0))
    gone_R1 = gone_N1[pad(held_R.cumsum(0), (1, 0))]
    gone_R = gone_R1.diff()
    # Evicted entries before each one, in its row.
    holes_N = gone_N1[1:] - torch.repeat_interleave(gone_R1[:-1], held_R)
    moved = (keep_N & (holes_N > 0)).nonzero()[:, 0]
    from_N = spans(starts_R, held_R)[moved]
    return from_N, from_N - holes_N[moved], spans(starts_R + held_R - gone_R, gone_R), gone_R
