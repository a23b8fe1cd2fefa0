"""Builds the block tables of virtual sequences: one for each request and KV head of each layer.

A page is a block's part of one layer and one KV head. All layers lie in one allocation, head-major, so that a
page has one number: `(layer * num_blocks + block) * H + head`. The pages of a block go layer by layer, inside
a layer head by head: page `i` of a block is that of layer `i // H` and head `i % H`.

A request that was evicted from holds packed pages in the first of its blocks. They are numbered `0, 1, ...`
block by block, and the heads hold them in order: head `(l, h)` those from `starts[l H + h]` up to `starts[l H
+ h + 1]`, whatever their layer and head is. Blocks behind the pages that were full at the eviction are at
their places and hold one page of every head.
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
