"""Pages of a ragged store, so that rows of any lengths are attended in one batch.

All pages have `PAGE` entries, and rooms are whole pages in the rows' natural order `b * H + h`. A store is
then also a `[pages, PAGE, D]` view without a copy, its tables change only when the rooms do, and a row
wastes less than a page and its slack.

64 was measured (4 sequences, 8 KV heads, 819 entries a row, D = 128, a CPU): pages of 32 cost about a tenth
more time in attention, pages of 128 save a few percent of it and double the waste of rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor

from retain.kernels.ragged_attention.work import Work, work_of

PAGE = 64
# Ways of cutting it that a layout remembers: decoding needs one, by-products another, chunks one a size.
MOST_PLANNED = 8


@dataclass(frozen=True, eq=False)
class Pages:
    """The layout of a store in pages.

    Args:
        counts: pages of each row's room, on the host.
        row_pages: the row that each page belongs to.
        first_pages: which of its row's entries a page begins with: 0, `PAGE`, 2 `PAGE`, ...
        planned: what `work` has cut so far, by the size asked for.

    Examples:
        >>> pages = Pages.of([1, 2], "cpu")
        >>> pages.row_pages.tolist(), pages.first_pages.tolist(), pages.offsets().tolist()
        ([0, 1, 1], [0, 0, 64], [0, 64, 192])
    """

    counts: tuple[int, ...]
    row_pages: Int[Tensor, " pages"]
    first_pages: Int[Tensor, " pages"]
    planned: dict[int, Work] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device | str) -> "Pages":
        """The tables of rooms of that many pages."""
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        firsts = [PAGE * page for count in counts for page in range(count)]
        row_pages, first_pages = (
            torch.tensor(table, dtype=torch.int64, device=device) for table in (rows, firsts)
        )
        return cls(tuple(counts), row_pages, first_pages)

    @property
    def num_pages(self) -> int:
        return sum(self.counts)

    def offsets(self) -> Int[Tensor, " R1"]:
        """Where each row's room begins and ends, in entries (int64, on the tables' device)."""
        ends = [0, *accumulate(PAGE * count for count in self.counts)]
        return torch.tensor(ends, dtype=torch.int64, device=self.row_pages.device)

    def work(self, entries: int) -> Work:
        """The rooms cut into pieces of so many entries (`work_of`); cut once for a layout."""
        work = self.planned.get(entries)
        if work is None:
            work = work_of([PAGE * count for count in self.counts], entries, self.row_pages.device)
            if len(self.planned) == MOST_PLANNED:  # chunks of ever new sizes came
                self.planned.clear()
            self.planned[entries] = work
        return work

    def tables(self) -> list[Tensor]:
        """All tensors that are held here."""
        cut = [table for work in list(self.planned.values()) for table in (work.items_3I, work.cut_2X)]
        return [self.row_pages, self.first_pages, *cut]


def pages_for(num_entries: int) -> int:
    """Pages that hold this many entries."""
    return -(-num_entries // PAGE)


def paged(store_C: Tensor) -> Tensor:
    """A column of the store, page by page: `[C, ...]` as `[pages, PAGE, ...]`, a view."""
    return store_C.unflatten(0, (-1, PAGE))
