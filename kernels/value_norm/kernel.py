"""Triton kernels of `value_norm`: a tile of values against a head's whole slice of W_O, summed in registers.

A program owns a tile of values and walks over the columns of W_O, so that a norm is one program's own sum,
without atomics and without a product in memory. The tensor cores wait for W_O out of the L2 cache, so tiles
are tall: 256 values for each tile of weights that is fetched. Programs that run at a time are neighbours of
one head and read the same tiles of weights.
"""

# Kernels are annotated where it means something to Triton: `tl.constexpr`.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def _values(start_ptr, k, mask_t, D, stride_vd, EVEN_D: tl.constexpr, UPCAST: tl.constexpr):
    """A tile of values: `start_ptr` are its rows, `k` its columns."""
    mask = mask_t[:, None] if EVEN_D else mask_t[:, None] & (k < D)[None, :]
    values = tl.load(start_ptr[:, None] + k[None, :] * stride_vd, mask=mask, other=0.0)
    if UPCAST:
        values = values.to(tl.float32)
    return values


@triton.jit
def _weights(at_e, k, e, D, end, stride_wd, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr,
             UPCAST: tl.constexpr):  # fmt: skip
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
def direct_kernel(
    values_ptr, weight_ptr, out_ptr, num_batch, T, D, E, G, split_columns,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_wq, stride_wd, stride_we, stride_os, stride_ob,
    P: tl.constexpr, SPLIT: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Norms of one tile of values of a head, or their sums over a part of the columns (`SPLIT`)."""
    # Tiles of one head are neighbours, and then the same head of the next sequence: they share its weights.
    num_tiles = tl.cdiv(T, BLOCK_T)
    row = tl.program_id(0) // num_tiles
    t = (tl.program_id(0) % num_tiles) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    batch = (row % num_batch).to(tl.int64)
    head = (row // num_batch).to(tl.int64)
    begin = tl.program_id(1) * split_columns
    end = tl.minimum(begin + split_columns, E)

    k = tl.arange(0, BLOCK_K).to(tl.int64)
    mask_t = t < T
    rows_ptr = values_ptr + batch * stride_vb + head // G * stride_vh + t * stride_vt
    if BLOCK_K == BLOCK_D:
        values = _values(rows_ptr, k, mask_t, D, stride_vd, EVEN_D, UPCAST)

    of_head = weight_ptr + head * stride_wq
    norms = tl.zeros([BLOCK_T], tl.float32)
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
        norms += tl.sum(_sizes(product, P, NATIVE), axis=1)
    if P == 2 and not SPLIT:
        norms = tl.sqrt_rn(norms)
    out_ptr += tl.program_id(1) * stride_os + batch * stride_ob + head * T
    tl.store(out_ptr + t, norms, mask=mask_t)
