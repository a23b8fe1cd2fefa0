"""Triton kernels of `compact_` and `append_`: rows packed in place, block by block, and entries put behind
them.

Columns come as words: whole numbers as wide as an entry's bytes allow. In place, a row can only be packed
from its front to its back, so a program owns a slice of 64 bytes of every entry of one row of one column,
and walks along the row; other slices, columns and rows run beside it. Within a program a block is read whole
before any of it is written, by a barrier, and the next block is on its way meanwhile: it lies behind
everything written.
"""

# Kernels are annotated where it means something to Triton: `tl.constexpr`.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "num_entries"])
def count(keep_ptr, lengths_ptr, begins_ptr, firsts_ptr, kept_ptr, order_ptr, num_rows, num_entries,
          BLOCK: tl.constexpr):  # fmt: skip
    """Of each row: where its part of the mask begins, its first hole (or its length), the entries that it
    keeps; and the rows in the order of their lengths, the longest first."""
    row = tl.program_id(0)
    held = tl.load(lengths_ptr + row)
    begin = tl.full([], 0, tl.int64)
    longer = row - row
    for left in range(0, num_rows, BLOCK):
        at = left + tl.arange(0, BLOCK)
        length = tl.load(lengths_ptr + at, mask=at < num_rows, other=-1)
        begin += tl.sum(tl.where(at < row, length, 0).to(tl.int64))
        longer += tl.sum(((length > held) | ((length == held) & (at < row))).to(tl.int32))
    first, kept = held, held - held
    for left in range(0, held, BLOCK):
        at = left + tl.arange(0, BLOCK)
        there = (at < held) & (begin + at < num_entries)
        keep = tl.load(keep_ptr + begin + at, mask=there, other=0) != 0
        kept += tl.sum(keep.to(tl.int32))
        first = tl.minimum(first, tl.min(tl.where(keep | (at >= held), held, at)))
    tl.store(begins_ptr + row, begin)
    tl.store(firsts_ptr + row, first)
    tl.store(kept_ptr + row, kept)
    tl.store(order_ptr + longer, row)


@triton.jit
def _kept(keep_ptr, n, held, some):
    """Which entries `n` of a row stay; `some`: as many of them as the mask has."""
    return tl.load(keep_ptr + n, mask=(n < held) & (n < some), other=0) != 0


@triton.jit(do_not_specialize=["num_columns", "num_entries"])
def move(
    a_ptr, b_ptr, c_ptr, d_ptr, keep_ptr, offsets_ptr, lengths_ptr, begins_ptr, firsts_ptr, order_ptr,
    num_columns, num_entries,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Packs one slice of every entry of one row of one of up to four columns."""
    # The longest rows begin first, and the slices of a row run at a time.
    SLICES: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    row = tl.load(order_ptr + tl.program_id(0) // (SLICES * num_columns))
    which = tl.program_id(0) // SLICES % num_columns
    if which == 0:
        column_ptr = a_ptr
    elif which == 1:
        column_ptr = b_ptr
    elif which == 2:
        column_ptr = c_ptr
    else:
        column_ptr = d_ptr
    held = tl.load(lengths_ptr + row)
    hole = tl.load(firsts_ptr + row)
    begin = tl.load(begins_ptr + row)
    keep_ptr += begin
    some = num_entries - begin
    word = tl.program_id(0) % SLICES * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (word < WIDTH)[None, :]
    column_ptr += tl.load(offsets_ptr + row) * STRIDE + word[None, :]

    # On its way at any time: the words of the next block, and the mask of the one after it.
    n = hole + tl.arange(0, BLOCK_N)
    keep = _kept(keep_ptr, n, held, some)
    words = tl.load(column_ptr + n.to(tl.int64)[:, None] * STRIDE, mask=keep[:, None] & inside, other=0)
    n += BLOCK_N
    next_keep = _kept(keep_ptr, n, held, some)
    put = hole
    for _ in range(hole, held, BLOCK_N):
        at = column_ptr + n.to(tl.int64)[:, None] * STRIDE
        next_words = tl.load(at, mask=next_keep[:, None] & inside, other=0)
        n += BLOCK_N
        after_keep = _kept(keep_ptr, n, held, some)
        to = put + tl.cumsum(keep.to(tl.int32), 0) - 1
        # Everybody has read this block: it is where some of it is written.
        tl.debug_barrier()
        tl.store(column_ptr + to.to(tl.int64)[:, None] * STRIDE, words, mask=keep[:, None] & inside)
        put += tl.sum(keep.to(tl.int32))
        keep, words, next_keep = next_keep, next_words, after_keep
    # Nobody reads any more.
    tl.debug_barrier()
    nothing = tl.zeros([BLOCK_N, BLOCK_W], column_ptr.dtype.element_ty)
    for left in range(put, held, BLOCK_N):
        n = left + tl.arange(0, BLOCK_N)
        at = column_ptr + n.to(tl.int64)[:, None] * STRIDE
        tl.store(at, nothing, mask=(n < held)[:, None] & inside)


@triton.jit
def _put(column_ptr, new_ptr, stride_c, stride_b, stride_h, stride_s, batch, head, s, slot, write,
         WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """New tokens `s` of one row into these slots of a column; a store makes a whole number of one size what
    the column holds."""
    column_ptr += slot[:, None] * stride_c
    new_ptr += batch * stride_b + head * stride_h + s.to(tl.int64)[:, None] * stride_s
    for left in range(0, WIDTH, BLOCK):
        word = (left + tl.arange(0, BLOCK))[None, :]
        mask = write[:, None] & (word < WIDTH)
        tl.store(column_ptr + word, tl.load(new_ptr + word, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["H", "S", "stride_vb"])
def append(
    offsets_ptr, lengths_ptr, valid_ptr, seen_ptr, H, S, stride_vb, stride_vs,
    a_ptr, new_a_ptr, a_c, a_b, a_h, a_s, b_ptr, new_b_ptr, b_c, b_b, b_h, b_s,
    c_ptr, new_c_ptr, c_c, c_b, c_h, c_s, A_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr, C_WIDTH: tl.constexpr,
    A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr, C_BLOCK: tl.constexpr,
    PADDED: tl.constexpr, RAISE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Writes new tokens of one row into up to three columns.

    `x_ptr`, `new_x_ptr`: a column and its new entries; then the strides of both. `RAISE`: raise the length
    too.
    """
    row = tl.program_id(0)
    batch, head = (row // H).to(tl.int64), (row % H).to(tl.int64)
    first = tl.program_id(1) * BLOCK_S
    s = first + tl.arange(0, BLOCK_S)
    write = s < S
    held = tl.load(lengths_ptr + row)
    if PADDED:
        valid_ptr += batch * stride_vb
        before = held
        for left in range(0, first, BLOCK_V):
            earlier = left + tl.arange(0, BLOCK_V)
            real = tl.load(valid_ptr + earlier * stride_vs, mask=earlier < first, other=0)
            before += tl.sum((real != 0).to(tl.int32))
        write &= tl.load(valid_ptr + s * stride_vs, mask=write, other=0) != 0
        sees = before + tl.cumsum(write.to(tl.int32), 0)
    else:
        sees = held + s + 1
    slot = tl.load(offsets_ptr + row) + sees.to(tl.int64) - 1
    if A_WIDTH > 0:
        _put(a_ptr, new_a_ptr, a_c, a_b, a_h, a_s, batch, head, s, slot, write, A_WIDTH, A_BLOCK)
    if B_WIDTH > 0:
        _put(b_ptr, new_b_ptr, b_c, b_b, b_h, b_s, batch, head, s, slot, write, B_WIDTH, B_BLOCK)
    if C_WIDTH > 0:
        _put(c_ptr, new_c_ptr, c_c, c_b, c_h, c_s, batch, head, s, slot, write, C_WIDTH, C_BLOCK)
    tl.store(seen_ptr + row.to(tl.int64) * S + s, tl.where(write, sees, 0).to(tl.int64), mask=s < S)
    if RAISE:
        # Nobody reads it any more: of this launch this program alone does, since it has no other of this row
        # (`num_programs(1)` is 1), its own threads have by the barrier, and earlier launches are over.
        tl.debug_barrier()
        tl.store(lengths_ptr + row, held + tl.sum(write.to(tl.int32)))
