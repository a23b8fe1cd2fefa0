"""Launches the step on a GPU, and lays out its work there."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from retain.kernels import backend
from retain.kernels.build import Tile
from retain.kernels.decode_step import kernel
from retain.kernels.ragged_attention.work import parts_of

# Programs of a launch, for each multiprocessor; and how many of these an interpreted kernel is told.
PROGRAMS, INTERPRETED = 2, 2
# Entries of an item: the fewest that leave no more items than so many for each program.
ENTRIES, ITEMS = (128, 256, 512, 1024, 2048, 4096), 4


def items_of(rooms_KR: Int[Tensor, "K R"], entries: int) -> Int[Tensor, "3 items"]:
    """Rooms cut into items of at most so many entries, the fullest first; the slots of a row are neighbours.

    Args:
        rooms_KR: entries of each row's rooms: of codes, where there are any, and of the pool.

    Examples:
        >>> items_of(torch.tensor([[64, 320]]), 128).tolist()
        [[1, 1, 0, 1], [0, 128, 0, 256], [1, 2, 0, 3]]
    """
    K, R = rooms_KR.shape
    cell_I, first_I, slot_I = parts_of(rooms_KR.T.flatten(), entries)  # row by row, codes before the pool
    row_I = cell_I // K + torch.where(cell_I % K < K - 1, R, 0)
    return torch.stack([row_I, first_I, slot_I]).to(torch.int32)


def tables(
    rooms: Sequence[Sequence[Sequence[int]]], group: int, width: int, device: torch.device, rounded: Any
) -> list[tuple[Tensor, ...]]:
    """The work of layers that run one after another: of each, tensors of sizes that repeat.

    - `items_3I`, int32: of each item its row (that of codes: `R + row`), which of the row's entries it begins
      with, and the slot where it leaves its part of the row; unused columns are zeros;
    - `count_2`, int32: how many items there are, and entries of each;
    - `parts`, float32, shared by all layers: where programs leave parts of rows;
    - `arrived_R`, int32: parts of each row that were left; zeros between launches.

    Args:
        rooms: of each layer, entries of its rows' rooms: of codes, where there are any, and of the pool.
        group: query heads of a row.
        width: V.
        rounded: rounds a size up.
    """
    programs = PROGRAMS * backend.multiprocessors(device, INTERPRETED)
    works = []
    for layer in rooms:
        rooms_KR = torch.tensor(layer)
        fits = (entries for entries in ENTRIES if int((-(-rooms_KR // entries)).sum()) <= ITEMS * programs)
        entries = next(fits, ENTRIES[-1])
        works.append((entries, items_of(rooms_KR, entries)))
    most = rounded(max(items_3I.shape[1] for _, items_3I in works))
    parts = torch.empty(most * group * (width + 2), dtype=torch.float32, device=device)
    arrived_R = torch.zeros(max(len(layer[0]) for layer in rooms), dtype=torch.int32, device=device)
    made: list[tuple[Tensor, ...]] = []
    for entries, items_3I in works:
        whole_3I = torch.zeros(3, most, dtype=torch.int32)
        whole_3I[:, : items_3I.shape[1]] = items_3I
        count_2 = torch.tensor([items_3I.shape[1], entries], dtype=torch.int32, device=device)
        made.append((whole_3I.to(device), count_2, parts, arrived_R))
    return made


def tile(block: int, dtype: torch.dtype, bits: int) -> Tile:
    """Query heads by entries, for heads of this width and type; fewer where codes are taken apart."""
    return Tile(16, 64 if block * dtype.itemsize <= 256 and not bits else 32, 4, 3)


def decode_step(
    queries: Tensor, new_keys: Tensor, new_values: Tensor, keys: Tensor, values: Tensor, positions: Tensor,
    offsets: Tensor, base: Tensor, clock: Tensor, last: Tensor, log_weight: Tensor | None,
    sinks: Tensor | None, scaling: float, soft_cap: float, window: int,
    items: Tensor, count: Tensor, parts: Tensor, arrived: Tensor, packed: Sequence[Tensor] = (),
    bits: int = 0, span: int = 1,
) -> Tensor:  # fmt: skip
    """See the op."""
    (B, Q, _, D), H, V = queries.shape, new_keys.shape[1], values.shape[1]
    out = queries.new_empty(B, 1, Q, V)
    group, block_d, block_v = Q // H, backend.block_of(D), backend.block_of(V)
    cut = tile(max(block_d, block_v), keys.dtype, bits)
    scale, cap = scaling * kernel.LOG2E.value, 0.0
    if soft_cap:
        scale, cap = scaling / soft_cap, soft_cap * kernel.LOG2E.value
    programs = PROGRAMS * backend.multiprocessors(keys.device, INTERPRETED)
    keys_P, values_P, *coded = packed or (None,) * 7
    weight = coded.pop() if len(coded) > 5 else None
    with torch.cuda.device_of(keys):
        kernel.step[(programs,)](
            *(queries, new_keys, new_values, keys, values, positions, offsets, base, clock, last),
            *(log_weight, sinks, items, count, parts, arrived, out),
            *(keys_P, values_P, *coded, weight, base.shape[0]),
            *(scale, cap, window, items.shape[1], parts.shape[0] // (group * (V + 2)), H),
            *(*queries.stride()[:2], *new_keys.stride()[:2], *new_values.stride()[:2]),
            **{"G": group, "D": D, "V": V, "BLOCK_D": block_d, "BLOCK_V": block_v},
            **{"BLOCK_G": max(cut.m, 1 << (group - 1).bit_length()), "BLOCK_N": cut.n},
            **{"PRECISION": backend.dot_precision(keys.dtype), "UPCAST": backend.upcast(keys.dtype)},
            **{"BITS": bits, "SPAN": block_v if span >= V else span},
            **{"WEIGHTED": log_weight is not None, "SUNK": sinks is not None},
            **{"CAPPED": bool(soft_cap), "WINDOWED": window > 0},
            **cut.options,
        )
    return out
