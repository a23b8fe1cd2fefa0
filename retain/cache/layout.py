"""Rooms of ragged rows in a store, and copies of entries from room to room.

Of a column no more than a piece exists twice while it is copied within its rooms, so that rows are packed in
place; a store is laid out anew column by column. Every bit of every type comes through.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from retain.kernels.ragged_attention.pages import PAGE, Pages, pages_for

# Bytes copied at a time: on a CPU what stays in a core's cache; elsewhere every piece is a launch.
PIECE, LARGE_PIECE = 1 << 20, 1 << 26


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Context for making tensors that can be written to after a caller's `inference_mode`."""
    with torch.inference_mode(False), torch.no_grad():  # the first alone would turn gradients on
        yield


@dataclass(frozen=True, eq=False)
class Layout:
    """Rooms of the rows, each of whole pages, and how many entries each row holds."""

    pages: Pages
    offsets_R1: Int[Tensor, " R1"]
    lengths_R: Int[Tensor, " R"]
    free: int

    @classmethod
    @normal_tensors()
    def of(cls, lengths_R: Tensor, slack: int) -> "Layout":
        """Rooms for these lengths and slack."""
        lengths = lengths_R.tolist()
        pages = Pages.of([pages_for(length + slack) for length in lengths], lengths_R.device)
        return cls(pages, pages.offsets(), lengths_R.to(torch.int32, copy=True), count_free(pages, lengths))

    def index_N(self) -> Int[Tensor, " N"]:
        """Place of every entry, row after row."""
        return spans(self.offsets_R1[:-1], self.lengths_R)

    def fill_(
        self, columns: dict[str, Tensor], where: tuple[Tensor, ...] | None, but: Collection[str] = ()
    ) -> None:
        """Replace columns, one after another, by those of their entries `where` (None: all) in these rooms;
        columns `but` stay. Zeros elsewhere: a masked entry has weight 0, and 0 x NaN would still be NaN."""
        index_N = self.index_N()
        for name in [name for name in columns if name not in but]:
            source = columns[name]
            column = source.new_zeros(self.pages.num_pages * PAGE, *source.shape[len(where or (0,)) :])
            copy_(column, index_N, source, where)
            columns[name] = column


def count_free(pages: Pages, lengths: Sequence[int]) -> int:
    """Number of new tokens that fit into every room."""
    rooms = (PAGE * count for count in pages.counts)
    return min((room - length for room, length in zip(rooms, lengths, strict=True)), default=0)


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages behind tensors, of each once; of a shared one, of the parts seen here."""
    seen: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        _, parts = seen.get(storage.data_ptr(), (0, 0))
        seen[storage.data_ptr()] = storage.nbytes(), parts + tensor.numel() * tensor.element_size()
    return sum(min(pair) for pair in seen.values())


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

    Target and source may be one tensor if both indices ascend and no entry moves to a later place.
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
    evicted_N1 = pad((~keep_N).cumsum(0), (1, 0))
    evicted_R1 = evicted_N1[pad(held_R.cumsum(0), (1, 0))]
    evicted_R = evicted_R1.diff()
    # Evicted entries before each one, in its row.
    holes_N = evicted_N1[1:] - torch.repeat_interleave(evicted_R1[:-1], held_R)
    moved = (keep_N & (holes_N > 0)).nonzero()[:, 0]
    from_N = spans(starts_R, held_R)[moved]
    return from_N, from_N - holes_N[moved], spans(starts_R + held_R - evicted_R, evicted_R), evicted_R
