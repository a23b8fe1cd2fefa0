"""Gives the norm of each value after the output projection: `||v_i W_O^q||_p`, per query head.

The norm is per *query* head (each has another slice of W_O), so that it can be taken inside a maximum over
the heads of a group. The product costs as much as W_O itself, so it is made of all heads at once, in blocks
that are summed while they are in a cache; all of it, `[B, Q, T, E]`, never exists.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from retain.evidence import Evidence
from retain.kernels.backend import without_autocast

# Numbers of one block of the product, of values and of W_O in its precision: 64 MiB in float32; on a CPU,
# whose cache a block should not leave, 4 MiB.
BLOCK, CPU_BLOCK = 2**24, 2**20
# Entries multiplied at once where the bound allows it; with fewer, the weights are read too often.
ROWS = 256


def value_norms(evidence: Evidence, *, p: int = 1) -> Float[Tensor, "B Q T"]:
    """Norms of a layer's entries: of p = 1 the cached ones if there are any, else computed now."""
    if p == 1 and evidence.value_norm_BQT is not None:
        return evidence.value_norm_BQT
    return value_norm(evidence.values_BHTD, evidence.output_weight_QDE, p=p)


@torch.no_grad()
@without_autocast
def value_norm(
    values_BHTD: Float[Tensor, "B H T D"], output_weight_QDE: Float[Tensor, "Q D E"], *, p: int = 1
) -> Float[Tensor, "B Q T"]:
    """The norm of what each value adds to the residual stream, per query head.

    `N_q[i] = (sum_e | sum_d v_{h(q)}[i, d] W[q, d, e] |^p)^(1/p)`, with `h(q) = q // G` and `G = Q / H`.
    Summed in float32 (float64 stays). No gradient passes.

    Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective (CriticalKV), arXiv
    2502.03805: its N is the mean over the group for p = 1; it compares p = 2 and finds no significant
    difference (appendix C.3).

    Args:
        values_BHTD: cached values, any strides.
        output_weight_QDE: W_O viewed per query head, any strides.
        p: 1 or 2.

    Returns:
        norms, non-negative.

    Examples:
        >>> values, weight = torch.ones(1, 1, 1, 2), torch.tensor([[[3.0, 0.0], [0.0, -4.0]]])
        >>> value_norm(values, weight).item(), value_norm(values, weight, p=2).item()
        (7.0, 5.0)
    """
    assert p in (1, 2), p
    (B, H, T, D), (Q, _, E) = values_BHTD.shape, output_weight_QDE.shape
    G, most = Q // H, CPU_BLOCK if values_BHTD.device.type == "cpu" else BLOCK
    dtype = multiplied_in(values_BHTD, output_weight_QDE)
    wide = torch.promote_types(values_BHTD.dtype, torch.float32)
    # As many whole rows as fit; where that are too few, fewer columns of more rows.
    rows = min(max(most // (Q * E), min(ROWS, most // Q)), most // (H * D))
    entries = max(1, min(T, rows // B))
    columns = max(1, min(E, most // (Q * max(D, B * entries))))
    weight_HDGE = output_weight_QDE.unflatten(0, (H, G)).transpose(1, 2)
    norm_BHGT = values_BHTD.new_zeros((B, H, G, T), dtype=wide)
    dense = torch.contiguous_format
    # One buffer for all blocks: fresh memory would cost more than the product.
    buffer = values_BHTD.new_empty(H * B * entries * G * columns, dtype=dtype)
    for left in range(0, E, columns):
        weight_HDC = weight_HDGE[..., left : left + columns].to(dtype, memory_format=dense).flatten(2)
        for start in range(0, T, entries):
            part_HBTD = values_BHTD[:, :, start : start + entries].transpose(0, 1)
            part_HND = part_HBTD.to(dtype, memory_format=dense).flatten(1, 2)
            shape = H, part_HND.shape[1], weight_HDC.shape[2]
            product = torch.bmm(part_HND, weight_HDC, out=buffer[: math.prod(shape)].view(shape))
            sizes = product.unflatten(2, (G, -1)).unflatten(1, (B, -1))
            if dtype == wide:
                sums = (sizes.abs_() if p == 1 else sizes.square_()).sum(-1)
            else:  # without a copy in float32
                sums = torch.linalg.vector_norm(sizes, p, -1, dtype=wide) ** p
            norm_BHGT[..., start : start + entries] += sums.permute(1, 0, 3, 2)
    return (norm_BHGT if p == 1 else norm_BHGT.sqrt_()).flatten(1, 2)


def multiplied_in(values_BHTD: Tensor, weight_QDE: Tensor) -> torch.dtype:
    """The precision of products: float32 at least, but on a GPU half precision, whose rounding the sum over a
    model's width averages out, and which is an order of magnitude faster there."""
    dtype = torch.promote_types(values_BHTD.dtype, torch.float32)
    alike = values_BHTD.dtype == weight_QDE.dtype
    return values_BHTD.dtype if values_BHTD.is_cuda and alike else dtype
