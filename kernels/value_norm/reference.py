"""Reference of `value_norm` in plain PyTorch: the definition, and the path on a CPU.

The product costs as much as W_O itself, so it is made of all heads at once, in blocks that are summed while
they are in the processor's cache. Beside inputs and outputs it holds a block of the product, of the entries
and of W_O in float32, of `FLOATS_AT_ONCE` floats each at most.
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
    values_BHTD: Float[Tensor, "B H T D"], output_weight_QDE: Float[Tensor, "Q D E"], p: int = 1
) -> Float[Tensor, "B Q T"]:
    """From the projected values, block by block of entries and of columns `e`."""
    B, H, T, D = values_BHTD.shape
    Q, _, E = output_weight_QDE.shape
    G = Q // H
    floats_at_once = CPU_FLOATS_AT_ONCE if values_BHTD.device.type == "cpu" else FLOATS_AT_ONCE
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


def _dense(part: Tensor, dtype: torch.dtype) -> Tensor:
    """In this precision, and one number behind another if that takes a copy: or else there would be two."""
    return part.to(dtype, memory_format=torch.contiguous_format)
