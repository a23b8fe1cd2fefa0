"""Norms of values seen through the output projection: `||v_i W_O^q||_p`, per query head.

The projected values `[T, E]` never exist: each tile of them is summed where it was made. The L2 norm goes
through the D x D Gram matrix of each head's slice of the projection where that is less work: E / D times less
for entries far more than D, since that matrix is made anew in every call. It rounds squares.
"""

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from retain.kernels import backend
from retain.kernels.value_norm import reference

# Widest head that tiles cover.
MAX_WIDTH = 256


def value_norm(
    values_BHTD: Float[Tensor, "B H T D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    *,
    p: int = 1,
) -> Float[Tensor, "B Q T"]:
    """The norm of what each value adds to the residual stream, per query head.

    `N_q[i] = (sum_e | sum_d v_{h(q)}[i, d] W[q, d, e] |^p)^(1/p)`, with `h(q) = q // G` and `G = Q / H`.
    Through the Gram matrix, `N_q[i] = sqrt(v_i M_q v_i^T)` with `M_q = W[q] W[q]^T`. Computed in float32
    (float64 stays), from half precision without rounding a product. No gradient passes.

    Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective (CriticalKV), arXiv
    2502.03805: its N is the mean over the group for p = 1; it compares p = 2 and finds no significant
    difference (appendix C.3). The Gram matrix is ours.

    Args:
        values_BHTD: cached values, any strides.
        output_weight_QDE: W_O viewed per query head, any strides: a view of a linear layer's weight will do.
        p: 1 or 2. For 2 the way with fewer operations is taken, which is the direct one for up to about D
            entries; so the last digits of an entry's norm depend on how many come with it, as within a batch.
            Through the Gram matrix squares are what is rounded: a norm that is 3e-4 of the largest possible,
            `||v_i||_2 ||W[q]||_2`, or less has no correct digit.

    Returns:
        norms, non-negative.

    Raises:
        ValueError: the shapes do not fit together, or p is neither 1 nor 2.

    Examples:
        >>> values, weight = torch.ones(1, 1, 1, 2), torch.tensor([[[3.0, 0.0], [0.0, -4.0]]])
        >>> value_norm(values, weight).item(), value_norm(values, weight, p=2).item()
        (7.0, 5.0)
    """
    _check(values_BHTD, output_weight_QDE, p)
    way = cheaper(values_BHTD.shape, output_weight_QDE.shape[-1]) if p == 2 else "direct"
    run = _value_norm if torch.compiler.is_compiling() else _run
    return cast(Tensor, run(values_BHTD.detach(), output_weight_QDE.detach(), p, way))


def cheaper(shape_BHTD: torch.Size, model_width: int) -> str:
    """The way to the L2 norm that is fewer operations: for each query head B T D E, or D^2 (B T + E)."""
    B, _, T, D = shape_BHTD
    return "gram" if B * T * model_width > D * (B * T + model_width) else "direct"


@backend.without_autocast
def _run(values_BHTD: Tensor, weight_QDE: Tensor, p: int, via: str) -> Tensor:
    width = values_BHTD.shape[-1]
    unsupported = f"a head width of {width} is more than {MAX_WIDTH}" if width > MAX_WIDTH else None
    run = reference.value_norm
    if backend.path_for("value_norm", values_BHTD, weight_QDE, unsupported=unsupported) == "triton":
        from retain.kernels.value_norm import launch

        run = launch.value_norm
    return run(values_BHTD, weight_QDE, p=p, via=via)


@torch.library.custom_op("retain::value_norm", mutates_args=())
def _value_norm(values: Tensor, weight: Tensor, p: int, via: str) -> Tensor:
    return _run(values, weight, p, via)


@_value_norm.register_fake
def _(values: Tensor, weight: Tensor, p: int, via: str) -> Tensor:
    B, _, T, _ = values.shape
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.new_empty(B, weight.shape[0], T, dtype=dtype)


def _check(values: Tensor, weight: Tensor, p: int) -> None:
    if p not in (1, 2):
        raise ValueError(f"value_norm: p is 1 or 2; got {p!r}.")
    shapes = f"values are {tuple(values.shape)} and the output weight is {tuple(weight.shape)}"
    if values.ndim != 4 or weight.ndim != 3:
        raise ValueError(f"value_norm: {shapes}: pass values [B, H, T, D] and W_O per query head [Q, D, E].")
    H, D = values.shape[1], values.shape[3]
    if weight.shape[1] != D:
        raise ValueError(f"value_norm: {shapes}: both must have one head width D; view W_O as [Q, {D}, E].")
    if not H or weight.shape[0] % H:
        raise ValueError(
            f"value_norm: {shapes}: {weight.shape[0]} query heads are no multiple of {H} KV heads; pass the "
            "values of KV heads, not repeated, and W_O of all query heads."
        )
    if not (values.is_floating_point() and weight.is_floating_point()):
        raise ValueError(
            f"value_norm: values are {values.dtype} and the output weight is {weight.dtype}: pass floating "
            "point; what is quantised must be made dense first."
        )
