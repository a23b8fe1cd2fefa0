"""Holds what stands for each full page of a layer's rows while pages are chosen.

A page's summary is made once, when the page is full: the unfilled last page is always read, and needs none.
So a decoded token costs nothing here but for each `page`-th, and an index can be made anew from the entries
at any time, which is what happens after a crop and when a cache is loaded.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.cache.store import RaggedStore, normal_tensors
from retain.kernels.compact.reference import spans

# Pages of every row that room is made for when an index grows, beside those that it needs.
SPARE = 8
# Keys that are gathered at a time while summaries are made.
KEYS = 1 << 16


class PageIndex:
    """Summaries of the full pages of one layer.

    Args:
        page: tokens a page.
        summarise: of the keys of pages `[N, page, D]`, K vectors each `[N, K, D]`.
    """

    def __init__(self, page: int, summarise: Callable[[Tensor], Tensor]):
        self.page, self.summarise = page, summarise
        self.counts: list[int] = []  # full pages of each row that are summarised
        self.held: Float[Tensor, "R P K D"] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the summaries that are held."""
        return (
            0 if self.held is None else sum(self.counts) * self.held[0, 0].numel() * self.held.element_size()
        )

    @property
    def bytes_allocated(self) -> int:
        """Bytes of the storage behind them, room included."""
        return 0 if self.held is None else self.held.untyped_storage().nbytes()

    @normal_tensors()
    def update(self, store: RaggedStore, lengths_R: Sequence[int]) -> Float[Tensor, "R P K D"]:
        """Summaries of all full pages, those that have filled since the last time added.

        Args:
            store: the entries of the layer; those that were there before are unchanged.
            lengths_R: entries of each row that count.

        Returns:
            summaries of as many pages as the longest row has full ones (none: P is 0); rows with fewer end in
            numbers that mean nothing.
        """
        full = [length // self.page for length in lengths_R]
        self.counts = [min(pair) for pair in zip(self.counts or [0] * len(full), full, strict=True)]
        device, most = store.keys_CD.device, max(full, default=0)
        new = torch.tensor([now - before for now, before in zip(full, self.counts, strict=True)])
        self._make_room(store, len(full), most)
        assert self.held is not None
        if int(new.sum()):
            rows_N = torch.repeat_interleave(new).to(device)
            pages_N = spans(torch.tensor(self.counts), new).to(device)
            place_p = torch.arange(self.page, device=device)
            step = max(1, KEYS // self.page)
            for start in range(0, len(rows_N), step):
                rows, pages = rows_N[start : start + step], pages_N[start : start + step]
                first = store.offsets_R1[rows] + pages * self.page
                keys_NpD = store.keys_CD[first[:, None] + place_p]
                self.held[rows, pages] = self.summarise(keys_NpD)
            self.counts = full
        return self.held[:, :most]

    def _make_room(self, store: RaggedStore, rows: int, most: int) -> None:
        if self.held is not None and self.held.shape[1] >= most:
            return
        one = self.summarise(store.keys_CD.new_zeros(1, self.page, store.keys_CD.shape[1]))
        room = most + SPARE + most // 8
        held = store.keys_CD.new_zeros(rows, room, *one.shape[1:])
        if self.held is not None:
            held[:, : self.held.shape[1]] = self.held
        self.held = held

    def forget(self) -> None:
        """Forget all summaries: entries went, or others came in their place."""
        self.counts, self.held = [], None

    @normal_tensors()
    def fork(self) -> "PageIndex":
        """An independent copy."""
        other = PageIndex(self.page, self.summarise)
        other.counts = list(self.counts)
        other.held = None if self.held is None else self.held.clone()
        return other

    @normal_tensors()
    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may repeat."""
        if self.held is not None:
            idx: Int[Tensor, " rows"] = torch.tensor(rows, dtype=torch.int64, device=self.held.device)
            self.held = self.held.index_select(0, idx)
            self.counts = [self.counts[row] for row in rows]
