"""Computes the L2 norm of each value after the output projection: `||v_i W_O^q||_2`, without the projection.

The norm is the quadratic form of the D x D Gram matrix of each head's slice of W_O, which for many more
entries than D costs E / D times less than the projection that the L1 norm needs. For few entries (up to about
D) values are projected after all.
"""

from jaxtyping import Float
from torch import Tensor

from retain.kernels.value_norm import value_norm


def value_norm_l2(
    values_BHTD: Float[Tensor, "B H T D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    *,
    floats_at_once: int | None = None,
) -> Float[Tensor, "B Q T"]:
    """L2 norm of what each value adds to the residual stream, per query head.

    `N_q[i] = sqrt(v_i M_q v_i^T)`, with `M_q = W[q] W[q]^T` and `v_i = v_{h(q)}[i]`, `h(q) = q // G`. In
    float32 (float64 stays). Squares are what is rounded: a norm that is 3e-4 of the largest possible,
    `||v_i||_2 ||W[q]||_2`, or less, has no correct digit in float32, unless no more than about D entries come
    at once: those are projected. No gradient passes.

    Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective (CriticalKV), arXiv
    2502.03805, compares L2 with its L1 and finds no significant difference (appendix C.3); the Gram matrix is
    ours.

    Args:
        values_BHTD: cached values.
        output_weight_QDE: W_O viewed per query head.
        floats_at_once: bound on the products held at once where no kernel runs, never below one entry's, and
            on what is made dense of W_O at once; None: what fits in a CPU's cache, 16 times that elsewhere.

    Returns:
        norms, non-negative.
    """
    return value_norm(values_BHTD, output_weight_QDE, p=2, floats_at_once=floats_at_once)
