"""Launches the step on a GPU, lays out its work there, and lists its builds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.kernels import backend
from retain.kernels.build import Build, Tile
from retain.kernels.decode_step import kernel
from retain.kernels.ragged_attention.work import work_of

# Programs of a launch, for each multiprocessor; and how many of these an interpreted kernel is told.
PROGRAMS, INTERPRETED = 2, 2
# Entries of an item: the fewest that leave no more items than so many for each program.
ENTRIES, ITEMS = (128, 256, 512, 1024, 2048, 4096), 4


@dataclass(frozen=True, eq=False)
class Table:
    """The work of one layer, on its device. Sizes are rounded up, so that they repeat.

    Args:
        items_3I: int32, as in `retain.kernels.ragged_attention.work.Work`; unused columns are zeros.
        count_2: int32, how many items there are, and entries of each.
        parts: float32, where programs leave parts of rows; shared by all layers.
        arrived_R: int32, parts of each row that were left; zeros between launches.
    """

    items_3I: Int[Tensor, "3 items"]
    count_2: Int[Tensor, " 2"]
    parts: Float[Tensor, " numbers"]
    arrived_R: Int[Tensor, " R"]

    def tensors(self) -> tuple[Tensor, ...]:
        return self.items_3I, self.count_2, self.parts, self.arrived_R


def tables(
    rooms: Sequence[Sequence[int]], group: int, width: int, device: torch.device, rounded: Any
) -> list[Table]:
    """The work of layers that run one after another.

    Args:
        rooms: of each layer, entries of its rows' rooms.
        group: query heads of a row.
        width: V.
        rounded: rounds a size up.
    """
    programs = PROGRAMS * backend.multiprocessors(device, INTERPRETED)
    works = []
    for own in rooms:
        counts = {entries: sum(-(-room // entries) for room in own) for entries in ENTRIES}
        fits = (entries for entries, count in counts.items() if count <= ITEMS * programs)
        works.append(work_of(own, next(fits, ENTRIES[-1]), device))
    numbers = rounded(max(1, *(work.num_slots for work in works))) * group * (width + 2)
    parts = torch.empty(numbers, dtype=torch.float32, device=device)
    arrived_R = torch.zeros(max(map(len, rooms)), dtype=torch.int32, device=device)
    most = rounded(max(work.num_items for work in works))
    made = []
    for work in works:
        items_3I = torch.zeros(3, most, dtype=torch.int32, device=device)
        items_3I[:, : work.num_items] = work.items_3I
        count_2 = torch.tensor([work.num_items, work.entries], dtype=torch.int32, device=device)
        made.append(Table(items_3I, count_2, parts, arrived_R))
    return made


def tile(block: int, dtype: torch.dtype) -> Tile:
    """Query heads by entries, for heads of this width and type."""
    return Tile(16, 64 if block * dtype.itemsize <= 256 else 32, 4, 3)


def decode_step(
    queries: Tensor, new_keys: Tensor, new_values: Tensor, keys: Tensor, values: Tensor, positions: Tensor,
    offsets: Tensor, base: Tensor, clock: Tensor, last: Tensor, log_weight: Tensor | None,
    sinks: Tensor | None, scaling: float, soft_cap: float, window: int,
    items: Tensor, count: Tensor, parts: Tensor, arrived: Tensor,
) -> Tensor:  # fmt: skip
    """See the op."""
    (B, Q, _, D), H, V = queries.shape, new_keys.shape[1], values.shape[1]
    out = queries.new_empty(B, 1, Q, V)
    group, block_d, block_v = Q // H, backend.block_of(D), backend.block_of(V)
    cut = tile(max(block_d, block_v), keys.dtype)
    scale, cap = scaling * kernel.LOG2E.value, 0.0
    if soft_cap:
        scale, cap = scaling / soft_cap, soft_cap * kernel.LOG2E.value
    programs = PROGRAMS * backend.multiprocessors(keys.device, INTERPRETED)
    with torch.cuda.device_of(keys):
        kernel.step[(programs,)](
            *(queries, new_keys, new_values, keys, values, positions, offsets, base, clock, last),
            *(log_weight, sinks, items, count, parts, arrived, out),
            *(scale, cap, window, items.shape[1], parts.shape[0] // (group * (V + 2)), H),
            *(*queries.stride()[:2], *new_keys.stride()[:2], *new_values.stride()[:2]),
            **_constants(group, D, V, keys.dtype),
            **{"WEIGHTED": log_weight is not None, "SUNK": sinks is not None},
            **{"CAPPED": bool(soft_cap), "WINDOWED": window > 0},
            **cut.options,
        )
    return out


def _constants(group: int, D: int, V: int, dtype: torch.dtype) -> dict[str, Any]:
    block_d, block_v = backend.block_of(D), backend.block_of(V)
    cut = tile(max(block_d, block_v), dtype)
    return {
        **{"G": group, "D": D, "V": V, "BLOCK_D": block_d, "BLOCK_V": block_v},
        **{"BLOCK_G": max(cut.m, block_of_group(group)), "BLOCK_N": cut.n},
        **{"PRECISION": backend.dot_precision(dtype), "UPCAST": backend.upcast(dtype)},
    }


def block_of_group(group: int) -> int:
    """The power of two that covers the query heads of a row."""
    return 1 << (group - 1).bit_length()


def builds() -> list[Build]:
    """Every width with its tile, and every switch that changes the code."""
    plain = {"WEIGHTED": False, "SUNK": False, "CAPPED": False, "WINDOWED": False}
    found = [(torch.bfloat16, D, 4, plain) for D in (16, 32, 64, 128, 256)]
    found += [(torch.float32, D, 4, plain) for D in (64, 128)] + [(torch.float16, 128, 8, plain)]
    found += [(torch.bfloat16, 128, 1, {**plain, switch: True}) for switch in plain]
    return [_build(*one) for one in found]


def _build(dtype: torch.dtype, D: int, group: int, switches: dict[str, bool]) -> Build:
    kind = f"*{backend.TYPES[dtype]}"
    own = ("q", "k", "v", "keys", "values", "sinks", "out")
    types = {**dict.fromkeys((f"{name}_ptr" for name in own), kind), "scale": "fp32", "cap": "fp32"}
    types |= dict.fromkeys(("weight_ptr", "parts_ptr"), "*fp32")
    types |= dict.fromkeys(("positions_ptr", "base_ptr", "items_ptr", "count_ptr", "arrived_ptr"), "*i32")
    types |= dict.fromkeys(("offsets_ptr", "clock_ptr", "last_ptr"), "*i64")
    words = [
        backend.TYPES[dtype],
        f"D={D}",
        f"G={group}",
        *(name.lower() for name, on in switches.items() if on),
    ]
    vectors = ("q_b", "q_h", "k_b", "k_h", "v_b", "v_h")
    constants = {**_constants(group, D, D, dtype), **switches, "UPCAST": False}
    return Build(" ".join(words), kernel.step, types, constants, tile(backend.block_of(D), dtype), vectors)
