"""Table of tiles of gated attention, which its launcher and its builds share.

Nothing is tried out when a program runs, so that results do not depend on timings. The rows for half
precision began as the defaults that PyTorch settled on for FlexAttention
(`torch/_inductor/template_heuristics/triton.py`), the closest kernel that was tuned on such GPUs, and were
changed where compiling showed spilled registers. None was timed by us: see the README. `Tile` is queries by
keys.
"""

from typing import Literal

import torch

from retain.kernels.build import Tile

Kernel = Literal["forward", "prepare", "d_queries", "d_keys"]
# Every block of queries is a divisor of it: what is kept of each row is padded to a multiple.
ROWS = 128


# (kernel, capability) -> tiles for heads covered by up to 64, 128 and 256, in half precision.
_HALF = {
    ("forward", 90): (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
    ("forward", 80): (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
    ("d_queries", 90): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 2)),
    ("d_queries", 80): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 32, 8, 1)),
    ("d_keys", 90): (Tile(64, 128, 8, 3), Tile(64, 128, 8, 2), Tile(32, 64, 8, 2)),
    ("d_keys", 80): (Tile(32, 128, 8, 2), Tile(64, 64, 8, 2), Tile(32, 32, 8, 1)),
}
# Where a decay or a soft cap needs registers too.
_FULLER = _HALF | {
    ("forward", 90): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
    ("d_queries", 90): (Tile(128, 32, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 2)),
    ("d_queries", 80): (Tile(64, 32, 4, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 1)),
    ("d_keys", 90): (Tile(32, 128, 8, 3), Tile(32, 128, 8, 2), Tile(32, 64, 8, 2)),
    ("d_keys", 80): (Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 1)),
}
_SINGLE = {
    "forward": (Tile(32, 32, 4, 2), Tile(32, 32, 8, 2), Tile(32, 16, 8, 1)),
    "d_queries": (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
    "d_keys": (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
}


def tile(kernel: Kernel, dtype: torch.dtype, block_d: int, capability: int, *, fuller: bool = False) -> Tile:
    """The tile that a kernel takes.

    Args:
        kernel: which.
        dtype: of queries, keys and values.
        block_d: power of two that covers the head width, 256 at most.
        capability: of the GPU, 90 for 9.0.
        fuller: whether there is a decay or a soft cap.
    """
    if kernel == "prepare":
        return Tile(min(ROWS, 8192 // block_d), 16, 4, 1)
    half = (_FULLER if fuller else _HALF)[kernel, 90 if capability == 90 else 80]
    row = _SINGLE[kernel] if dtype == torch.float32 else half
    return row[0 if block_d <= 64 else 1 if block_d <= 128 else 2]
