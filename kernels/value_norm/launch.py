"""Launches the kernels of `value_norm`, and lists their builds; both read one fixed table of tiles."""

from typing import Any

import torch
from torch import Tensor

from retain.kernels import backend
from retain.kernels.build import ARCHS, Build, Tile
from retain.kernels.value_norm import kernel

# Programs that fill a GPU; a call that makes fewer takes short tiles and splits W_O's columns.
PROGRAMS = 128


def tile(dtype: torch.dtype, block_d: int, architecture: int, *, short: bool = False) -> Tile:
    """The tile: entries by columns of W_O.

    `short`: where tall tiles would be too few to fill a GPU, or higher than the entries. Tiles of
    architecture 80 fit the 99 KiB of the smallest GPUs that it stands for.
    """
    if dtype == torch.float32:  # without tensor cores: operands wait in registers
        return Tile(64, 64, 8, 2, depth=min(32, block_d))
    large = architecture >= 90
    narrow = 64 if block_d == 256 else 128
    if short:
        return Tile(64, narrow, 4, 3, depth=block_d)
    if large:
        return Tile(*((128, 128, 8, 2) if block_d == 256 else (256, 128, 8, 4)), depth=block_d)
    return Tile(128, narrow, 8, 2 if block_d == 256 else 3, depth=block_d)


def chosen(dtype: torch.dtype, block_d: int, architecture: int, entries: int, rows: int) -> tuple[Tile, bool]:
    """The tile for so many entries of so many rows (sequences times query heads), and whether there
    are enough of them to fill a GPU. One new token of many sequences fills it too, but not a tall tile."""
    tall, short = (tile(dtype, block_d, architecture, short=short) for short in (False, True))
    full = -(-entries // tall.m) * rows >= PROGRAMS
    if full and entries > short.m:
        return tall, True
    return short, -(-entries // short.m) * rows >= PROGRAMS


def value_norm(values_BHTD: Tensor, output_weight_QDE: Tensor, p: int = 1) -> Tensor:
    """See the op; `D` at most 256."""
    values, weight = values_BHTD, output_weight_QDE
    (B, H, T, D), (Q, _, E) = values.shape, weight.shape
    norm = torch.empty((B, Q, T), dtype=torch.float32, device=values.device)
    if not norm.numel():
        return norm
    mixed = values.dtype != weight.dtype
    dtype = torch.float32 if mixed or backend.upcast(values.dtype) else values.dtype
    cut, full = chosen(dtype, backend.block_of(D), backend.architecture(values), T, B * Q)
    splits, columns = 1, max(1, E)
    if not full:  # parts of the columns are programs too, which PyTorch adds up
        programs = -(-T // cut.m) * B * Q
        splits = max(1, min(-(-columns // cut.n), PROGRAMS // programs))
    split_columns = -(-columns // (splits * cut.n)) * cut.n
    splits = -(-columns // split_columns)
    out = norm[None] if splits == 1 else norm.new_empty((splits, B, Q, T))
    sizes = (B, T, D, E, Q // H, split_columns)
    strides = (*values.stride(), *weight.stride(), *out.stride()[:2])
    with torch.cuda.device_of(values):
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


def _constants(cut: Tile, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Constants of the kernel, for operands multiplied in this precision."""
    even = backend.block_of(width) == width
    blocks = {"BLOCK_T": cut.m, "BLOCK_E": cut.n, "BLOCK_K": cut.depth}
    return {"EVEN_D": even, "PRECISION": backend.dot_precision(dtype), **blocks}


def builds() -> list[Build]:
    """The kernel with every tile and every switch that changes its code: odd widths, W_O's other layout,
    types that differ."""
    half, widths = torch.bfloat16, (16, 32, 64, 128, 256)
    options: list[tuple[torch.dtype, int, dict[str, Any]]] = []
    options += [(half, D, {"short": short}) for D in widths for short in (False, True)]
    options += [(torch.float32, D, {}) for D in widths] + [(torch.float16, 128, {})]
    switches: list[dict[str, Any]] = [
        {"p": 2, "split": True, "short": True},
        {"even": False},
        {"mixed": True},
    ]
    options += [(half, 128, own) for own in [*switches, {"inner": "stride_we"}, {"p": 2}]]
    return [build for dtype, D, switches in options for build in _builds(dtype, D, **switches)]


def _builds(
    dtype: torch.dtype, block_d: int, *, short: bool = False, split: bool = False, p: int = 1,
    inner: str = "stride_wd", even: bool = True, mixed: bool = False,
) -> list[Build]:  # fmt: skip
    """One configuration, once for each tile that an architecture has for it; `inner`: W_O's stride of 1;
    `mixed`: weights of float32."""
    multiplied = torch.float32 if mixed else dtype
    tiles = {arch: tile(multiplied, block_d, arch, short=short) for arch in ARCHS}
    kind = backend.TYPES[dtype]
    words = [kind + " x fp32" * mixed, f"D={block_d}" + " odd" * (not even), f"p={p}"]
    words += ["E inner"] * (inner == "stride_we") + ["short"] * short + ["split"] * split
    types = {"weight_ptr": f"*{backend.TYPES[multiplied]}", "values_ptr": f"*{kind}", "out_ptr": "*fp32"}
    constants = {"stride_vd": 1, "UPCAST": mixed, inner: 1, "P": p, "SPLIT": split}
    constants |= {"EVEN_E": even, "NATIVE": True, "BLOCK_D": block_d}
    # Whole tiles; and in launches of even widths, whole vectors.
    vectors = ["split_columns"]
    if even:
        vectors += ["stride_vb", "stride_vh", "stride_vt", "stride_wq", "stride_we", "stride_wd", "D", "E"]
    return [
        Build(
            " ".join(words),
            kernel.direct_kernel,
            types,
            {**constants, **_constants(cut, block_d, multiplied), "EVEN_D": even},
            cut,
            vectors,
            wgmma=multiplied != torch.float32,
            archs=tuple(arch for arch in ARCHS if tiles[arch] == cut),
        )
        for cut in dict.fromkeys(tiles.values())
    ]
