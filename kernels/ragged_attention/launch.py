"""What is launched for a call: one kernel, a second where rows were cut, a third for by-products.

In: what `retain.kernels.ragged_attention` was given, checked. Out: its outputs. The one decision taken here:
where the layout is known, nothing here depends on a number that only the device has. The first call of a
layout cuts its rows on the host and sends the tables, which costs the host time and waits for nothing.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from retain.kernels import backend
from retain.kernels.ragged_attention.kernel import attend, combine, pay
from retain.kernels.ragged_attention.pages import PAGE, Pages
from retain.kernels.ragged_attention.tiles import (
    LOOKED,
    PARTS,
    PARTS_WARPS,
    is_hopper,
    item_entries,
    pay_tile,
    tile,
)
from retain.kernels.ragged_attention.work import Work, work_of

LOG2_E = 1.4426950408889634


def ragged_attention(
    queries_BQSD: Tensor,
    keys_CD: Tensor,
    values_CD: Tensor,
    offsets_R1: Tensor,
    seen_RS: Tensor,
    *,
    scaling: float,
    soft_cap: float | None,
    sinks_Q: Tensor | None,
    window: int | None,
    positions_C: Tensor | None,
    query_positions_BS: Tensor | None,
    pages: Pages | None,
    stats: bool,
) -> list[Tensor]:
    """`retain.kernels.ragged_attention.ragged_attention`, which see: the output, and with `stats` the two
    sides."""
    B, Q, S, D = queries_BQSD.shape
    R, DV, device = seen_RS.shape[0], values_CD.shape[1], keys_CD.device
    group = B * Q // R
    rows = group * S
    block_d, block_v = backend.block_of(D), backend.block_of(DV)
    dtype = keys_CD.dtype
    cut = tile(rows, dtype, max(block_d, block_v), hopper=is_hopper(device))
    blocks = -(-rows // cut.m)
    if pages is None:  # this is where the device is waited for
        offsets = offsets_R1.tolist()
        rooms = [stop - start for start, stop in pairwise(offsets)]

        def worked(entries: int) -> Work:
            return work_of(rooms, entries, device)

        num_entries = sum(rooms)
    else:
        worked, num_entries = pages.work, pages.num_pages * PAGE
    entries = item_entries(num_entries, blocks, cut, device)
    work = worked(entries)
    num_parts = work.num_slots * rows
    # Laid out as attention modules want it, who put a query's heads side by side.
    out_BQSV = queries_BQSD.new_empty(B, S, Q, DV).transpose(1, 2)
    parts = keys_CD.new_empty(num_parts * (DV + 2), dtype=torch.float32)
    lse_RM = keys_CD.new_empty(R, rows, dtype=torch.float32) if stats else None
    if soft_cap is None:
        scale, cap = scaling * LOG2_E, 0.0
    else:
        scale, cap = scaling / soft_cap, soft_cap * LOG2_E
    if sinks_Q is not None:
        sinks_Q = sinks_Q.contiguous()
    places = (0, 0) if query_positions_BS is None else query_positions_BS.stride()
    position = 0 if positions_C is None else positions_C.stride(0)
    precision, upcast = backend.dot_precision(dtype), backend.upcast(dtype)
    shape = (R // B, group, S)
    strides = queries_BQSD.stride()
    with _on(device):
        attend[(work.num_items * blocks,)](
            queries_BQSD,
            keys_CD,
            values_CD,
            offsets_R1,
            seen_RS,
            sinks_Q,
            positions_C,
            query_positions_BS,
            work.items_3I,
            out_BQSV,
            lse_RM,
            parts,
            scale,
            cap,
            window or 0,
            work.num_items,
            num_parts,
            entries,
            blocks,
            *shape,
            *strides,
            *keys_CD.stride(),
            *values_CD.stride(),
            *seen_RS.stride(),
            position,
            *places,
            *out_BQSV.stride()[:3],
            D=D,
            DV=DV,
            BLOCK_D=block_d,
            BLOCK_V=block_v,
            M=cut.m,
            N=cut.n,
            CAPPED=soft_cap is not None,
            PRECISION=precision,
            UPCAST=upcast,
            num_warps=cut.num_warps,
            num_stages=cut.num_stages,
        )
        if work.num_cut:
            combine[(work.num_cut * rows,)](
                parts,
                seen_RS,
                sinks_Q,
                work.cut_2X,
                out_BQSV,
                lse_RM,
                work.num_cut,
                num_parts,
                entries,
                *shape,
                *seen_RS.stride(),
                *out_BQSV.stride()[:3],
                DV=DV,
                BLOCK_V=block_v,
                I=PARTS,
                num_warps=PARTS_WARPS,
            )
        if lse_RM is None:
            return [out_BQSV]
        max_C, sum_C = (keys_CD.new_zeros(keys_CD.shape[0], dtype=torch.float32) for _ in range(2))
        paying = pay_tile(rows, dtype)
        blocks_of_keys = worked(paying.n)
        pay[(blocks_of_keys.num_items,)](
            queries_BQSD,
            keys_CD,
            offsets_R1,
            seen_RS,
            positions_C,
            query_positions_BS,
            blocks_of_keys.items_3I,
            lse_RM,
            max_C,
            sum_C,
            scale,
            cap,
            window or 0,
            blocks_of_keys.num_items,
            *shape,
            *strides,
            *keys_CD.stride(),
            *seen_RS.stride(),
            position,
            *places,
            D=D,
            BLOCK_D=block_d,
            M=paying.m,
            N=paying.n,
            LOOKED=LOOKED,
            CAPPED=soft_cap is not None,
            PRECISION=precision,
            UPCAST=upcast,
            num_warps=paying.num_warps,
            num_stages=paying.num_stages,
        )
    return [out_BQSV, max_C, sum_C]


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches go to the device that is current, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
