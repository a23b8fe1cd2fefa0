"""Builds the block tables of virtual sequences: one for each request and KV head of each layer.

A page is a block's part of one layer and one KV head. All layers lie in one allocation, head-major, so that a
page has one number: `(layer * num_blocks + block) * H + head`. A request that was evicted from holds packed
pages in the first of its blocks (`retain.vllm.packing.progress`). They are numbered `0, 1, ...` block by
block, inside a block layer by layer, inside a layer head by head, and the heads hold them in order: head
`(l, h)` those from `starts[l H + h]` up to `starts[l H + h + 1]`, whatever their layer and head is. Blocks
behind the pages that were full at the eviction are at their places and hold one page of every head.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int, Int32
from torch import Tensor


class Layout(NamedTuple):
    """Geometry of the allocation: L layers of so many blocks, of H pages each, of `page` entries."""

    num_layers: int
    num_blocks: int
    num_heads: int
    page: int

    @property
    def per_block(self) -> int:
        """Pages of a block, over all layers and heads."""
        return self.num_layers * self.num_heads


def page_numbers(
    layout: Layout, blocks: Int[Tensor, "*#axes"], layers: Int[Tensor, "*#axes"], heads: Int[Tensor, "*#axes"]
) -> Int[Tensor, "*axes"]:
    """Number of the page of a layer and head in a block; the three are broadcast."""
    return (layers * layout.num_blocks + blocks) * layout.num_heads + heads


def packed_pages(
    layout: Layout, order: Int[Tensor, "*axes"], blocks: Int[Tensor, "*axes"]
) -> Int[Tensor, "*axes"]:
    """Number of a packed page: of its place among them, and of the block that it lies in."""
    inside = order % layout.per_block
    return page_numbers(layout, blocks, inside // layout.num_heads, inside % layout.num_heads)


def build_tables(
    layout: Layout,
    blocks_RB: Int[Tensor, "R B"],
    lengths_R: Int[Tensor, " R"],
    full_R: Int[Tensor, " R"],
    starts_RP: Int[Tensor, "R P"],
    places_L: Int[Tensor, " L"],
) -> tuple[Int32[Tensor, "L N W"], Int32[Tensor, "L N"]]:
    """Build the tables of a step in a few tensor operations.

    `pages[l, (r, h), c]` is the packed page `starts[l H + h] + c` while `c < n`, the number of packed pages
    that the head holds, and then that of layer `l` and head `h` in the block at place `full + c - n`.

    Args:
        blocks_RB: the requests' block tables, by position.
        lengths_R: tokens of each, those of this step included.
        full_R: full pages a head at its eviction; of one that was not evicted from, 0.
        starts_RP: `P = L H + 1` starts of each; of one that was not evicted from, zeros.
        places_L: of the layers in the allocation.

    Returns:
        of the virtual sequences, request by request and head by head: numbers of their pages, 0 behind the
        last; their entries, those of this step included.
    """
    L, _, H, page = layout
    R, device = len(lengths_R), blocks_RB.device
    starts_RLH = starts_RP[:, :-1].view(R, L, H).long()
    held_RLH = starts_RP.diff(dim=-1).view(R, L, H).long()
    later_R = lengths_R.long() - full_R * page
    width_R = -(-later_R // page)
    # The widest table decides how many columns there are: the only number that is waited for.
    width = max(1, int((held_RLH.flatten(1).amax(-1) + width_R).max()))
    c_W = torch.arange(width, device=device)
    packed_RLHW = c_W < held_RLH[..., None]
    order_RLHW = starts_RLH[..., None] + c_W
    place_RLHW = full_R.long()[:, None, None, None] + c_W - held_RLH[..., None]
    rows_R111 = torch.arange(R, device=device)[:, None, None, None]
    column_RLHW = torch.where(packed_RLHW, order_RLHW // layout.per_block, place_RLHW)
    column_RLHW = column_RLHW.clamp(0, blocks_RB.shape[1] - 1)
    block_RLHW = blocks_RB[rows_R111, column_RLHW].long()
    here_LH1 = places_L[:, None, None], torch.arange(H, device=device)[:, None]
    pages_RLHW = torch.where(
        packed_RLHW,
        packed_pages(layout, order_RLHW, block_RLHW),
        page_numbers(layout, block_RLHW, *here_LH1),
    )
    used_RLHW = c_W < held_RLH[..., None] + width_R[:, None, None, None]
    pages_RLHW = pages_RLHW.where(used_RLHW, 0).int()
    lengths_RLH = held_RLH * page + later_R[:, None, None]
    pages_LNW = pages_RLHW.transpose(0, 1).reshape(L, R * H, width)
    return pages_LNW, lengths_RLH.transpose(0, 1).reshape(L, R * H).int().contiguous()
