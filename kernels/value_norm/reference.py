"""Reference of `value_norm` in plain PyTorch: the definition, and the path on a CPU.

The product costs as much as W_O itself, so it is made of all heads at once, in blocks that are summed while
they are in the processor's cache. Beside inputs and outputs it holds a block of the product, of the entries
and of W_O in float32, of `FLOATS_AT_ONCE` floats each at most, and through the Gram matrix Q x D x D more.

PyTorch's setting for products of float32 (`torch.backends.cuda.matmul`: TF32) is followed, except for the
Gram matrix, which the kernel also reads and which loses its smallest directions first: where that setting
allows less than float32, it is made in float64. The op switches autocast off around it.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

# Floats of one product [H, B * entries, G * columns] that may exist at once: 64 MiB in float32.
FLOATS_AT_ONCE = 2**24
# The same on a CPU, whose cache the product should not leave: 4 MiB in float32.
CPU_FLOATS_AT_ONCE = 2**20
# Entries multiplied at once where the bound allows it; with fewer, the weights are read too often.
ROWS = 256


def value_norm(
    values_BHTD: Float[Tensor, "B H T D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    *,
    p: int = 1,
    via: str = "direct",
) -> Float[Tensor, "B Q T"]:
    """See the op."""
    if via == "gram":
        return through_gram(values_BHTD, output_weight_QDE)
    return projected(values_BHTD, output_weight_QDE, p)


def projected(
    values_BHTD: Float[Tensor, "B H T D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    p: int,
) -> Float[Tensor, "B Q T"]:
    """From the projected values, block by block of entries and of columns `e`."""
    B, H, T, D = values_BHTD.shape
    Q, _, E = output_weight_QDE.shape
    G = Q // H
    floats_at_once = _bound(values_BHTD)
    dtype = torch.promote_types(values_BHTD.dtype, torch.float32)
    # As many whole rows as fit; where that are too few, fewer columns of more rows. And of values and W_O,
    # which are copied too, no more than of the product.
    rows = max(floats_at_once // (Q * max(1, E)), min(ROWS, floats_at_once // Q))
    rows = min(rows, floats_at_once // (H * max(1, D)))
    entries = max(1, min(T, rows // max(1, B)))
    columns = max(1, min(E, floats_at_once // max(1, Q * max(D, B * entries))))
    weight_HDGE = output_weight_QDE.unflatten(0, (H, G)).transpose(1, 2)
    norm_BHGT = values_BHTD.new_zeros((B, H, G, T), dtype=dtype)
    # One buffer for all blocks: fresh memory would cost more than the product.
    buffer = values_BHTD.new_empty(B * Q * entries * columns, dtype=dtype)
    for left in range(0, E, columns):
        weight = _dense(weight_HDGE[..., left : left + columns], dtype).flatten(2)
        for start in range(0, T, entries):
            part = _dense(values_BHTD[:, :, start : start + entries].transpose(0, 1), dtype)
            shape = (H, B, part.shape[2], G, weight.shape[-1] // G)
            product = buffer[: math.prod(shape)].view(H, B * part.shape[2], weight.shape[-1])
            torch.bmm(part.flatten(1, 2), weight, out=product)
            sizes = product.view(shape)
            sizes = sizes.abs_() if p == 1 else sizes.square_()
            norm_BHGT[..., start : start + entries] += sizes.sum(-1).permute(1, 0, 3, 2)
    return (norm_BHGT if p == 1 else norm_BHGT.sqrt_()).flatten(1, 2)


def through_gram(
    values_BHTD: Float[Tensor, "B H T D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
) -> Float[Tensor, "B Q T"]:
    """The L2 norm as a quadratic form of each value, block by block of entries."""
    B, H, T, D = values_BHTD.shape
    Q = output_weight_QDE.shape[0]
    dtype = torch.promote_types(values_BHTD.dtype, torch.float32)
    # [H, D, G * D], without a copy: the matrices are symmetric.
    gram_HDN = gram(output_weight_QDE, dtype).view(H, Q // H * D, D).mT
    norm_BQT = values_BHTD.new_empty((B, Q, T), dtype=dtype)
    chunk = max(1, _bound(values_BHTD) // max(1, B * Q * D))
    for start in range(0, T, chunk):
        part_HBTD = _dense(values_BHTD[:, :, start : start + chunk].transpose(0, 1), dtype)
        product = torch.bmm(part_HBTD.flatten(1, 2), gram_HDN)
        product = product.view(*part_HBTD.shape[:3], Q // H, D).mul_(part_HBTD[..., None, :])
        square = product.sum(-1).permute(1, 0, 3, 2)
        # Rounding may leave a square of nothing below zero.
        norm_BQT[..., start : start + chunk] = square.clamp_min_(0.0).sqrt_().flatten(1, 2)
    return norm_BQT


def _dense(part: Tensor, dtype: torch.dtype) -> Tensor:
    """In this precision, and one number behind another if that takes a copy: or else there would be two."""
    return part.to(dtype, memory_format=torch.contiguous_format)


def _bound(values: Tensor) -> int:
    return CPU_FLOATS_AT_ONCE if values.device.type == "cpu" else FLOATS_AT_ONCE


def gram(output_weight_QDE: Float[Tensor, "Q D E"], dtype: torch.dtype) -> Float[Tensor, "Q D D"]:
    """`M_q = W[q] W[q]^T` in this precision, whatever precision products are set to, from some heads and
    columns at a time, since they are made dense in it."""
    Q, D, E = output_weight_QDE.shape
    floats_at_once = _bound(output_weight_QDE)
    wider = dtype if _exact(output_weight_QDE.device) else torch.float64
    heads = max(1, min(Q, floats_at_once // max(1, D * E)))
    columns = max(1, min(E, floats_at_once // max(1, D * heads)))
    gram_QDD = output_weight_QDE.new_zeros((Q, D, D), dtype=dtype)
    for first in range(0, Q, heads):
        sums = gram_QDD[first : first + heads].to(wider)
        for left in range(0, E, columns):
            part = output_weight_QDE[first : first + heads, :, left : left + columns].to(wider)
            sums.baddbmm_(part, part.mT)
        gram_QDD[first : first + heads] = sums
    return gram_QDD


def _exact(device: torch.device) -> bool:
    """Whether products of float32 are products of float32, by PyTorch's settings: not of TF32 (CUDA) or
    bfloat16 (some CPUs)."""
    library = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return library.matmul.fp32_precision in ("none", "ieee")
