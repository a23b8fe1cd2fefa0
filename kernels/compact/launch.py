"""Launches the kernels of `compact_` and `append_`, and lists their builds."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from retain.kernels.build import Build, Tile
from retain.kernels.compact import kernel, reference

# Columns that one launch packs, and to which one launch appends: keys, values and positions.
AT_ONCE, APPENDED = 4, 3
# Entries of a row that are counted, or new tokens that are numbered, at a time.
COUNTED = 4096
NUMBERED = 1024
# Bytes of an entry that a program takes: a whole access of the memory. And bytes that it holds at a time.
SLICE_BYTES, BLOCK_BYTES, MAX_ENTRIES = 64, 1 << 15, 2048
# New tokens of a row that a program writes, where more than one comes.
TOKENS = 32


def tile(what: str, width: int, num_bytes: int) -> Tile:
    """The tile of `move` or `append`, entries by words, for entries of so many words of so many bytes."""
    whole = 1 << (width - 1).bit_length()
    if what == "append":
        return Tile(TOKENS, min(whole, 256 // num_bytes), 4, 3)
    words = min(whole, SLICE_BYTES // num_bytes)
    # Each word of a byte waits in a register of its own.
    return Tile(min(MAX_ENTRIES, BLOCK_BYTES // (words * max(2, num_bytes))), words, 8, 1)


def plan(keep_N: Tensor, offsets_R1: Tensor, lengths_R: Tensor) -> tuple[Tensor, ...]:
    """Entries that each row keeps, and the tables that `move_` needs beside the columns."""
    R = lengths_R.shape[0]
    lengths_R, keep_N = lengths_R.contiguous(), keep_N.contiguous().view(torch.uint8)
    kept_R, firsts_R, order_R = (torch.empty_like(lengths_R) for _ in range(3))
    begins_R = torch.empty_like(lengths_R, dtype=torch.int64)
    tables = (begins_R, firsts_R, kept_R, order_R)
    if R:
        with torch.cuda.device_of(lengths_R):
            kernel.count[(R,)](keep_N, lengths_R, *tables, R, keep_N.shape[0], BLOCK=COUNTED, num_warps=4)
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
        cut = tile("move", width, dtype.itemsize)
        for first in range(0, len(group), AT_ONCE):
            some = group[first : first + AT_ONCE]
            with torch.cuda.device_of(keep_N):
                kernel.move[(R * -(-width // cut.n) * len(some),)](
                    *(*some, *some[:1] * (AT_ONCE - len(some)), keep_N, *tables, len(some), keep_N.shape[0]),
                    **{"STRIDE": stride, "WIDTH": width, "BLOCK_N": cut.m, "BLOCK_W": cut.n},
                    **cut.options,
                )


def append_(
    columns: Sequence[Tensor],
    new: Sequence[Tensor],
    offsets_R1: Tensor,
    lengths_R: Tensor,
    valid_BS: Tensor | None = None,
) -> Tensor:
    """See the op: one launch for up to three columns, and where a row's tokens are more than one program
    writes, one addition to raise the lengths."""
    B, H, S = new[0].shape[:3]
    seen_RS = torch.empty((B * H, S), dtype=torch.int64, device=lengths_R.device)
    if not seen_RS.numel():
        return seen_RS
    pairs = [_pair(column, values) for column, values in zip(columns, new, strict=True)]
    block = 1 if S == 1 else TOKENS
    blocks = -(-S // block)
    alone = blocks == 1 and lengths_R.is_contiguous()
    valid = None if valid_BS is None else valid_BS.view(torch.uint8)
    lengths, offsets = lengths_R.contiguous(), offsets_R1.contiguous()
    with torch.cuda.device_of(lengths_R):
        for first in range(0, len(pairs), APPENDED):
            some = pairs[first : first + APPENDED]
            some += [(_NOTHING, 0, 1)] * (APPENDED - len(some))
            kernel.append[(B * H, blocks)](
                *(offsets, lengths, valid, seen_RS, H, S, *((0, 0) if valid is None else valid.stride())),
                *(argument for arguments, _, _ in some for argument in arguments),
                *(width for _, width, _ in some),
                *(words for _, _, words in some),
                PADDED=valid is not None,
                RAISE=alone and first + APPENDED >= len(pairs),
                **{"BLOCK_S": block, "BLOCK_V": NUMBERED, "num_warps": 1 if S == 1 else 4},
            )
    if not alone:
        lengths_R += S if valid_BS is None else valid_BS.sum(-1, dtype=torch.int32).repeat_interleave(H)
    return seen_RS


# Arguments of `append` for a column that is missing.
_NOTHING: tuple[Tensor | int | None, ...] = (None, None, 0, 0, 0, 0)
# Whole numbers that become one another as they are written.
_WHOLE = frozenset(reference.WORDS.values())


def _pair(column: Tensor, values: Tensor) -> tuple[tuple[Tensor | int | None, ...], int, int]:
    """A column and its new entries, as words of one size: arguments of `append`, the words of an entry, and
    how many of them are written at a time. New entries are copied only to convert them (not if both are
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
    return tile("append", width, num_bytes).n


def builds() -> list[Build]:
    """Every kernel with every tile: entries of 256 bytes and less, of two, and of 192, which end within a
    slice; single tokens and many, padded or not."""
    types = {"keep_ptr": "*u8", "offsets_ptr": "*i64", "begins_ptr": "*i64"}
    types |= dict.fromkeys(("lengths_ptr", "firsts_ptr", "kept_ptr", "order_ptr"), "*i32")
    found = [Build("count", kernel.count, types, {"BLOCK": COUNTED}, Tile(1, COUNTED, 4, 2))]
    # Every tile of `move`, then entries longer than a slice, of which some end within one.
    shapes = [(size, 1 << log) for size in (8, 4, 2, 1) for log in range((SLICE_BYTES // size).bit_length())]
    for size, width in (*shapes, (8, 64), (8, 32), (8, 12), (4, 33), (2, 33)):
        cut = tile("move", width, size)
        own = {**types, **dict.fromkeys([f"{name}_ptr" for name in "abcd"], f"*i{8 * size}")}
        constants = {"STRIDE": width, "WIDTH": width, "BLOCK_N": cut.m, "BLOCK_W": cut.n}
        found.append(Build(f"move {width} words of {size} bytes", kernel.move, own, constants, cut))
    for tokens in (1, TOKENS):
        for padded in (False, True):
            # Keys and values of 128 numbers of half precision, and positions.
            found.append(_append_build(tokens, padded, (32, 32, 1), (8, 8, 4), positions=True))
        found.append(_append_build(tokens, True, (33, 1, 0), (2, 1, 0)))
    # Every tile of `append`.
    widths = [(size, 1 << log) for size in (8, 4, 2, 1) for log in range((256 // size).bit_length())]
    for first in range(0, len(widths), APPENDED):
        some = widths[first : first + APPENDED]
        sizes, words = zip(*some, *[(0, 0)] * (APPENDED - len(some)), strict=True)
        found.append(_append_build(TOKENS, False, words, sizes))
    return found


def _append_build(
    tokens: int, padded: bool, widths: tuple[int, ...], sizes: tuple[int, ...], *, positions: bool = False
) -> Build:
    """One configuration; `positions`: the last column's new entries are positions, of 8 bytes, the same for
    all heads."""
    types = {"offsets_ptr": "*i64", "lengths_ptr": "*i32", "seen_ptr": "*i64", "valid_ptr": "*u8"}
    # More tokens than one program writes are counted afterwards.
    constants: dict[str, int | bool | None] = {"PADDED": padded, "RAISE": tokens == 1 or not positions}
    constants |= {"BLOCK_S": tokens, "BLOCK_V": NUMBERED}
    constants |= {"stride_vs": 1} if padded else {"valid_ptr": None}
    vectors = ["stride_vs"]  # without padding it is 0
    for name, width, size in zip("abc", widths, sizes, strict=True):
        strides = [f"{name}_{axis}" for axis in "cbhs"]
        new_size = 8 if positions and name == "c" else size
        constants[f"{name.upper()}_WIDTH"] = width
        constants[f"{name.upper()}_BLOCK"] = _words(width, max(size, new_size)) if width else 1
        if width:
            types |= {f"{name}_ptr": f"*i{8 * size}", f"new_{name}_ptr": f"*i{8 * new_size}"}
        else:
            constants |= {f"{name}_ptr": None, f"new_{name}_ptr": None}
        if width % 16 == 0:
            vectors += strides  # or zeros, of a column that is missing
        if width == 1:  # one entry lies behind another, and so do positions
            ones = strides[:1] if new_size == size else ["c_c", "c_s", *(["c_b"] if tokens == 1 else [])]
            constants |= dict.fromkeys(ones, 1)
        if new_size > size:
            vectors.append("c_h")  # it is 0
    shape = "/".join(f"{width}x{size}" for width, size in zip(widths, sizes, strict=True) if width)
    name = f"append {tokens} of {shape}{' positions' if positions else ''}{' padded' if padded else ''}"
    cut = Tile(tokens, 1, 1 if tokens == 1 else 4, 2)
    return Build(name, kernel.append, types, constants, cut, vectors)
