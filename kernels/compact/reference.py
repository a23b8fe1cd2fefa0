"""Reference of `compact_` and `append_`: entries copied along indices; the definition, and the path on a CPU.

Entries move in pieces, in ascending order, so that one piece and not a store exists twice, and a store can be
packed in place.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

# Bytes that are copied at a time: on a CPU what stays in a core's cache; elsewhere every piece is a launch.
PIECE, LARGE_PIECE = 1 << 20, 1 << 26
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
# Types that PyTorch copies along indices; others are copied as whole numbers of their size.
_COPIED = {*WORDS.values(), torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32}
_COPIED |= {torch.float64, torch.complex64, torch.complex128}


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
    # Evicted entries before each one, in its own row.
    holes_N = gone_N1[1:] - torch.repeat_interleave(gone_R1[:-1], held_R)
    moved = (keep_N & (holes_N > 0)).nonzero()[:, 0]
    from_N = spans(starts_R, held_R)[moved]
    return from_N, from_N - holes_N[moved], spans(starts_R + held_R - gone_R, gone_R), gone_R


def as_words(column_C: Tensor, widest: int = 8) -> Int[Tensor, "C words"] | None:
    """A column as whole numbers, the widest that an entry's bytes and place allow: a view, through which bits
    are copied whatever they mean. None where an entry's numbers do not lie one behind another.

    Args:
        column_C: `[C, ...]`.
        widest: bytes of a word at most.
    """
    if not column_C.numel():
        return column_C.new_empty((column_C.shape[0], 0), dtype=torch.int8)
    numbers = 1
    for size, stride in zip(column_C.shape[:0:-1], column_C.stride()[:0:-1], strict=True):
        if size > 1 and stride != numbers:
            return None
        numbers *= size
    flat = column_C.detach().view(column_C.shape[0], numbers)
    return flat.view(WORDS[word_bytes(flat, widest=widest)])


def word_bytes(*flat: Tensor, widest: int = 8) -> int:
    """Bytes of the widest word in which all of these can be copied, entry by entry: the last axis is an
    entry's numbers."""
    common = widest
    for tensor in flat:
        size = tensor.element_size()
        steps = [step for step, times in zip(tensor.stride()[:-1], tensor.shape, strict=False) if times > 1]
        numbers = (tensor.shape[-1], tensor.storage_offset(), *steps)
        common = math.gcd(common, tensor.data_ptr(), *(size * number for number in numbers))
    return common


def move_(
    columns: Sequence[Tensor],
    from_N: Int[Tensor, " moved"],
    to_N: Int[Tensor, " moved"],
    freed: Int[Tensor, " freed"],
) -> None:
    """Carry out a packing, one column after another."""
    for column in columns:
        # PyTorch copies words of 4 bytes as fast as float32, and those of 8 a little slower.
        words = as_words(column, widest=4)
        words = column if words is None else words
        copy_(words, to_N, words, (from_N,))
        # Not what they held: 0 x NaN is NaN, and a side column's free slots are zeros.
        words.index_fill_(0, freed, 0)


def append_(
    columns: Sequence[Tensor],
    new: Sequence[Tensor],
    offsets_R1: Int[Tensor, " R1"],
    lengths_R: Int[Tensor, " R"],
    valid_BS: Bool[Tensor, "B S"] | None = None,
) -> Int[Tensor, "R S"]:
    """See the op."""
    B, H, S = new[0].shape[:3]
    starts_R, valid_RS = offsets_R1[:-1], None
    num_new: Tensor | int = S
    if valid_BS is not None:
        valid_RS = valid_BS[:, None].expand(B, H, S).flatten(0, 1)
        rank_RS = valid_RS.cumsum(-1)
        seen_RS = (lengths_R[:, None] + rank_RS).masked_fill_(~valid_RS, 0)
        index_RS = seen_RS + (starts_R[:, None] - 1)
        num_new = rank_RS[:, -1] if S else 0
    elif S == 1:  # a step of decoding: it takes as long as there are calls
        held_R = lengths_R.to(torch.int64)
        seen_RS, index_RS = (held_R + 1)[:, None], starts_R + held_R
    else:
        seen_RS = lengths_R[:, None] + torch.arange(1, S + 1, device=lengths_R.device)
        index_RS = seen_RS + (starts_R[:, None] - 1)
    write_(zip(columns, new, strict=True), index_RS.flatten(), valid_RS)
    # Only now are they held: had a write failed, free slots would have been written to.
    lengths_R += num_new
    return seen_RS


def write_(
    columns: Iterable[tuple[Tensor, Tensor]],
    index_N: Int[Tensor, " N"],
    valid_RS: Bool[Tensor, "R S"] | None,
) -> None:
    """Write `[B, H, S, ...]` into these slots, or the valid ones of them, for each (column, values)."""
    if valid_RS is not None:
        real = valid_RS.flatten().nonzero()[:, 0]
        index_N = index_N.index_select(0, real)
    for column, values in columns:
        values = (values.detach() if values.requires_grad else values).flatten(0, 2)
        if valid_RS is not None:
            values = values.index_select(0, real)
        values = values.to(column.dtype)
        if column.dtype not in _COPIED:
            word = WORDS[column.dtype.itemsize]
            column, values = column.view(word), values.view(word)
        column.index_copy_(0, index_N, values)
