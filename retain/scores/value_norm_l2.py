"""The L2 norm of what an entry's value adds to the residual stream, without making it: `||v_i W_O^q||_2`.

In: values and the output projection per query head. Out: one norm an entry and query head. The decision taken
here: the norm is the quadratic form of the D x D Gram matrix of each head's slice of W_O, which costs E / D
times less than the projection that the L1 norm needs, and holds no `[T, E]` product.
"""

import torch
from jaxtyping import Float
from torch import Tensor

# Floats of one product [B, H, G, chunk, D] that may exist at once: 64 MiB in float32.
FLOATS_AT_ONCE = 2**24


def value_norm_l2(
    values_BHTD: Float[Tensor, "B H T D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    *,
    floats_at_once: int = FLOATS_AT_ONCE,
) -> Float[Tensor, "B Q T"]:
    """L2 norm of what each value adds to the residual stream, per query head.

    `N_q[i] = sqrt(v_i M_q v_i^T)`, with `M_q = W[q] W[q]^T` and `v_i = v_{h(q)}[i]`, `h(q) = q // G`. In
    float32 (float64 stays). Squares are what is rounded: a norm that is 3e-4 of the largest possible,
    `||v_i||_2 ||W[q]||_2`, or less, has no correct digit in float32.

    Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective (CriticalKV), arXiv
    2502.03805, compares L2 with its L1 and finds no significant difference (appendix C.3); the Gram matrix is
    ours.

    Args:
        values_BHTD: cached values.
        output_weight_QDE: W_O viewed per query head.
        floats_at_once: bound on the products held at once.

    Returns:
        norms, non-negative.
    """
    B, H, T, D = values_BHTD.shape
    Q = output_weight_QDE.shape[0]
    dtype = torch.promote_types(values_BHTD.dtype, torch.float32)
    weight = output_weight_QDE.to(dtype)
    gram_HGDD = (weight @ weight.transpose(-1, -2)).unflatten(0, (H, Q // H))
    norm_BQT = values_BHTD.new_empty((B, Q, T), dtype=dtype)
    chunk = max(1, floats_at_once // max(1, B * Q * D))
    for start in range(0, T, chunk):
        values_BH1TD = values_BHTD[:, :, None, start : start + chunk].to(dtype)
        square = ((values_BH1TD @ gram_HGDD) * values_BH1TD).sum(-1)
        # Rounding may leave a square of nothing below zero.
        norm_BQT[..., start : start + chunk] = square.clamp_min_(0.0).sqrt_().flatten(1, 2)
    return norm_BQT
