"""Tables of how work is cut on a GPU: tiles of one program, and entries of one item.

There is no tuning at run time, so that the same call is computed in the same way everywhere. The tables know
Hopper (90) and all others (80): tiles of the latter take no more than the 99 KiB of shared memory that a
block may have on the smallest of them.
"""

import torch

from retain.kernels.backend import multiprocessors
from retain.kernels.build import Tile
from retain.kernels.ragged_attention.pages import PAGE

# Programs that a launch is cut into, for each multiprocessor, by the query rows of a tile: some waves of as
# many as it holds at once, so that one which ends late is a small part of the whole. Fewer of those that take
# many queries: their parts are larger.
PROGRAMS = {16: 16, 32: 8, 64: 8, 128: 4}
# Multiprocessors where there are none, so that the interpreter cuts rows too.
INTERPRETED = 1
# Of `combine`: parts at a time, warps.
PARTS, PARTS_WARPS = 16, 4


def tile(num_rows: int, dtype: torch.dtype, block: int, arch: int, coded: bool = False) -> Tile:
    """The tile of `attend`: query rows by entries.

    Args:
        num_rows: G * S, query rows of a KV head.
        dtype: of the queries, and of what is multiplied.
        block: the head width, as a power of two.
        arch: 90 for Hopper, 80 for all others (`backend.architecture`).
        coded: keys or values are codes, which are made numbers in registers.
    """
    few = num_rows <= 16  # decoding: all that matters is that enough loads are under way
    if dtype == torch.float32:  # without matrix instructions; more would not fit into registers
        n = {16: 64, 32: 64, 64: 32, 128: 16, 256: 16}[block]
        return Tile(16, n, 8, 3) if few or block == 256 or coded else Tile(32, 16, 8, 2)
    if few and coded:  # in registers a number takes twice the room; loads are of few bytes either way
        return Tile(16, {16: 128, 32: 128, 64: 64, 128: 32, 256: 32}[block], 8 if block == 256 else 4, 3)
    if few:
        return Tile(16, {16: 128, 32: 128, 64: 128, 128: 64, 256: 32}[block], 4, 3)
    if block == 256:
        return Tile(64, 32, 8, 3 if arch == 90 else 2)
    n = 64 if arch == 90 or block < 128 else 32
    return Tile(64, n, 8 if coded else 4, 3) if num_rows <= 64 else Tile(128, n, 8, 3)


def item_entries(num_entries: int, blocks: int, cut: Tile, device: torch.device) -> int:
    """Entries of one item: whole tiles and pages, and as many programs in all as `PROGRAMS` says."""
    wanted = PROGRAMS[cut.m] * multiprocessors(device, INTERPRETED)
    step = max(PAGE, cut.n)
    return max(1, -(-num_entries * blocks // (wanted * step))) * step
