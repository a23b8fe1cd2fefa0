"""The table of how work is cut on a GPU: tiles of one program.

There is no tuning at run time, so that the same call is computed in the same way every time.
"""

import torch

from retain.kernels.build import Tile

# So many queries, or keys, are a whole number of tiles.
WHOLE = 128


def tile(
    kernel: str,
    dtype: torch.dtype,
    block: int,
    arch: int,
    num_queries: int,
    *,
    busy: bool = False,
    heads: int = 1,
) -> Tile:
    """The tile of a kernel: queries (in the first pass rows: a query and a query head) by keys.

    Args:
        kernel: `lse` or `stats`.
        dtype: of queries and keys.
        block: the head width, as a power of two.
        arch: whose table: 90 for Hopper, 80 for all others (`backend.architecture`).
        num_queries: S, in the first pass rows of a KV head, G * S.
        busy: whether much more than a maximum is made of a probability: then registers are short.
        heads: query heads that a program of the second pass takes.
    """
    few, large = num_queries <= 32, arch == 90
    if dtype == torch.float32:
        # Products by plain multiply-adds, whose operands are registers.
        return Tile(16 if few else 32, 32 if block <= 128 else 16, 4, 2)
    if few:
        return Tile(32, 128 if block <= 128 else 64, 4, 2)
    if busy and large:
        return Tile(64, 64, 4, 2) if kernel == "lse" else Tile(64, 128, 8, 2)
    # Where registers are bounded, it is for two programs to a multiprocessor: one multiplies while the other
    # takes exponentials and maxima.
    if kernel == "lse":
        if block <= 128:
            return Tile(128, 128, 8, 2, 128) if large else Tile(128, 64, 8, 3)
        return Tile(128, 64, 8, 2) if large else Tile(64, 64, 8, 1)
    if block <= 128:
        if large and heads == 1:
            return Tile(128, 128, 8, 2, 128)
        return Tile(64, 128, 8, 3)
    return Tile(64, 128, 8, 2) if large else Tile(64, 64, 8, 1)
