"""Launches attention over ragged rows: one kernel, and a second where rows were cut.

Where the layout is known, nothing here depends on a number that only the device has. The first call of a
layout cuts its rows on the host and sends the tables, which waits for nothing. There is no tuning at run
time, so that the same call is computed in the same way everywhere. The tables know Hopper (90) and all others
(80): tiles of the latter take no more than the 99 KiB of shared memory of a block on the smallest of them.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from retain.kernels import backend
from retain.kernels.backend import multiprocessors
from retain.kernels.build import Tile
from retain.kernels.codes import Codes
from retain.kernels.ragged_attention.kernel import attend, combine
from retain.kernels.ragged_attention.pages import PAGE
from retain.kernels.ragged_attention.reference import Call, Result
from retain.kernels.ragged_attention.work import work_of

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


def ragged_attention(call: Call) -> Result:
    """The output, laid out as attention modules want it: a query's heads side by side."""
    queries, keys, values, seen_RS = call.queries_BQSD, call.keys_CD, call.values_CD, call.seen_RS
    B, Q, S, D = queries.shape
    R, DV, dtype = seen_RS.shape[0], values.shape[1], queries.dtype
    group = B * Q // R
    rows = group * S
    block_d, block_v = backend.block_of(D), backend.block_of(DV)
    cut = tile(rows, dtype, max(block_d, block_v), backend.architecture(queries), call.coded)
    blocks = -(-rows // cut.m)
    if call.pages is None:  # this is where the device is waited for
        rooms = [stop - start for start, stop in pairwise(call.offsets_R1.tolist())]
        entries = item_entries(sum(rooms), blocks, cut, queries.device)
        work = work_of(rooms, entries, queries.device)
    else:
        entries = item_entries(call.pages.num_pages * PAGE, blocks, cut, queries.device)
        work = call.pages.work(entries)
    num_parts = work.num_slots * rows
    out_BQSV = queries.new_empty(B, S, Q, DV).transpose(1, 2)
    lse_BQS = queries.new_empty(B, Q, S, dtype=torch.float32) if call.with_lse else None
    parts = queries.new_empty(num_parts * (DV + 2), dtype=torch.float32)
    scale, cap = call.scaling * backend.LOG2E, 0.0
    if call.soft_cap is not None:
        scale, cap = call.scaling / call.soft_cap, call.soft_cap * backend.LOG2E
    sinks_Q = None if call.sinks_Q is None else call.sinks_Q.contiguous()
    weight = 0 if call.log_weight_C is None else call.log_weight_C.stride(0)
    shape = (R // B, group, S)
    held_keys, held_values = _held(keys, block_d), _held(values, block_v)
    with torch.cuda.device_of(queries):
        attend[(work.num_items * blocks,)](
            *(queries, held_keys.numbers, held_values.numbers, call.offsets_R1, seen_RS, sinks_Q),
            *(call.log_weight_C, work.items_3I, out_BQSV, parts),
            *(scale, cap, work.num_items, num_parts, entries, blocks, *shape),
            *(
                *queries.stride(),
                *held_keys.numbers.stride(),
                *held_values.numbers.stride(),
                *seen_RS.stride(),
            ),
            *(weight, *out_BQSV.stride()[:3]),
            *(held_keys.scales, held_keys.groups, held_values.scales, lse_BQS),
            **{"D": D, "DV": DV, "BLOCK_D": block_d, "BLOCK_V": block_v, "M": cut.m, "N": cut.n},
            **{"PRECISION": backend.dot_precision(dtype), "UPCAST": backend.upcast(dtype)},
            **{"CAPPED": call.soft_cap is not None},
            **{"KEY_BITS": held_keys.bits, "VALUE_BITS": held_values.bits, "VALUE_SPAN": held_values.span},
            **cut.options,
        )
        if work.num_cut:
            combine[(work.num_cut * rows,)](
                *(parts, seen_RS, sinks_Q, work.cut_2X, out_BQSV),
                *(
                    work.num_cut,
                    num_parts,
                    entries,
                    *shape,
                    *seen_RS.stride(),
                    *out_BQSV.stride()[:3],
                    lse_BQS,
                ),
                **{"DV": DV, "BLOCK_V": block_v, "I": PARTS, "num_warps": PARTS_WARPS},
            )
    return out_BQSV, lse_BQS


class _Held(NamedTuple):
    """Keys or values as the kernel takes them; of numbers there are 0 bits and no scales."""

    numbers: Tensor
    scales: Tensor | None = None
    groups: Tensor | None = None
    bits: int = 0
    span: int = 0


def _held(store_CD: Tensor | Codes, block: int) -> _Held:
    """A store; a span of all its channels is said to be as wide as the tile."""
    if isinstance(store_CD, Tensor):
        return _Held(store_CD)
    codes_CW, scales_G2N, groups_C, bits, span, width = store_CD
    groups_C = None if groups_C is None else groups_C.contiguous()
    return _Held(codes_CW, scales_G2N.contiguous(), groups_C, bits, block if span >= width else span)
