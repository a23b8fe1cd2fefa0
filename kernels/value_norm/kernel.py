"""The kernels of `value_norm`: a tile of values against a head's whole slice of W_O, summed in registers.

In: values and W_O, any strides. Out: norms. The one decision taken here: a program owns a tile of values and
walks over the columns of W_O, so that a norm is one program's own sum, without atomics and without a product
in memory. What the tensor cores wait for is W_O out of the L2 cache, so tiles are tall: 256 values for each
tile of weights that is fetched. Programs that run at a time are neighbours of one head and ask for the same
tiles of weights.
"""

# Kernels are annotated where it means something to Triton: `tl.constexpr`.
# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from retain.kernels import backend
from retain.kernels.build import Build
from retain.kernels.value_norm import reference

# Programs that fill a GPU; a call that makes fewer takes short tiles and splits W_O's columns.
PROGRAMS = 128
# Matrices of half precision that add up to a Gram matrix of float32: 3 x 8 bits, and 2 x 11 of fp16, whose
# range ends where 11 more would begin.
PIECES = {torch.bfloat16: 3, torch.float16: 2, torch.float32: 1}
# Power of two below which the Gram matrix is brought: as high as fp16 goes, with room for rounding.
TOP = 14


@dataclass(frozen=True)
class Tile:
    """What a program works on at a time.

    Args:
        entries: values.
        columns: of W_O, or of the Gram matrix.
        depth: of the head width; less than all of it where operands would not fit.
        num_warps: of a program.
        num_stages: tiles of weights on their way.
    """

    entries: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def tile(what: str, dtype: torch.dtype, block_d: int, architecture: int, *, short: bool = False) -> Tile:
    """The tile of `direct` or `gram`; `short`: where tall ones would be too few to fill a GPU, or higher than
    what there is. Those of architecture 80 fit the 99 KiB of the smallest GPUs that it stands for."""
    if dtype == torch.float32:  # without tensor cores: operands wait in registers
        return Tile(64, 64, min(32, block_d), 8, 2)
    if what == "gram":
        columns, depth = min(64, block_d), min(128 if architecture >= 90 else 64, block_d)
        return Tile(64, columns, depth, 4, 2) if short else Tile(128, columns, depth, 8, 2)
    if short:
        return Tile(64, 64 if block_d == 256 else 128, block_d, 4, 3)
    if architecture >= 90:
        if block_d == 256:
            return Tile(128, 128, 256, 8, 2)
        return Tile(256, 128, block_d, 8, 4)
    return Tile(128, 64 if block_d == 256 else 128, block_d, 8, 2 if block_d == 256 else 3)


def chosen(
    what: str, dtype: torch.dtype, block_d: int, architecture: int, entries: int, rows: int
) -> tuple[Tile, bool]:
    """The tile for so many entries of so many rows (sequences times heads of the output), and whether there
    are enough of them to fill a GPU. One new token of many sequences fills it too, but not a tall tile."""
    tall, short = (tile(what, dtype, block_d, architecture, short=short) for short in (False, True))
    full = triton.cdiv(entries, tall.entries) * rows >= PROGRAMS
    if full and entries > short.entries:
        return tall, True
    return short, triton.cdiv(entries, short.entries) * rows >= PROGRAMS


@triton.jit
def _values(start_ptr, k, mask_t, D, stride_vd, EVEN_D: tl.constexpr, UPCAST: tl.constexpr):
    """A tile of values: `start_ptr` are its rows, `k` its columns."""
    mask = mask_t[:, None] if EVEN_D else mask_t[:, None] & (k < D)[None, :]
    values = tl.load(start_ptr[:, None] + k[None, :] * stride_vd, mask=mask, other=0.0)
    if UPCAST:
        values = values.to(tl.float32)
    return values


@triton.jit
def _weights(
    at_e,
    k,
    e,
    D,
    end,
    stride_wd,
    EVEN_D: tl.constexpr,
    EVEN_E: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """A tile of weights: `at_e` are its columns, `k` its rows."""
    at = at_e + k[:, None] * stride_wd
    if EVEN_D and EVEN_E:
        weights = tl.load(at)
    elif EVEN_E:
        weights = tl.load(at, mask=(k < D)[:, None], other=0.0)
    else:
        weights = tl.load(at, mask=(k < D)[:, None] & (e < end)[None, :], other=0.0)
    if UPCAST:
        weights = weights.to(tl.float32)
    return weights


@triton.jit
def _sizes(product, P: tl.constexpr, NATIVE: tl.constexpr):
    """`|product|^P`."""
    if P == 2:
        sizes = product * product
    elif NATIVE:
        # The compiler makes of `tl.abs` an operation on integers, which cannot be part of the addition that
        # follows, as this one is: one instruction an element instead of two, while the tensor cores wait.
        sizes = tl.inline_asm_elementwise(
            "abs.f32 $0, $1;", "=f,f", [product], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        sizes = tl.abs(product)
    return sizes


@triton.jit(do_not_specialize=["num_batch", "T", "G", "stride_os", "stride_ob"])
def _direct(
    values_ptr,
    weight_ptr,
    out_ptr,
    num_batch,
    T,
    D,
    E,
    G,
    split_columns,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_vd,
    stride_wq,
    stride_wd,
    stride_we,
    stride_os,
    stride_ob,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_E: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Tiles of one head are neighbours, and then the same head of the next sequence: they share its weights.
    num_tiles = tl.cdiv(T, BLOCK_T)
    row = tl.program_id(0) // num_tiles
    t = (tl.program_id(0) % num_tiles) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    batch = (row % num_batch).to(tl.int64)
    head = (row // num_batch).to(tl.int64)  # of the output
    if GROUP == "none":
        kv_head, first, heads = head // G, head, 1
    else:
        kv_head, first, heads = head, head * G, G
    begin = tl.program_id(1) * split_columns
    end = tl.minimum(begin + split_columns, E)

    k = tl.arange(0, BLOCK_K).to(tl.int64)
    mask_t = t < T
    rows_ptr = values_ptr + batch * stride_vb + kv_head * stride_vh + t * stride_vt
    if BLOCK_K == BLOCK_D:
        values = _values(rows_ptr, k, mask_t, D, stride_vd, EVEN_D, UPCAST)

    norms = tl.zeros([BLOCK_T], tl.float32)
    for member in range(0, heads):
        of_head = weight_ptr + (first + member) * stride_wq
        sums = tl.zeros([BLOCK_T], tl.float32)
        for left in range(begin, end, BLOCK_E):
            e = left + tl.arange(0, BLOCK_E)
            at_e = of_head + e.to(tl.int64)[None, :] * stride_we
            if BLOCK_K == BLOCK_D:
                weight = _weights(at_e, k, e, D, end, stride_wd, EVEN_D, EVEN_E, UPCAST)
                product = tl.dot(values, weight, input_precision=PRECISION)
            else:
                product = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
                for start in range(0, D, BLOCK_K):
                    some = _values(rows_ptr, start + k, mask_t, D, stride_vd, EVEN_D, UPCAST)
                    weight = _weights(at_e, start + k, e, D, end, stride_wd, EVEN_D, EVEN_E, UPCAST)
                    product = tl.dot(some, weight, product, input_precision=PRECISION)
            sums += tl.sum(_sizes(product, P, NATIVE), axis=1)
        if P == 2 and not SPLIT:
            sums = tl.sqrt_rn(sums)
        norms = tl.maximum(norms, sums, propagate_nan=tl.PropagateNan.ALL) if GROUP == "max" else norms + sums
    if GROUP == "mean":
        norms /= G
    out_ptr += tl.program_id(1) * stride_os + batch * stride_ob + head * T
    tl.store(out_ptr + t, norms, mask=mask_t)


@triton.jit(do_not_specialize=["num_batch", "T", "G", "stride_ob"])
def _gram(
    values_ptr,
    pieces_ptr,
    root_ptr,
    out_ptr,
    num_batch,
    T,
    D,
    G,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_vd,
    stride_ps,
    stride_pq,
    stride_ob,
    GROUP: tl.constexpr,
    EVEN_D: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_tiles = tl.cdiv(T, BLOCK_T)
    row = tl.program_id(0) // num_tiles
    t = (tl.program_id(0) % num_tiles) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    batch = (row % num_batch).to(tl.int64)
    head = (row // num_batch).to(tl.int64)
    if GROUP == "none":
        kv_head, first, heads = head // G, head, 1
    else:
        kv_head, first, heads = head, head * G, G

    k = tl.arange(0, BLOCK_K).to(tl.int64)
    mask_t = t < T
    rows_ptr = values_ptr + batch * stride_vb + kv_head * stride_vh + t * stride_vt

    norms = tl.zeros([BLOCK_T], tl.float32)
    for member in range(0, heads):
        of_head = pieces_ptr + (first + member) * stride_pq
        squares = tl.zeros([BLOCK_T], tl.float32)
        for left in range(0, D, BLOCK_E):
            e = left + tl.arange(0, BLOCK_E).to(tl.int64)
            product = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
            for start in range(0, D, BLOCK_K):
                some = _values(rows_ptr, start + k, mask_t, D, stride_vd, EVEN_D, UPCAST)
                mask = (start + k < D)[:, None] & (e < D)[None, :]
                at = of_head + (start + k)[:, None] * D + e[None, :]
                for piece in tl.static_range(NUM_PIECES):  # the smallest first
                    matrix = tl.load(at + (NUM_PIECES - 1 - piece) * stride_ps, mask=mask, other=0.0)
                    if UPCAST:
                        matrix = matrix.to(tl.float32)
                    product = tl.dot(some, matrix, product, input_precision=PRECISION)
            again = _values(rows_ptr, e, mask_t, D, stride_vd, False, False)
            squares += tl.sum(product * again.to(tl.float32), axis=1)
        # Rounding may leave a square of nothing below zero; what is not a number stays that.
        sums = tl.sqrt_rn(tl.where(squares < 0.0, 0.0, squares)) * tl.load(root_ptr + first + member)
        norms = tl.maximum(norms, sums, propagate_nan=tl.PropagateNan.ALL) if GROUP == "max" else norms + sums
    if GROUP == "mean":
        norms /= G
    tl.store(out_ptr + batch * stride_ob + head * T + t, norms, mask=mask_t)


def value_norm(
    values_BHTD: Tensor,
    output_weight_QDE: Tensor,
    *,
    p: int,
    via: str,
    group: str | None,
    floats_at_once: int | None = None,
) -> Tensor:
    """See the op; `D` at most 256. `floats_at_once` bounds what the Gram matrix is made of."""
    B, H, T, D = values_BHTD.shape
    heads = H if group else output_weight_QDE.shape[0]
    norm = torch.empty((B, heads, T), dtype=torch.float32, device=values_BHTD.device)
    if not norm.numel():
        return norm
    with torch.cuda.device_of(values_BHTD):
        if via == "gram":
            gram_QDD = reference.gram(output_weight_QDE, torch.float32, floats_at_once)
            return _launch_gram(values_BHTD, gram_QDD, norm, group)
        return _launch_direct(values_BHTD, output_weight_QDE, norm, p, group)


def _launch_direct(values: Tensor, weight: Tensor, norm: Tensor, p: int, group: str | None) -> Tensor:
    (B, H, T, D), (Q, _, E) = values.shape, weight.shape
    mixed = values.dtype != weight.dtype
    dtype = torch.float32 if mixed or backend.upcast(values.dtype) else values.dtype
    block_d, architecture = backend.block_of(D), backend.architecture(values)
    of, full = chosen("direct", dtype, block_d, architecture, T, B * norm.shape[1])
    part_of_group, splits, columns = group, 1, max(1, E)
    if not full:
        # Every query head's own program; too few even so: parts of the columns, which PyTorch adds up.
        part_of_group = None
        programs = triton.cdiv(T, of.entries) * B * Q
        splits = max(1, min(triton.cdiv(columns, of.columns), PROGRAMS // programs))
    split_columns = triton.cdiv(triton.cdiv(columns, splits), of.columns) * of.columns
    splits = triton.cdiv(columns, split_columns)
    out = norm[None]
    if splits > 1 or part_of_group != group:
        out = torch.empty((splits, B, Q, T), dtype=torch.float32, device=values.device)
    _direct[(triton.cdiv(T, of.entries) * B * out.shape[2], splits)](
        values,
        weight,
        out,
        B,
        T,
        D,
        E,
        Q // H,
        split_columns,
        *values.stride(),
        *weight.stride(),
        out.stride(0),
        out.stride(1),
        P=p,
        GROUP=part_of_group or "none",
        SPLIT=splits > 1,
        EVEN_D=block_d == D,
        EVEN_E=E % of.columns == 0,
        PRECISION=backend.dot_precision(dtype),
        UPCAST=dtype != values.dtype or mixed,
        NATIVE=not backend.interpreting(),
        BLOCK_T=of.entries,
        BLOCK_E=of.columns,
        BLOCK_K=of.depth,
        BLOCK_D=block_d,
        num_warps=of.num_warps,
        num_stages=of.num_stages,
    )
    if splits > 1:
        out = out.sum(0, keepdim=True)
        out = out if p == 1 else out.sqrt_()
    return out[0] if part_of_group == group else reference.grouped(out[0], H, group)


def _launch_gram(values: Tensor, gram_QDD: Tensor, norm: Tensor, group: str | None) -> Tensor:
    (B, H, T, D), Q = values.shape, gram_QDD.shape[0]
    dtype = torch.float32 if backend.upcast(values.dtype) else values.dtype
    block_d = backend.block_of(D)
    of, _ = chosen("gram", dtype, block_d, backend.architecture(values), T, B * norm.shape[1])
    pieces, root_Q = split(gram_QDD, values.dtype)
    _gram[(triton.cdiv(T, of.entries) * B * norm.shape[1],)](
        values,
        pieces,
        root_Q,
        norm,
        B,
        T,
        D,
        Q // H,
        *values.stride(),
        pieces.stride(0),
        pieces.stride(1),
        norm.stride(0),
        GROUP=group or "none",
        EVEN_D=block_d == D,
        NUM_PIECES=len(pieces),
        PRECISION=backend.dot_precision(dtype),
        UPCAST=dtype != values.dtype,
        BLOCK_T=of.entries,
        BLOCK_E=of.columns,
        BLOCK_K=of.depth,
        num_warps=of.num_warps,
        num_stages=of.num_stages,
    )
    return norm


def split(gram_QDD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix of float32 as a sum of matrices of this type, largest first, and what the root of each head's
    quadratic form is to be multiplied by: a power of two, which rounds nothing."""
    exponent_Q = torch.frexp(gram_QDD.abs().amax((1, 2))).exponent
    # An even number, or else its root were no power of two. Two steps, since 2^162 is no float32; and what is
    # not a number has any exponent.
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
    """Every kernel with every tile, and with what changes its code."""
    half, single = torch.bfloat16, torch.float32
    found = [
        _built(what, half, D, short=short)
        for what in ("direct", "gram")
        for D in (16, 32, 64, 128, 256)
        for short in (False, True)
    ]
    found += [_built(what, single, D) for what in ("direct", "gram") for D in (16, 32, 64, 128, 256)]
    found += [_built(what, torch.float16, 128) for what in ("direct", "gram")]
    # Odd widths, W_O's other layout, types that differ, groups reduced by the program.
    found += [
        _built("direct", half, 128, p=2, split=True, short=True),
        _built("direct", half, 128, even=False),
    ]
    found += [_built("direct", half, 128, inner="stride_we"), _built("direct", half, 128, mixed=True)]
    found += [_built("direct", half, 128, group="mean"), _built("direct", half, 128, p=2, group="max")]
    found += [_built("direct", half, 128, group="mean", short=True), _built("gram", half, 128, group="max")]
    return [build for of_archs in found for build in of_archs]


def _built(
    what: str,
    dtype: torch.dtype,
    block_d: int,
    *,
    short: bool = False,
    split: bool = False,
    p: int = 1,
    group: str = "none",
    inner: str = "stride_wd",
    even: bool = True,
    mixed: bool = False,
) -> list[Build]:
    """One configuration, once for each tile that an architecture has for it; `inner`: W_O's stride of 1;
    `mixed`: weights of float32."""
    multiplied = torch.float32 if mixed else dtype
    tiles = {arch: tile(what, multiplied, block_d, arch, short=short) for arch in (80, 90)}
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    odd = "" if even else " odd"
    name = f"{what} {names[dtype]}{' x fp32' if mixed else ''} D={block_d}{odd} "
    name += f"p={2 if what == 'gram' else p} {group}"
    name += (" E inner" if inner == "stride_we" else "") + (" short" if short else "")
    name += " split" if split else ""
    constants = {
        "stride_vd": 1,
        "GROUP": group,
        "EVEN_D": even,
        "PRECISION": backend.dot_precision(multiplied),
        "UPCAST": mixed,
    }
    strides = ["stride_vb", "stride_vh", "stride_vt", "D"]
    if what == "direct":
        kernel, weights, pointers, outer = _direct, "weight_ptr", ["out_ptr"], ["stride_os", "stride_ob"]
        constants |= {inner: 1, "P": p, "SPLIT": split, "EVEN_E": even, "NATIVE": True, "BLOCK_D": block_d}
        strides += ["stride_wq", "stride_we" if inner == "stride_wd" else "stride_wd", "E"]
        always = ["split_columns"]  # whole tiles
    else:
        kernel, weights, pointers, outer = _gram, "pieces_ptr", ["out_ptr", "root_ptr"], ["stride_ob"]
        constants |= {"NUM_PIECES": PIECES[dtype]}
        strides += ["stride_ps", "stride_pq"]
        always = []
    signature = {
        "values_ptr": f"*{names[dtype]}",
        weights: f"*{names[multiplied]}",
        **dict.fromkeys(pointers, "*fp32"),
        # As a launch has them: below 2^31.
        **dict.fromkeys((*strides, *always, *outer, "num_batch", "T", "G"), "i32"),
    }
    return [
        Build(
            name=name,
            kernel=kernel,
            signature=signature,
            constants={
                **constants,
                "BLOCK_T": of.entries,
                "BLOCK_E": of.columns,
                "BLOCK_K": of.depth,
            },
            num_warps=of.num_warps,
            num_stages=of.num_stages,
            aligned=("values_ptr", weights, *pointers, *always, *(strides if even else ())),
            wgmma=multiplied != torch.float32,
            archs=tuple(arch for arch in tiles if tiles[arch] == of),
        )
        for of in dict.fromkeys(tiles.values())
    ]
