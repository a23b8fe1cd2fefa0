"""Computes the L1 norm of each value after the output projection: `||v_i W_O^q||_1`, per query head.

The norm is per *query* head (each has its own slice of W_O), so that it can be taken inside a maximum over
the heads of a group. `retain.kernels.value_norm` computes it without the `[T, E]` product.
"""

from jaxtyping import Float
from torch import Tensor

from retain.evidence import Evidence
from retain.kernels.value_norm import value_norm

# Floats of one product that may exist at once, elsewhere than in a CPU's cache: 64 MiB in float32.
FLOATS_AT_ONCE = 2**24


def value_norms(evidence: Evidence) -> Float[Tensor, "B Q T"]:
    """`value_norm_l1` of a layer's entries: the cached norms, else computed now."""
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
        floats_at_once: bound on the projected values held at once where no kernel runs, never below one a
            query head and sequence, and on what is made dense of W_O at once; None: what fits in a CPU's
            cache, 16 times that elsewhere.

    Returns:
        norms, non-negative.
    """
    return value_norm(values_BHTD, output_weight_QDE, floats_at_once=floats_at_once)
