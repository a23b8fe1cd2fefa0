"""Reads and writes the engine's memory by pages, and builds the block tables of virtual sequences: one for
each request and KV head of each layer.

A page is a block's part of one layer and one KV head. All layers lie in one allocation, head-major, so that a
page has one number: `(layer * num_blocks + block) * H + head`. The pages of a block go layer by layer, inside
a layer head by head: page `i` of a block is that of layer `i // H` and head `i % H`.

A request that was evicted from holds packed pages in the first of its blocks. They are numbered `0, 1, ...`
block by block, and the heads hold them in order: head `(l, h)` those from `starts[l H + h]` up to `starts[l H
+ h + 1]`, whatever their layer and head is. Blocks behind the pages that were full at the eviction are at
their places and hold one page of every head.

Backends lay entries out as their kernels want them (the CPU kernel stores a block's keys transposed), so
where each number of a key and value lies is found out at the start by writing a block through the backend
itself. A memory that is not understood is refused.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

# Digits that every floating-point type of a cache tells apart.
BASE = 256


class Layout(NamedTuple):
    """Geometry of the allocation: L layers of so many blocks, of H pages each, of `page` entries."""

    num_layers: int
    num_blocks: int
    num_heads: int
    page: int

    @property
    def per_block(self) -> int:
        """P: pages of a block, over all layers and heads."""
        return self.num_layers * self.num_heads

    def number(self, blocks: Int[Tensor, "*#axes"], inside: Int[Tensor, "*#axes"]) -> Int[Tensor, "*axes"]:
        """Number of page `inside` of a block; the two are broadcast."""
        H = self.num_heads
        return (inside // H * self.num_blocks + blocks) * H + inside % H


def build_tables(
    layout: Layout,
    blocks_RB: Int[Tensor, "R B"],
    lengths_R: Int[Tensor, " R"],
    full_R: Int[Tensor, " R"],
    starts_RP1: Int[Tensor, "R starts"],
) -> tuple[Int32[Tensor, "L N W"], Int32[Tensor, "L N"]]:
    """Build the tables of a step in a few tensor operations.

    `pages[l, (r, h), c]` is the packed page `starts[l H + h] + c` while `c < n`, the number of packed pages
    that the head holds, and then that of layer `l` and head `h` in the block at place `full + c - n`.

    Args:
        blocks_RB: the requests' block tables, by position.
        lengths_R: tokens of each, those of this step included.
        full_R: full pages a head at its eviction; of one that was not evicted from, 0.
        starts_RP1: starts of each, and the end; of one that was not evicted from, zeros.

    Returns:
        of the virtual sequences, request by request and head by head: numbers of their pages, 0 behind the
        last; their entries, those of this step included.
    """
    L, _, H, page = layout
    P, device = layout.per_block, blocks_RB.device
    held_RP1 = starts_RP1.diff()[..., None].long()
    later_R11 = (lengths_R.long() - full_R * page)[:, None, None]
    used_RP1 = held_RP1 - later_R11 // -page
    # The widest table decides how many columns there are: the only number that is waited for.
    c_W = torch.arange(max(1, int(used_RP1.max())), device=device)
    packed_RPW, order_RPW = c_W < held_RP1, starts_RP1[:, :-1, None] + c_W
    column_RPW = torch.where(packed_RPW, order_RPW // P, full_R[:, None, None] + c_W - held_RP1)
    column_RPW = column_RPW.clamp(0, blocks_RB.shape[1] - 1).long()
    block_RPW = blocks_RB.long()[:, None].expand(-1, P, -1).gather(-1, column_RPW)
    inside_RPW = torch.where(packed_RPW, order_RPW % P, torch.arange(P, device=device)[:, None])
    pages_RPW = layout.number(block_RPW, inside_RPW).where(c_W < used_RP1, 0).int()
    lengths_RP = (held_RP1 * page + later_R11)[..., 0].int()
    pages_LNW, lengths_LN = (
        part.unflatten(1, (L, H)).transpose(0, 1).flatten(1, 2).contiguous()
        for part in (pages_RPW, lengths_RP)
    )
    return pages_LNW, lengths_LN


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
            starts of the heads among the packed pages.
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


def _probe(cache: Tensor, write: Callable[[Tensor, Tensor, Tensor], None]) -> Int64[Tensor, "2 W"]:
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
    return where.view(2, -1)
