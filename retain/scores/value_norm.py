"""How much an entry's value weighs once the output projection has seen it: `||v_i W_O^q||_1`, per query head.

In: values and the output projection per query head. Out: one norm an entry and query head. Two decisions are
taken here. The norm is per *query* head (every one has its own slice of W_O), so that it can be taken inside
a maximum over the heads of a group; whoever wants the group's mean takes it himself. And the product costs
what W_O itself costs, so it is made of all heads at once, in blocks that are summed while they are still in
the processor's cache: written to memory and read back it would cost as much again.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from retain.evidence import Evidence

# Floats of one product [H, B * entries, G * columns] that may exist at once: 64 MiB in float32.
FLOATS_AT_ONCE = 2**24
# The same on a CPU, whose cache the product should not leave: 4 MiB in float32.
CPU_FLOATS_AT_ONCE = 2**20
# Entries multiplied at once where the bound allows it; with fewer, the weights are read too often.
ROWS = 256


def value_norms(evidence: Evidence) -> Float[Tensor, "B Q T"]:
    """`value_norm_l1` of a layer's entries: as it was made when they came, else made now."""
    if evidence.value_norm_BQT is not None:
        return evidence.value_norm_BQT
    return value_norm_l1(evidence.values_BHTD, evidence.output_weight_QDE)


def value_norm_l1(
    values_BHTD: Float[Tensor, "B H T D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    *,
    floats_at_once: int | None = None,
) -> Float[Tensor, "B Q T"]:
    """L1 norm of what each value adds to the residual stream, per query head.

    `N_q[i] = sum_e | sum_d v_{h(q)}[i, d] * W[q, d, e] |`, with `h(q) = q // G`. Computed in float32 (float64
    stays), in blocks of entries and of columns `e`: the projected values never exist together. No gradient
    passes.

    Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective
    (CriticalKV), arXiv 2502.03805: its N is this, averaged over the group.

    Args:
        values_BHTD: cached values.
        output_weight_QDE: W_O viewed per query head.
        floats_at_once: bound on the projected values held at once, never below one a query head and sequence;
            None: what fits in a CPU's cache, 16 times that elsewhere.

    Returns:
        norms, non-negative.
    """
    B, H, T, D = values_BHTD.shape
    Q, _, E = output_weight_QDE.shape
    G = Q // H
    if floats_at_once is None:
        floats_at_once = CPU_FLOATS_AT_ONCE if values_BHTD.device.type == "cpu" else FLOATS_AT_ONCE
    dtype = torch.promote_types(values_BHTD.dtype, torch.float32)
    # As many whole rows as fit; where that are too few, fewer columns of more rows.
    rows = max(floats_at_once // (Q * E), min(ROWS, floats_at_once // Q))
    entries = max(1, min(T, rows // max(1, B)))
    columns = max(1, min(E, floats_at_once // max(1, B * Q * entries)))
    weight_HDGE = output_weight_QDE.detach().unflatten(0, (H, G)).transpose(1, 2)
    norm_BHGT = values_BHTD.new_zeros((B, H, G, T), dtype=dtype)
    # One buffer for all blocks: fresh memory would cost more than the product.
    buffer = values_BHTD.new_empty(B * Q * entries * columns, dtype=dtype)
    for left in range(0, E, columns):
        weight = weight_HDGE[..., left : left + columns].to(dtype).flatten(2)
        for start in range(0, T, entries):
            part = values_BHTD[:, :, start : start + entries].detach().transpose(0, 1).to(dtype)
            shape = (H, B, part.shape[2], G, weight.shape[-1] // G)
            product = buffer[: math.prod(shape)].view(H, B * part.shape[2], weight.shape[-1])
            torch.bmm(part.flatten(1, 2), weight, out=product)
            norm_BHGT[..., start : start + entries] += product.view(shape).abs_().sum(-1).permute(1, 0, 3, 2)
    return norm_BHGT.flatten(1, 2)
