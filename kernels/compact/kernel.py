"""The kernels of `compact_` and `append_`: rows packed in place, block by block, and entries put behind them.

In: columns as words (whole numbers as wide as an entry's bytes allow). Out: the same storage. The one
decision taken here: in place, a row can only be packed from its front to its back, so a program owns a slice
of 64 bytes of every entry of one row of one column, and walks along the row; what runs beside it are other
slices, columns and rows. Within a program a block is read whole before any of it is written, by a barrier,
and the next block is on its way meanwhile: it lies behind everything that is written.
"""

# Kernels are annotated where it means something to Triton: `tl.constexpr`.
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from retain.kernels.build import Build
from retain.kernels.compact import reference

# Columns that one launch packs, and to which one launch appends: keys, values and positions.
AT_ONCE, APPENDED = 4, 3
# Entries of a row that are counted, or new tokens that are numbered, at a time.
COUNTED = 4096
NUMBERED = 1024
# Bytes of an entry that a program takes: a whole access of the memory. And bytes that it holds at a time.
SLICE_BYTES, BLOCK_BYTES, MAX_ENTRIES = 64, 1 << 15, 2048
# New tokens of a row that a program writes, where more than one comes.
TOKENS = 32


@dataclass(frozen=True)
class Tile:
    """What a program works on at a time.

    Args:
        entries: of a row.
        words: of each of them.
        num_warps: of a program.
    """

    entries: int
    words: int
    num_warps: int


def tile(what: str, width: int, num_bytes: int) -> Tile:
    """The tile of `move` or `append`, for entries of so many words of so many bytes."""
    if what == "append":
        return Tile(TOKENS, min(triton.next_power_of_2(width), 256 // num_bytes), 4)
    words = min(triton.next_power_of_2(width), SLICE_BYTES // num_bytes)
    # Each word of a byte waits in a register of its own.
    return Tile(min(MAX_ENTRIES, BLOCK_BYTES // (words * max(2, num_bytes))), words, 8)


@triton.jit(do_not_specialize=["num_rows", "num_entries"])
def _count(
    keep_ptr,
    lengths_ptr,
    begins_ptr,
    firsts_ptr,
    kept_ptr,
    order_ptr,
    num_rows,
    num_entries,
    BLOCK: tl.constexpr,
):
    """Of each row: where its part of the mask begins, its first hole (or its length), what it keeps; and the
    rows in the order of their lengths, the longest first."""
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
def _move(
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    keep_ptr,
    offsets_ptr,
    lengths_ptr,
    begins_ptr,
    firsts_ptr,
    order_ptr,
    num_columns,
    num_entries,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
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
def _put(
    column_ptr,
    new_ptr,
    stride_c,
    stride_b,
    stride_h,
    stride_s,
    batch,
    head,
    s,
    slot,
    write,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """New tokens `s` of one row into these slots of a column; a store makes a whole number of one size what
    the column holds."""
    column_ptr += slot[:, None] * stride_c
    new_ptr += batch * stride_b + head * stride_h + s.to(tl.int64)[:, None] * stride_s
    for left in range(0, WIDTH, BLOCK):
        word = (left + tl.arange(0, BLOCK))[None, :]
        mask = write[:, None] & (word < WIDTH)
        tl.store(column_ptr + word, tl.load(new_ptr + word, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["H", "S", "stride_vb"])
def _append(
    offsets_ptr,
    lengths_ptr,
    valid_ptr,
    seen_ptr,
    H,
    S,
    stride_vb,
    stride_vs,
    a_ptr,
    new_a_ptr,
    a_c,
    a_b,
    a_h,
    a_s,
    b_ptr,
    new_b_ptr,
    b_c,
    b_b,
    b_h,
    b_s,
    c_ptr,
    new_c_ptr,
    c_c,
    c_b,
    c_h,
    c_s,
    A_WIDTH: tl.constexpr,
    B_WIDTH: tl.constexpr,
    C_WIDTH: tl.constexpr,
    A_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    C_BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    RAISE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """`x_ptr`, `new_x_ptr`: a column and what is new for it; then the strides of both."""
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


def plan(keep_N: Tensor, offsets_R1: Tensor, lengths_R: Tensor) -> tuple[Tensor, ...]:
    """What each row keeps, and what `move_` needs beside the columns."""
    R = lengths_R.shape[0]
    lengths_R, keep_N = lengths_R.contiguous(), keep_N.contiguous().view(torch.uint8)
    kept_R, firsts_R, order_R = (torch.empty_like(lengths_R) for _ in range(3))
    begins_R = torch.empty_like(lengths_R, dtype=torch.int64)
    tables = (begins_R, firsts_R, kept_R, order_R)
    if R:
        with torch.cuda.device_of(lengths_R):
            _count[(R,)](keep_N, lengths_R, *tables, R, keep_N.shape[0], BLOCK=COUNTED, num_warps=4)
    return kept_R, keep_N, offsets_R1.contiguous(), lengths_R, begins_R, firsts_R, order_R


def move_(columns: Sequence[Tensor], keep_N: Tensor, *tables: Tensor) -> None:
    """Carry out a plan: one launch for up to four columns of one shape."""
    alike: dict[tuple[torch.dtype, int, int], list[Tensor]] = {}
    for column in columns:
        words = reference.as_words(column)
        assert words is not None, "the plan was made for these columns"
        alike.setdefault((words.dtype, words.stride(0), words.shape[1]), []).append(words)
    R = tables[-1].shape[0]
    for (dtype, stride, width), group in alike.items():
        if not R or not width:
            continue
        chosen = tile("move", width, dtype.itemsize)
        for first in range(0, len(group), AT_ONCE):
            some = group[first : first + AT_ONCE]
            with torch.cuda.device_of(keep_N):
                _move[(R * triton.cdiv(width, chosen.words) * len(some),)](
                    *some,
                    *some[:1] * (AT_ONCE - len(some)),
                    keep_N,
                    *tables,
                    len(some),
                    keep_N.shape[0],
                    STRIDE=stride,
                    WIDTH=width,
                    BLOCK_N=chosen.entries,
                    BLOCK_W=chosen.words,
                    num_warps=chosen.num_warps,
                    num_stages=1,
                )


def append_(
    columns: Sequence[Tensor],
    new: Sequence[Tensor],
    offsets_R1: Tensor,
    lengths_R: Tensor,
    valid_BS: Tensor | None,
) -> Tensor:
    """See the op: one launch for up to three columns, and where a row's tokens are more than one program
    writes, one addition to raise the lengths."""
    B, H, S = new[0].shape[:3]
    seen_RS = torch.empty((B * H, S), dtype=torch.int64, device=lengths_R.device)
    if not seen_RS.numel():
        return seen_RS
    pairs = [_pair(column, values) for column, values in zip(columns, new, strict=True)]
    block = 1 if S == 1 else TOKENS
    blocks = triton.cdiv(S, block)
    alone = blocks == 1 and lengths_R.is_contiguous()
    valid = None if valid_BS is None else valid_BS.view(torch.uint8)
    lengths, offsets = lengths_R.contiguous(), offsets_R1.contiguous()
    with torch.cuda.device_of(lengths_R):
        for first in range(0, len(pairs), APPENDED):
            some = pairs[first : first + APPENDED]
            some += [(_NOTHING, 0, 1)] * (APPENDED - len(some))
            _append[(B * H, blocks)](
                offsets,
                lengths,
                valid,
                seen_RS,
                H,
                S,
                *((0, 0) if valid is None else valid.stride()),
                *(argument for arguments, _, _ in some for argument in arguments),
                *(width for _, width, _ in some),
                *(words for _, _, words in some),
                PADDED=valid is not None,
                RAISE=alone and first + APPENDED >= len(pairs),
                BLOCK_S=block,
                BLOCK_V=NUMBERED,
                num_warps=1 if S == 1 else 4,
            )
    if not alone:
        lengths_R += S if valid_BS is None else valid_BS.sum(-1, dtype=torch.int32).repeat_interleave(H)
    return seen_RS


# Arguments of `_append` for a column that there is not.
_NOTHING: tuple[Tensor | int | None, ...] = (None, None, 0, 0, 0, 0)
# Whole numbers that become one another as they are written.
_WHOLE = frozenset(reference.WORDS.values())


def _pair(column: Tensor, values: Tensor) -> tuple[tuple[Tensor | int | None, ...], int, int]:
    """A column and what is new for it, as words of one size: arguments of `_append`, the words of an entry,
    and how many of them are written at a time. What is new is copied only to convert it (not if both are
    whole numbers), or where an entry's numbers do not lie one behind another.

    It runs for every column of every layer at every token, so it asks for little and makes few views.
    """
    if not column.numel() or not values.numel():
        return _NOTHING, 0, 1
    if column.requires_grad or values.requires_grad:
        column, values = column.detach(), values.detach()
    if column.ndim > 2:
        column = column.view(column.shape[0], -1)
    if values.ndim > 4:
        values = values.reshape(*values.shape[:3], -1)
    kind, width = column.dtype, column.shape[1] if column.ndim == 2 else 1
    if width > 1 and values.stride(3) != 1:
        values = values.contiguous()
    c, (b, h, s) = column.stride(0), values.stride()[:3]
    size = kind.itemsize
    if values.dtype != kind:
        if kind in _WHOLE and values.dtype in _WHOLE:
            return (column, values, c, b, h, s), width, _words(width, max(size, values.dtype.itemsize))
        values = values.to(kind)
        b, h, s = values.stride()[:3]
    # The widest word that divides every address and every step, axes of one entry included: they are powers
    # of two, so it is the lowest bit that is set in any of them.
    offsets = int(column.storage_offset()) | int(values.storage_offset()) | c | b | h | s | width
    common = column.data_ptr() | values.data_ptr() | offsets * size | 8
    common &= -common
    if common != size or kind not in _WHOLE:
        word = reference.WORDS[common]
        column, values = _viewed(column, word), _viewed(values, word)
        width = width * size // common
        c, b, h, s = (step * size // common for step in (c, b, h, s))
    return (column, values, c, b, h, s), width, _words(width, common)


def _viewed(tensor: Tensor, word: torch.dtype) -> Tensor:
    """The same memory as words; only its address is read afterwards."""
    if tensor.dtype.itemsize > word.itemsize:  # numbers of 16 bytes, or at an odd address
        tensor = tensor.unsqueeze(-1)
    return tensor.view(word)


@cache
def _words(width: int, num_bytes: int) -> int:
    return tile("append", width, num_bytes).words


def builds() -> list[Build]:
    """Every kernel with every tile: entries of 256 bytes and less, of two, and of 192, which end within a
    slice; single tokens and many, padded or not."""
    found = [
        Build(
            name="count",
            kernel=_count,
            signature={
                "keep_ptr": "*u8",
                "lengths_ptr": "*i32",
                "begins_ptr": "*i64",
                "firsts_ptr": "*i32",
                "kept_ptr": "*i32",
                "order_ptr": "*i32",
                "num_rows": "i32",
                "num_entries": "i32",
            },
            constants={"BLOCK": COUNTED},
            aligned=("keep_ptr", "lengths_ptr", "begins_ptr", "firsts_ptr", "kept_ptr", "order_ptr"),
        )
    ]
    # Every tile of `move`, then entries longer than a slice, of which some end within one.
    shapes = [(size, 1 << log) for size in (8, 4, 2, 1) for log in range((SLICE_BYTES // size).bit_length())]
    shapes += [(8, 64), (8, 32), (8, 12), (4, 33), (2, 33)]
    for num_bytes, width in shapes:
        chosen = tile("move", width, num_bytes)
        columns = [f"{name}_ptr" for name in "abcd"]
        tables = {"keep_ptr": "*u8", "offsets_ptr": "*i64", "lengths_ptr": "*i32", "begins_ptr": "*i64"}
        found.append(
            Build(
                name=f"move {width} words of {num_bytes} bytes",
                kernel=_move,
                signature={
                    **dict.fromkeys(columns, f"*i{8 * num_bytes}"),
                    **tables,
                    **dict.fromkeys(("firsts_ptr", "order_ptr"), "*i32"),
                    **dict.fromkeys(("num_columns", "num_entries"), "i32"),
                },
                constants={
                    "STRIDE": width,
                    "WIDTH": width,
                    "BLOCK_N": chosen.entries,
                    "BLOCK_W": chosen.words,
                },
                num_warps=chosen.num_warps,
                num_stages=1,
                aligned=(*columns, *tables, "firsts_ptr", "order_ptr"),
            )
        )
    for tokens in (1, TOKENS):
        for padded in (False, True):
            # Keys and values of 128 numbers of half precision, and positions.
            found.append(_built_append(tokens, padded, (32, 32, 1), (8, 8, 4), positions=True))
        found.append(_built_append(tokens, True, (33, 1, 0), (2, 1, 0)))
    # Every tile of `append`.
    widths = [(size, 1 << log) for size in (8, 4, 2, 1) for log in range((256 // size).bit_length())]
    for first in range(0, len(widths), APPENDED):
        some = widths[first : first + APPENDED]
        some += [(0, 0)] * (APPENDED - len(some))
        sizes, words = zip(*some, strict=True)
        found.append(_built_append(TOKENS, False, words, sizes))
    return found


def _built_append(
    tokens: int,
    padded: bool,
    widths: tuple[int, ...],
    num_bytes: tuple[int, ...],
    *,
    positions: bool = False,
) -> Build:
    """One configuration; `positions`: what is new for the last column are positions, of 8 bytes, the same for
    all heads."""
    signature = {"offsets_ptr": "*i64", "lengths_ptr": "*i32", "seen_ptr": "*i64", "H": "i32", "S": "i32"}
    # More tokens than one program writes are counted afterwards.
    constants: dict[str, int | bool | None] = {"PADDED": padded, "RAISE": tokens == 1 or not positions}
    constants |= {"BLOCK_S": tokens, "BLOCK_V": NUMBERED}
    signature |= {"stride_vb": "i32"}
    aligned = ["offsets_ptr", "lengths_ptr", "seen_ptr"]
    if padded:
        signature |= {"valid_ptr": "*u8"}
        constants |= {"stride_vs": 1}
        aligned.append("valid_ptr")
    else:
        signature |= {"stride_vs": "i32"}
        constants |= {"valid_ptr": None}
        aligned.append("stride_vs")  # it is 0
    for name, width, size in zip("abc", widths, num_bytes, strict=True):
        pointers, strides = [f"{name}_ptr", f"new_{name}_ptr"], [f"{name}_{axis}" for axis in "cbhs"]
        constants |= {f"{name.upper()}_WIDTH": width}
        whole = 8 if positions and name == "c" else size
        constants |= {f"{name.upper()}_BLOCK": _words(width, max(size, whole)) if width else 1}
        signature |= dict.fromkeys(strides, "i32")
        if not width:
            constants |= dict.fromkeys(pointers)
            aligned += strides  # they are 0
            continue
        signature |= {pointers[0]: f"*i{8 * size}", pointers[1]: f"*i{8 * whole}"}
        aligned += pointers
        if width % 16 == 0:
            aligned += strides
        if width == 1:  # one entry lies behind another, and so do positions
            ones = strides[:1] if whole == size else ["c_c", "c_s", *(["c_b"] if tokens == 1 else [])]
            constants |= dict.fromkeys(ones, 1)
            signature = {argument: kind for argument, kind in signature.items() if argument not in ones}
        if whole > size:
            aligned.append("c_h")  # it is 0
    shape = "/".join(f"{width}x{size}" for width, size in zip(widths, num_bytes, strict=True) if width)
    return Build(
        name=f"append {tokens} of {shape}{' positions' if positions else ''}{' padded' if padded else ''}",
        kernel=_append,
        signature=signature,
        constants=constants,
        num_warps=1 if tokens == 1 else 4,
        aligned=aligned,
    )
