"""Launches attention over ragged rows: one kernel, and a second where rows were cut.

Nothing here depends on a number that only the device has. The first call of a
layout cuts its rows on the host and sends the tables, which waits for nothing. There is no tuning at run
time, so that the same call is computed in the same way everywhere. The tables know Hopper (90) and all others
(80): tiles of the latter take no more than the 99 KiB of shared memory of a block on the smallest of them.
"""

from typing import Any

import torch
from torch import Tensor

from retain.kernels import backend
from retain.kernels.backend import multiprocessors
from retain.kernels.build import Tile
from retain.kernels.codes import Codes
from retain.kernels.ragged_attention.kernel import attend, combine
from retain.kernels.ragged_attention.pages import PAGE
from retain.kernels.ragged_attention.reference import Call

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
        coded: keys and values are codes, which are made numbers in registers.
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


def ragged_attention(call: Call) -> tuple[Tensor, Tensor]:
    """The output, laid out as attention modules want it: a query's heads side by side."""
    queries, seen_RS = call.queries_BQSD, call.seen_RS
    keys: Any = call.keys_CD
    values: Any = call.values_CD
    B, Q, S, D = queries.shape
    R, DV, dtype = seen_RS.shape[0], values.shape[1], queries.dtype
    group = B * Q // R
    rows = group * S
    block_d, block_v = backend.block_of(D), backend.block_of(DV)
    cut = tile(rows, dtype, max(block_d, block_v), backend.architecture(queries), isinstance(keys, Codes))
    blocks = -(-rows // cut.m)
    entries = item_entries(call.pages.num_pages * PAGE, blocks, cut, queries.device)
    work = call.pages.work(entries)
    num_parts, num_items, num_cut = work.num_slots * rows, work.items_3I.shape[1], work.cut_2X.shape[1]
    out_BQSV = queries.new_empty(B, S, Q, DV).transpose(1, 2)
    lse_BQS = queries.new_empty(B, Q, S, dtype=torch.float32)
    parts = queries.new_empty(num_parts * (DV + 2), dtype=torch.float32)
    scale, cap = call.scaling * backend.LOG2E, 0.0
    if call.soft_cap is not None:
        scale, cap = call.scaling / call.soft_cap, call.soft_cap * backend.LOG2E
    sinks_Q = None if call.sinks_Q is None else call.sinks_Q.contiguous()
    weight = 0 if call.log_weight_C is None else call.log_weight_C.stride(0)
    shape = (R // B, group, S)
    held: dict[str, Any] = {"BITS": 0, "SPAN": 0}
    scales = groups = value_scales = None
    if isinstance(keys, Codes):
        assert keys.bits == values.bits and keys.span == 1 and keys.groups_C is not None
        # A span of all channels is said to be as wide as the tile.
        held = {"BITS": keys.bits, "SPAN": block_v if values.span >= DV else values.span}
        scales, value_scales = keys.scales_G2N.contiguous(), values.scales_G2N.contiguous()
        keys, values, groups = keys.codes_CW, values.codes_CW, keys.groups_C.contiguous()
    with torch.cuda.device_of(queries):
        attend[(num_items * blocks,)](
            *(queries, keys, values, call.offsets_R1, seen_RS, sinks_Q),
            *(call.log_weight_C, work.items_3I, out_BQSV, parts),
            *(scale, cap, num_items, num_parts, entries, blocks, *shape),
            *(*queries.stride(), *keys.stride(), *values.stride(), *seen_RS.stride()),
            *(weight, *out_BQSV.stride()[:3]),
            *(scales, groups, value_scales, lse_BQS),
            **{"D": D, "DV": DV, "BLOCK_D": block_d, "BLOCK_V": block_v, "M": cut.m, "N": cut.n},
            **{"PRECISION": backend.dot_precision(dtype), "UPCAST": backend.upcast(dtype)},
            **{"CAPPED": call.soft_cap is not None},
            **held,
            **cut.options,
        )
        if num_cut:
            combine[(num_cut * rows,)](
                *(parts, seen_RS, sinks_Q, work.cut_2X, out_BQSV, num_cut, num_parts, entries),
                *(*shape, *seen_RS.stride(), *out_BQSV.stride()[:3], lse_BQS),
                **{"DV": DV, "BLOCK_V": block_v, "I": PARTS, "num_warps": PARTS_WARPS},
            )
    return out_BQSV, lse_BQS
