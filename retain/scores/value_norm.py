"""Gives the norm of each value after the output projection: `||v_i W_O^q||_p`, per query head.

The norm is per *query* head (each has another slice of W_O), so that it can be taken inside a maximum over
the heads of a group. `retain.kernels.value_norm` computes it.
"""

from jaxtyping import Float
from torch import Tensor

from retain.evidence import Evidence
from retain.kernels.value_norm import value_norm


def value_norms(evidence: Evidence, *, p: int = 1) -> Float[Tensor, "B Q T"]:
    """Norms of a layer's entries: of p = 1 the cached ones if there are any, else computed now."""
    if p == 1 and evidence.value_norm_BQT is not None:
        return evidence.value_norm_BQT
    return value_norm(evidence.values_BHTD, evidence.output_weight_QDE, p=p)
