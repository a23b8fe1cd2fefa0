"""Work items of ragged rows, so that a launch is balanced by entries and not by rows.

The tables depend on rooms, which the host knows, and never on how many entries rows hold, which only the
device knows. So they are made once for a layout of a store, and no decoding step rebuilds them or waits for
anything: the part of an item behind a row's end is found to be empty where it runs. They are cut on the host
when a layout is first attended, and sent without a wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Work:
    """Rows, cut.

    Args:
        items_3I: int32, of each item its row, which of the row's entries it begins with, and the slot where
            it leaves its part of the row (-1: it is all of its row, which it finishes). Whole items come
            first, so that short ones end a launch.
        cut_2X: int32, the rows that were cut into several items, and the slot of the first item of each; the
            others follow it.
        num_slots: of all of them.
    """

    items_3I: Int[Tensor, "3 items"]
    cut_2X: Int[Tensor, "2 cut"]
    num_slots: int


def work_of(rooms: Sequence[int], entries: int, device: torch.device | str) -> Work:
    """Cut rows into items of at most so many entries; a row without room is one item without entries.

    Examples:
        >>> work = work_of([128, 0, 320], 128, "cpu")
        >>> work.items_3I.tolist()
        [[0, 2, 2, 2, 1], [0, 0, 128, 256, 0], [-1, 0, 1, 2, -1]]
        >>> work.cut_2X.tolist(), work.num_slots
        ([[2], [0]], 3)
    """
    with torch.inference_mode(False):  # the tables outlive the call that asks for them first
        room_R = torch.tensor(rooms, dtype=torch.int64)
        row_I, first_I, _ = parts_of(room_R, entries, least=1)
        cut_R = room_R > entries
        slots_R = -(-room_R // entries) * cut_R
        slot_R = slots_R.cumsum(0) - slots_R
        slot_I = torch.where(cut_R[row_I], slot_R[row_I] + first_I // entries, -1)
        row_X = cut_R.nonzero()[:, 0]
        tables = torch.stack([row_I, first_I, slot_I]), torch.stack([row_X, slot_R[row_X]])
        items_3I, cut_2X = (_sent(table.to(torch.int32).contiguous(), device) for table in tables)
        return Work(items_3I, cut_2X, int(slots_R.sum()))


def parts_of(sizes_X: Tensor, entries: int, least: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes cut into parts of at most so many entries, at least `least` each, the fullest first: whose a part
    is, which of its entries it begins with, and its place before parts were sorted."""
    counts_X = (-(-sizes_X // entries)).clamp_min(least)
    whose_I = torch.repeat_interleave(counts_X)
    first_I = (torch.arange(len(whose_I)) - (counts_X.cumsum(0) - counts_X)[whose_I]) * entries
    order_I = (sizes_X[whose_I] - first_I).clamp_max(entries).sort(descending=True, stable=True).indices
    return whose_I[order_I], first_I[order_I], order_I


def _sent(table: Tensor, device: torch.device | str) -> Tensor:
    """A table on its way to the device; from pinned memory, since the host waits for copies of any other."""
    if torch.device(device).type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)
