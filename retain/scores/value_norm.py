"""How much an entry's value weighs once the output projection has seen it: `||v_i W_O^q||_1`, per query head.

In: values and the output projection per query head. Out: one norm an entry and query head. The decision taken
here: the norm is per *query* head (every one has its own slice of W_O), so that it can be taken inside a
maximum over the heads of a group; whoever wants the group's mean takes it himself.
"""

import torch
from jaxtyping import Float
from torch import Tensor

# Floats of one product [B, chunk, H, G * E] that may exist at once: 64 MiB in float32.
FLOATS_AT_ONCE = 2**24


def value_norm_l1(
    values_BHTD: Float[Tensor, "B H T D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    *,
    floats_at_once: int = FLOATS_AT_ONCE,
) -> Float[Tensor, "B Q T"]:
    """L1 norm of what each value adds to the residual stream, per query head.

    `N_q[i] = sum_e | sum_d v_{h(q)}[i, d] * W[q, d, e] |`, with `h(q) = q // G`. Computed in float32 (float64
    stays), one head and a chunk of entries at a time: the projected values `[T, E]` of all heads never exist
    together.

    Identify What You Need (CriticalKV), arXiv 2502.03805: its N is this, averaged over the group.

    Args:
        values_BHTD: cached values.
        output_weight_QDE: W_O viewed per query head.
        floats_at_once: bound on the projected values held at once.

    Returns:
        norms, non-negative.
    """
    B, H, T, D = values_BHTD.shape
    Q, _, E = output_weight_QDE.shape
    G = Q // H
    dtype = torch.promote_types(values_BHTD.dtype, torch.float32)
    norm_BQT = values_BHTD.new_empty((B, Q, T), dtype=dtype)
    chunk = max(1, floats_at_once // max(1, B * G * E))
    for head in range(H):
        group = slice(head * G, (head + 1) * G)
        weight = output_weight_QDE[group].to(dtype).permute(1, 0, 2).reshape(D, G * E)
        for start in range(0, T, chunk):
            part = values_BHTD[:, head, start : start + chunk].to(dtype) @ weight
            norm = part.unflatten(-1, (G, E)).abs_().sum(-1)
            norm_BQT[:, group, start : start + chunk] = norm.transpose(1, 2)
    return norm_BQT
