"""Launches attention over ragged rows, and lists its builds: one kernel, and a second where rows
were cut.

Where the layout is known, nothing here depends on a number that only the device has. The first call of a
layout cuts its rows on the host and sends the tables, which costs the host time and waits for nothing.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retain.kernels import backend
from retain.kernels.build import ARCHS, Build, Tile
from retain.kernels.codes import Codes
from retain.kernels.ragged_attention.kernel import attend, combine
from retain.kernels.ragged_attention.pages import PAGE
from retain.kernels.ragged_attention.reference import Call, Result
from retain.kernels.ragged_attention.tiles import PARTS, PARTS_WARPS, item_entries, tile
from retain.kernels.ragged_attention.work import work_of


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
    places = (0, 0) if call.query_positions_BS is None else call.query_positions_BS.stride()
    position, weight = (
        0 if column_C is None else column_C.stride(0) for column_C in (call.positions_C, call.log_weight_C)
    )
    shape = (R // B, group, S)
    own, theirs = _held(keys, block_d), _held(values, block_v)
    with torch.cuda.device_of(queries):
        attend[(work.num_items * blocks,)](
            *(queries, own.numbers, theirs.numbers, call.offsets_R1, seen_RS, sinks_Q),
            *(call.positions_C, call.query_positions_BS, call.log_weight_C, work.items_3I, out_BQSV, parts),
            *(scale, cap, call.window or 0, work.num_items, num_parts, entries, blocks, *shape),
            *(*queries.stride(), *own.numbers.stride(), *theirs.numbers.stride(), *seen_RS.stride()),
            *(position, *places, weight, *out_BQSV.stride()[:3]),
            *(own.scales, own.groups, theirs.scales, lse_BQS),
            **{"D": D, "DV": DV, "BLOCK_D": block_d, "BLOCK_V": block_v, "M": cut.m, "N": cut.n},
            **_multiplied(dtype, capped=call.soft_cap is not None),
            **{"KEY_BITS": own.bits, "VALUE_BITS": theirs.bits, "VALUE_SPAN": theirs.span},
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
    """One store; a span of all its channels is said to be as wide as the tile."""
    if isinstance(store_CD, Tensor):
        return _Held(store_CD)
    codes_CW, scales_G2N, groups_C, bits, span, width = store_CD
    groups_C = None if groups_C is None else groups_C.contiguous()
    return _Held(codes_CW, scales_G2N.contiguous(), groups_C, bits, block if span >= width else span)


def _multiplied(dtype: torch.dtype, *, capped: bool) -> dict[str, Any]:
    """Constants of `attend` that follow the precision."""
    return {"CAPPED": capped, "PRECISION": backend.dot_precision(dtype), "UPCAST": backend.upcast(dtype)}


# Stores that are compiled for ahead of time: bits of keys, bits and span of values; 0 bits are numbers.
_KIVI4, _KIVI2 = (4, 4, 32), (2, 2, 32)
_OTHERS = ((8, 8, 32), (4, 2, 24), (0, 4, 256), (4, 0, 0))
_NUMBERS = (0, 0, 0)


def builds() -> list[Build]:
    """Every kernel as it would be launched: decoding, few queries and many, narrow heads and wide, with all
    options (cap, window, sinks, log weights, log-sum-exp) and with none, over numbers and over codes."""
    half, full = torch.bfloat16, torch.float32
    plain = [(half, width, rows) for width in (64, 128, 256) for rows in (4, 64, 512)]
    plain += [(torch.float16, 128, 512), (half, 80, 4), (half, 32, 4)]
    plain += [(full, width, rows) for width in (64, 128, 256) for rows in (4, 64)]
    every = [(half, 128, rows) for rows in (4, 64, 512)] + [(half, 256, 512), (full, 128, 4), (full, 256, 64)]
    codes = [(half, 128, 4, 128, False, held) for held in _OTHERS]
    codes += [(half, width, 4, width, False, _KIVI4) for width in (64, 128, 256)]
    codes += [(half, 128, rows, 128, True, _KIVI4) for rows in (4, 64, 512)]
    codes += [(torch.float16, 128, 64, 128, False, _KIVI2), (half, 256, 512, 256, False, _KIVI4)]
    codes += [(half, 128, 4, 128, False, _KIVI2), (half, 20, 4, 128, False, _KIVI4)]
    codes += [(full, width, 4, width, False, _KIVI4) for width in (128, 256)]
    made = []
    for dtype, width, rows, values, options, held in (
        *((*one, one[1], False, _NUMBERS) for one in plain),
        *((*one, one[1], True, _NUMBERS) for one in every),
        (half, 192, 4, 128, False, _NUMBERS),
        *codes,
    ):
        block = backend.block_of(max(width, values))
        tiles = {arch: tile(rows, dtype, block, arch, held != _NUMBERS) for arch in ARCHS}
        for cut in dict.fromkeys(tiles.values()):  # where tiles differ, architectures get their own
            archs = [arch for arch in ARCHS if tiles[arch] == cut]
            made.append(_build(attend, dtype, width, rows, cut, options, values, archs, held))
    for dtype, width, options in ((half, 128, False), (half, 128, True), (full, 256, False)):
        made.append(_build(combine, dtype, width, 0, Tile(1, PARTS, PARTS_WARPS, 3), options))
    return made


def _build(
    kernel: Any, dtype: torch.dtype, width: int, rows: int, cut: Tile, options: bool,
    values: int | None = None, archs: list[int] | None = None, held: tuple[int, ...] = _NUMBERS,
) -> Build:  # fmt: skip
    """One kernel, for so many query rows (`combine`: 0), with all options or none, over numbers or codes."""
    kind, values = backend.TYPES[dtype], width if values is None else values
    words = [kernel.fn.__name__, kind, f"D={width}", *([f"{rows} queries"] if rows else [])]
    words += ["all options"] * options + [f"DV={values}"] * (values != width)
    words += [f"bits {held[0]}/{held[1]} span {held[2]}"] * (held != _NUMBERS)
    types = dict.fromkeys(("queries", "keys", "values", "out", "sinks"), f"*{kind}")
    types |= dict.fromkeys(("offsets", "seen", "query_positions"), "*i64")
    types |= dict.fromkeys(("items", "cut", "positions"), "*i32")
    types |= {"parts": "*fp32", "weights": "*fp32", "scale": "fp32", "cap": "fp32"}
    constants: dict[str, Any] = dict.fromkeys(("q_d", "k_d", "v_d", "seen_s"), 1)
    constants |= {"D": width, "BLOCK_D": backend.block_of(width), "DV": values, "M": cut.m, "N": cut.n}
    constants |= {"BLOCK_V": backend.block_of(values), "I": PARTS}
    constants |= {**_multiplied(dtype, capped=options), "UPCAST": False}
    # Positions are contiguous where there are some; without them their strides are the number 0.
    if options:
        types |= {"lse": "*fp32"}
        constants |= {"positions_c": 1, "places_s": 1, "weights_c": 1}
    else:
        constants |= dict.fromkeys(("sinks", "positions", "query_positions", "weights", "lse"))
    key_bits, value_bits, span = held
    span = backend.block_of(values) if span >= values else span
    constants |= {"KEY_BITS": key_bits, "VALUE_BITS": value_bits, "VALUE_SPAN": span}
    types |= {"key_scales": "*fp16", "key_groups": "*i32", "value_scales": "*fp16"}
    types |= {f"{name}s": "*u8" for name, bits in (("key", key_bits), ("value", value_bits)) if bits}
    constants |= dict.fromkeys(
        ["key_scales", "key_groups"] * (not key_bits) + ["value_scales"] * (not value_bits)
    )
    vectors = ["positions_c", "places_s", "weights_c"]
    if width % 16 == 0:
        vectors += ["q_b", "q_q", "q_s", "k_c", "v_c", "o_b", "o_q", "o_s"]
    wgmma = dtype != torch.float32 and cut.m >= 64
    return Build(" ".join(words), kernel, types, constants, cut, vectors, wgmma, archs or ARCHS)
