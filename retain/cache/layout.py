"""Rooms of ragged rows in a store: where each row lies, how many entries it holds, and columns in them."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from retain.cache.moves import copy_, spans
from retain.kernels.ragged_attention.pages import PAGE, Pages, pages_for


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
        """Replace columns, one after another, by those of their entries `where` (None: all) in these rooms.

        Zeros elsewhere, not garbage: a masked entry has weight 0, and 0 x NaN would still be NaN.

        Args:
            but: names of columns that stay.
        """
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
    """Bytes of the storages behind tensors, of each once; of a storage that others share, those of the parts
    that are seen here."""
    seen: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        _, parts = seen.get(storage.data_ptr(), (0, 0))
        seen[storage.data_ptr()] = storage.nbytes(), parts + tensor.numel() * tensor.element_size()
    return sum(min(pair) for pair in seen.values())
