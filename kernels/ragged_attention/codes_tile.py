"""Reads a tile of a store that is held as codes (`retain.kernels.codes`): bytes come in, numbers come out.

Bytes are loaded as they lie and taken apart in registers (`tl.interleave`), so that loads are as wide as of a
store of numbers. Scales are loaded once a span; neighbouring entries of one group load the same ones again,
from the caches.
"""

# mypy: disable-error-code="no-untyped-def"
# (Arguments of kernels are typed by Triton.)

import triton
import triton.language as tl


@triton.jit
def _taken_apart(byte_nw, BITS: tl.constexpr):
    """The codes in each byte, the lowest bits first: `[N, W]` as `[N, W * 8 / BITS]`."""
    codes = byte_nw
    if BITS == 4:
        codes = tl.interleave(byte_nw & 15, byte_nw >> 4)
    elif BITS == 2:
        even = tl.interleave(byte_nw & 3, (byte_nw >> 4) & 3)
        odd = tl.interleave((byte_nw >> 2) & 3, byte_nw >> 6)
        codes = tl.interleave(even, odd)
    return codes


@triton.jit
def _spread(
    scale_at, row_n, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, stop, MASKED: tl.constexpr
):
    """A number for each span of each entry, for each channel of it: `[N, BLOCK]` float32."""
    SPANS: tl.constexpr = (WIDTH + SPAN - 1) // SPAN
    j = tl.arange(0, BLOCK // SPAN)
    real_nj = (j < SPANS)[None, :] & ((row_n < stop)[:, None] if MASKED else True)
    scale_nj = tl.load(scale_at[:, None] + j[None, :], mask=real_nj, other=0.0).to(tl.float32)
    if SPAN > 1:
        wide = tl.broadcast_to(scale_nj[:, :, None], [row_n.shape[0], BLOCK // SPAN, SPAN])
        scale_nj = tl.reshape(wide, [row_n.shape[0], BLOCK])
    return scale_nj


@triton.jit
def coded_tile(
    at, row_n, stride_row, stride_byte, scales, groups, stop,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`[N, BLOCK]` float32 of the store: `least + step * code`; zeros beyond `stop` (if MASKED).

    `scales` and `groups` are contiguous; `groups` is None where each entry has scales of its own. `SPAN` is
    a power of two, and BLOCK where all channels share one. Beyond its width a row has whatever its last span
    has, or zeros.
    """
    SPANS: tl.constexpr = (WIDTH + SPAN - 1) // SPAN
    WIDE: tl.constexpr = (WIDTH * BITS + 7) // 8
    w = tl.arange(0, BLOCK * BITS // 8)
    where = at + row_n.to(tl.int64)[:, None] * stride_row + w.to(tl.int64)[None, :] * stride_byte
    if MASKED:
        byte_nw = tl.load(where, mask=(row_n < stop)[:, None] & (w < WIDE)[None, :], other=0)
    elif w.shape[0] == WIDE:
        byte_nw = tl.load(where)
    else:
        byte_nw = tl.load(where, mask=(w < WIDE)[None, :], other=0)
    group_n = row_n
    if groups is not None:
        group_n = tl.load(groups + row_n.to(tl.int64), mask=(row_n < stop) if MASKED else None)
    step_at = scales + group_n.to(tl.int64) * (2 * SPANS)
    step_nd = _spread(step_at, row_n, BLOCK, WIDTH, SPAN, stop, MASKED)
    least_nd = _spread(step_at + SPANS, row_n, BLOCK, WIDTH, SPAN, stop, MASKED)
    return least_nd + step_nd * _taken_apart(byte_nw, BITS).to(tl.float32)
