"""Reads and writes the engine's memory by pages: keys and values of one KV head of one layer in one block.

Backends lay entries out as their kernels want them (the CPU kernel stores a block's keys transposed), so
where each number of a key and value lies is found out at the start by writing a block through the backend
itself. A memory that is not understood is refused.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from retain.vllm.packing.tables import Layout

# Digits that every floating-point type of a cache tells apart.
BASE = 256


class PageStore:
    """All pages of the layers that evict.

    Args:
        caches: of each layer, in order: `[num_blocks, H, page, 2 D]`, parts of one allocation.
        write: writes keys and values `[page, H, D]` into a cache of one block, as the backend does.

    Raises:
        ValueError: the layers differ, do not lie in one allocation one behind the other, or a block's numbers
            are not those that were written.
    """

    def __init__(self, caches: Sequence[Tensor], write: Callable[[Tensor, Tensor, Tensor], None]):
        first, offsets = caches[0], [cache.storage_offset() for cache in caches]
        kinds = {(cache.shape, cache.dtype, cache.untyped_storage().data_ptr()) for cache in caches}
        wanted = [offsets[0] + first.numel() * layer for layer in range(len(caches))]
        if first.dim() != 4 or len(kinds) > 1 or offsets != wanted or not first.is_contiguous():
            raise ValueError(
                f"the engine's caches are {sorted(tuple(shape) for shape, *_ in kinds)} at {offsets}, and "
                "alike ones of [blocks, heads, page, 2 D], side by side in one allocation, are wanted: take "
                "an attention backend and a cache layout that retain was tested with (docs/serving.md)."
            )
        num_blocks, num_heads, page, width = first.shape
        self.layout, self.head_dim = Layout(len(caches), num_blocks, num_heads, page), width // 2
        # As the engine's kernel takes a cache of so many blocks and one KV head.
        shape = len(caches) * num_blocks * num_heads, 1, page, width
        self.cache = first.as_strided(shape, (page * width, page * width, width, 1))
        self.pages = self.cache.flatten(1)
        self.where_keys, self.where_values = _probe(first, write)

    def numbers(self, layer: int, blocks_B: Int[Tensor, " blocks"]) -> Int64[Tensor, "H blocks"]:
        """Pages of a layer (its place among those that evict) in some blocks."""
        heads_H1 = torch.arange(self.layout.num_heads, device=blocks_B.device)[:, None]
        return self.layout.number(blocks_B, layer * self.layout.num_heads + heads_H1)

    def read(self, pages_N: Int[Tensor, " N"]) -> tuple[Float[Tensor, "N page D"], Float[Tensor, "N page D"]]:
        """Keys and values of pages, in order of their entries."""
        numbers, shape = self.pages[pages_N], (-1, self.layout.page, self.head_dim)
        keys, values = (numbers[:, where_W].view(shape) for where_W in (self.where_keys, self.where_values))
        return keys, values

    def pack_(
        self, blocks_B: Int64[Tensor, " blocks"], kept: int, keeps: Sequence[Bool[Tensor, "H T"]]
    ) -> Int32[Tensor, " starts"]:
        """Pack what stays of a prompt's full pages into the first of its blocks.

        Args:
            blocks_B: of the prompt, in order.
            kept: pages a head, in the mean, that stay.
            keeps: which entries of the prompt each layer keeps.

        Returns:
            starts of the heads among the packed pages (`retain.vllm.packing.tables`).
        """
        layout, page, full = self.layout, self.layout.page, keeps[0].shape[1] // self.layout.page
        counts, entries = [], []
        for layer, keep_HT in enumerate(keeps):
            full_HT = keep_HT[:, : full * page].to(blocks_B.device)
            counts.append(full_HT.sum(-1))
            numbers_N = self.numbers(layer, blocks_B[:full]).flatten()
            entries.append([part.flatten(0, 1)[full_HT.flatten()] for part in self.read(numbers_N)])
        counts_P, P = torch.cat(counts), layout.per_block
        assert not (counts_P % page).any(), "heads keep whole pages"
        assert int(counts_P.sum()) == kept * P * page, "as many entries as the scheduler expects"
        order_N = torch.arange(kept * P, device=blocks_B.device)
        numbers = self.pages.new_empty(kept * P, self.pages.shape[1])
        keys, values = (torch.cat(parts).view(kept * P, -1) for parts in zip(*entries, strict=True))
        numbers[:, self.where_keys], numbers[:, self.where_values] = keys, values
        self.pages[layout.number(blocks_B[order_N // P], order_N % P)] = numbers
        return torch.nn.functional.pad((counts_P // page).cumsum(0), (1, 0)).int()


def _probe(
    cache: Tensor, write: Callable[[Tensor, Tensor, Tensor], None]
) -> tuple[Int64[Tensor, " W"], Int64[Tensor, " W"]]:
    """Where in a page the numbers of its keys, and of its values, lie: `W = page * D`, entry by entry.

    Every number is told apart by the digits of its place, written one digit at a time.
    """
    _, _, page, width = cache.shape
    number = torch.arange(page * width, device=cache.device)
    found = torch.zeros_like(number)
    for step in (1, BASE, BASE**2):
        block = cache.new_full((1, 1, page, width), float("nan"))
        keys, values = (number // step % BASE).to(cache.dtype).view(2, page, 1, width // 2)
        write(keys, values, block)
        found += block.flatten().nan_to_num(-1).long() * step
    seen, where = found.sort()
    if not torch.equal(seen, number):
        raise ValueError(
            "a block of the engine's cache does not hold the keys and values that were written to it, number "
            "by number: take kv_cache_dtype 'auto', and a backend that retain was tested with "
            "(docs/serving.md)."
        )
    keys, values = where.view(2, -1)
    return keys, values
