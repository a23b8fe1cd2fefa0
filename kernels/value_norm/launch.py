"""Launches the kernels of `value_norm`, and lists their builds; both read one fixed table of tiles."""

from typing import Any

import torch
from torch import Tensor

from retain.kernels import backend
from retain.kernels.build import ARCHS, Build, Tile
from retain.kernels.value_norm import kernel, reference

# Programs that fill a GPU; a call that makes fewer takes short tiles and splits W_O's columns.
PROGRAMS = 128
# Matrices of half precision that add up to a Gram matrix of float32: 3 x 8 bits, and 2 x 11 of fp16, whose
# range ends where 11 more would begin.
PIECES = {torch.bfloat16: 3, torch.float16: 2, torch.float32: 1}
# Power of two below which the Gram matrix is brought: as high as fp16 goes, with room for rounding.
TOP = 14


def tile(what: str, dtype: torch.dtype, block_d: int, architecture: int, *, short: bool = False) -> Tile:
    """The tile of `direct` or `gram`: entries by columns of W_O, or of the Gram matrix.

    `short`: where tall tiles would be too few to fill a GPU, or higher than the entries. Tiles of
    architecture 80 fit the 99 KiB of the smallest GPUs that it stands for.
    """
    if dtype == torch.float32:  # without tensor cores: operands wait in registers
        return Tile(64, 64, 8, 2, depth=min(32, block_d))
    large = architecture >= 90
    if what == "gram":
        columns, depth = min(64, block_d), min(128 if large else 64, block_d)
        return Tile(64 if short else 128, columns, 4 if short else 8, 2, depth=depth)
    narrow = 64 if block_d == 256 else 128
    if short:
        return Tile(64, narrow, 4, 3, depth=block_d)
    if large:
        return Tile(*((128, 128, 8, 2) if block_d == 256 else (256, 128, 8, 4)), depth=block_d)
    return Tile(128, narrow, 8, 2 if block_d == 256 else 3, depth=block_d)


def chosen(
    what: str, dtype: torch.dtype, block_d: int, architecture: int, entries: int, rows: int
) -> tuple[Tile, bool]:
    """The tile for so many entries of so many rows (sequences times query heads), and whether there
    are enough of them to fill a GPU. One new token of many sequences fills it too, but not a tall tile."""
    tall, short = (tile(what, dtype, block_d, architecture, short=short) for short in (False, True))
    full = -(-entries // tall.m) * rows >= PROGRAMS
    if full and entries > short.m:
        return tall, True
    return short, -(-entries // short.m) * rows >= PROGRAMS


def value_norm(values_BHTD: Tensor, output_weight_QDE: Tensor, *, p: int = 1, via: str = "direct") -> Tensor:
    """See the op; `D` at most 256."""
    B, _, T, _ = values_BHTD.shape
    shape = (B, output_weight_QDE.shape[0], T)
    norm = torch.empty(shape, dtype=torch.float32, device=values_BHTD.device)
    if not norm.numel():
        return norm
    with torch.cuda.device_of(values_BHTD):
        if via == "gram":
            return _launch_gram(values_BHTD, reference.gram(output_weight_QDE, torch.float32), norm)
        return _launch_direct(values_BHTD, output_weight_QDE, norm, p)


def _launch_direct(values: Tensor, weight: Tensor, norm: Tensor, p: int) -> Tensor:
    (B, H, T, D), (Q, _, E) = values.shape, weight.shape
    mixed = values.dtype != weight.dtype
    dtype = torch.float32 if mixed or backend.upcast(values.dtype) else values.dtype
    cut, full = chosen("direct", dtype, backend.block_of(D), backend.architecture(values), T, B * Q)
    splits, columns = 1, max(1, E)
    if not full:  # parts of the columns are programs too, which PyTorch adds up
        programs = -(-T // cut.m) * B * Q
        splits = max(1, min(-(-columns // cut.n), PROGRAMS // programs))
    split_columns = -(-columns // (splits * cut.n)) * cut.n
    splits = -(-columns // split_columns)
    out = norm[None]
    if splits > 1:
        out = torch.empty((splits, B, Q, T), dtype=torch.float32, device=values.device)
    sizes = (B, T, D, E, Q // H, split_columns)
    strides = (*values.stride(), *weight.stride(), *out.stride()[:2])
    kernel.direct_kernel[-(-T // cut.m) * B * Q, splits](
        *(values, weight, out, *sizes, *strides),
        **{"P": p, "SPLIT": splits > 1, "EVEN_E": E % cut.n == 0, "NATIVE": not backend.interpreting()},
        **{"BLOCK_D": backend.block_of(D), **_constants(cut, D, dtype)},
        UPCAST=dtype != values.dtype or mixed,
        **cut.options,
    )
    if splits == 1:
        return norm
    total = out.sum(0)
    return total if p == 1 else total.sqrt_()


def _launch_gram(values: Tensor, gram_QDD: Tensor, norm: Tensor) -> Tensor:
    (B, H, T, D), Q = values.shape, gram_QDD.shape[0]
    dtype = torch.float32 if backend.upcast(values.dtype) else values.dtype
    rows = B * Q
    cut, _ = chosen("gram", dtype, backend.block_of(D), backend.architecture(values), T, rows)
    pieces, root_Q = split(gram_QDD, values.dtype)
    strides = (*values.stride(), *pieces.stride()[:2], norm.stride(0))
    kernel.gram_kernel[(-(-T // cut.m) * rows,)](
        *(values, pieces, root_Q, norm, B, T, D, Q // H, *strides),
        **{"NUM_PIECES": len(pieces), "UPCAST": dtype != values.dtype},
        **_constants(cut, D, dtype),
        **cut.options,
    )
    return norm


def _constants(cut: Tile, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Constants of both kernels, for operands multiplied in this precision."""
    even = backend.block_of(width) == width
    blocks = {"BLOCK_T": cut.m, "BLOCK_E": cut.n, "BLOCK_K": cut.depth}
    return {"EVEN_D": even, "PRECISION": backend.dot_precision(dtype), **blocks}


def split(gram_QDD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix of float32 as a sum of matrices of this type, largest first, and the factor on the root of
    each head's quadratic form: a power of two, which rounds nothing."""
    exponent_Q = torch.frexp(gram_QDD.abs().amax((1, 2))).exponent
    # An even number, or else its root were no power of two. Two steps, since 2^162 is no float32; a NaN has
    # any exponent.
    up_Q = ((TOP - exponent_Q) & ~1).clamp(-2 * TOP * 8, 2 * TOP * 8) // 2
    step_Q11 = _power_of_two(up_Q)[:, None, None]
    rest = gram_QDD * step_Q11 * step_Q11
    pieces = []
    for _ in range(PIECES[dtype]):
        pieces.append(rest.to(dtype))
        rest = rest - pieces[-1]
    return torch.stack(pieces), _power_of_two(-up_Q)


def _power_of_two(exponent: Tensor) -> Tensor:
    """`2^exponent`, of -126 to 127, exactly: `torch.ldexp` has been a product with `pow(2, exponent)` in the
    default type, and `pow` need not be exact on a GPU."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def builds() -> list[Build]:
    """Every kernel with every tile and every switch that changes its code: odd widths, W_O's other layout,
    types that differ."""
    half, single, widths = torch.bfloat16, torch.float32, (16, 32, 64, 128, 256)
    options: list[tuple[str, torch.dtype, int, dict[str, Any]]] = []
    for what in ("direct", "gram"):
        options += [(what, half, D, {"short": short}) for D in widths for short in (False, True)]
        options += [(what, single, D, {}) for D in widths] + [(what, torch.float16, 128, {})]
    direct: list[dict[str, Any]] = [{"p": 2, "split": True, "short": True}, {"even": False}, {"mixed": True}]
    direct += [{"inner": "stride_we"}, {"p": 2}]
    options += [("direct", half, 128, switches) for switches in direct]
    return [build for what, dtype, D, switches in options for build in _builds(what, dtype, D, **switches)]


def _builds(
    what: str, dtype: torch.dtype, block_d: int, *, short: bool = False, split: bool = False, p: int = 1,
    inner: str = "stride_wd", even: bool = True, mixed: bool = False,
) -> list[Build]:  # fmt: skip
    """One configuration, once for each tile that an architecture has for it; `inner`: W_O's stride of 1;
    `mixed`: weights of float32."""
    multiplied = torch.float32 if mixed else dtype
    tiles = {arch: tile(what, multiplied, block_d, arch, short=short) for arch in ARCHS}
    kind, of_weights = backend.TYPES[dtype], backend.TYPES[multiplied]
    words = [what, kind + " x fp32" * mixed, f"D={block_d}" + " odd" * (not even)]
    words += (
        [f"p={2 if what == 'gram' else p}"]
        + ["E inner"] * (inner == "stride_we")
        + ["short"] * short
        + ["split"] * split
    )
    types = {**dict.fromkeys(("weight_ptr", "pieces_ptr"), f"*{of_weights}"), "values_ptr": f"*{kind}"}
    types |= dict.fromkeys(("out_ptr", "root_ptr"), "*fp32")
    constants = {"stride_vd": 1, "UPCAST": mixed, "NUM_PIECES": PIECES[dtype], inner: 1}
    constants |= {"P": p, "SPLIT": split, "EVEN_E": even, "NATIVE": True, "BLOCK_D": block_d}
    # Whole tiles; and in launches of even widths, whole vectors.
    vectors = ["split_columns"]
    if even:
        vectors += ["stride_vb", "stride_vh", "stride_vt", "stride_wq", "stride_we", "stride_wd"]
        vectors += ["stride_ps", "stride_pq", "D", "E"]
    return [
        Build(
            " ".join(words),
            kernel.direct_kernel if what == "direct" else kernel.gram_kernel,
            types,
            {**constants, **_constants(cut, block_d, multiplied), "EVEN_D": even},
            cut,
            vectors,
            wgmma=multiplied != torch.float32,
            archs=tuple(arch for arch in ARCHS if tiles[arch] == cut),
        )
        for cut in dict.fromkeys(tiles.values())
    ]
