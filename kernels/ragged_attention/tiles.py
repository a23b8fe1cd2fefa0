"""How work is cut on a GPU: tiles of one program, and entries of one item.

In: how many queries a KV head has, the precision, the head width, how much room a store has. Out: what
`launch` launches and `kernel.builds` compiles ahead of time: both read it here. The one decision taken here:
a table and no tuning at run time, so that the same call is computed in the same way everywhere, and nothing
is measured behind a user's back. It knows Hopper and all others: what those run takes no more than the 99 KiB
of shared memory that a block may have on the smallest of them (`retain.kernels.build.SHARED_LIMIT`).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from retain.kernels.ragged_attention.pages import PAGE

# Programs that a launch is cut into, for each multiprocessor, by the query rows of a tile: some waves of as
# many as it holds at once, so that one which ends late is a small part of the whole. Fewer of those that take
# many queries: their parts are larger.
PROGRAMS = {16: 16, 32: 8, 64: 8, 128: 4}
# Multiprocessors where there are none, so that the interpreter cuts rows too.
INTERPRETED = 1
# Of `combine`: parts at a time, warps.
PARTS, PARTS_WARPS = 16, 4
# Of `pay`: queries at a time, when it looks who sees a block of keys.
LOOKED = 256


@dataclass(frozen=True)
class Tile:
    """How one program is cut.

    Args:
        m: query rows at a time.
        n: entries at a time.
        num_warps: of a program.
        num_stages: of loads under way.
    """

    m: int
    n: int
    num_warps: int
    num_stages: int


def tile(num_rows: int, dtype: torch.dtype, block: int, *, hopper: bool) -> Tile:
    """The tile of `attend`.

    Args:
        num_rows: G * S, query rows of a KV head.
        dtype: of the tensors.
        block: the head width, as a power of two.
        hopper: whether the machine has Hopper's matrix instructions (compute capability 9.0).
    """
    few = num_rows <= 16  # decoding: all that matters is that enough loads are under way
    if dtype == torch.float32:  # without matrix instructions; more would not fit into registers
        n = {16: 64, 32: 64, 64: 32, 128: 16, 256: 16}[block]
        return Tile(16, n, 8, 3) if few or block == 256 else Tile(32, 16, 8, 2)
    if few:
        return Tile(16, {16: 128, 32: 128, 64: 128, 128: 64, 256: 32}[block], 4, 3)
    if block == 256:
        return Tile(64, 32, 8, 3 if hopper else 2)
    n = 64 if hopper or block < 128 else 32
    return Tile(64, n, 4, 3) if num_rows <= 64 else Tile(128, n, 8, 3)


def pay_tile(num_rows: int, dtype: torch.dtype) -> Tile:
    """The tile of `pay`; see `tile`."""
    if dtype == torch.float32:
        return Tile(16, 64, 8, 2)
    return Tile(16 if num_rows <= 16 else 64, 64, 4, 2)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether kernels there may use the instructions of compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def item_entries(num_entries: int, blocks: int, cut: Tile, device: torch.device) -> int:
    """Entries of one item: whole tiles and pages, and as many programs in all as `PROGRAMS` says."""
    wanted = PROGRAMS[cut.m] * _multiprocessors(device)
    step = max(PAGE, cut.n)
    return max(1, -(-num_entries * blocks // (wanted * step))) * step
