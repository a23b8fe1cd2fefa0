"""Norms of values seen through the output projection: `||v_i W_O^q||_p`, per query head.

The projected values `[T, E]` never exist: each tile of them is summed where it was made. On an H200 a prompt
of 32K tokens under CriticalKV, which needs these norms, took 84 ms more than under SnapKV, in 32 layers
(eval/findings/2026-11-27-h200.md); plain PyTorch would write and read 34 GB of products a layer for it.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from retain.kernels import backend
from retain.kernels.value_norm import reference

# Widest head that tiles cover.
MAX_WIDTH = 256


@torch.compiler.disable(reason="norms of values are taken between graphs")
def value_norm(
    values_BHTD: Float[Tensor, "B H T D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    *,
    p: int = 1,
) -> Float[Tensor, "B Q T"]:
    """The norm of what each value adds to the residual stream, per query head.

    `N_q[i] = (sum_e | sum_d v_{h(q)}[i, d] W[q, d, e] |^p)^(1/p)`, with `h(q) = q // G` and `G = Q / H`.
    Computed in float32 (float64 stays), from half precision without rounding a product. No gradient passes.

    Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective (CriticalKV), arXiv
    2502.03805: its N is the mean over the group for p = 1; it compares p = 2 and finds no significant
    difference (appendix C.3).

    Args:
        values_BHTD: cached values, any strides.
        output_weight_QDE: W_O viewed per query head, any strides: a view of a linear layer's weight will do.
        p: 1 or 2.

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
    return _run(values_BHTD.detach(), output_weight_QDE.detach(), p)


@backend.without_autocast
def _run(values_BHTD: Tensor, weight_QDE: Tensor, p: int) -> Tensor:
    width = values_BHTD.shape[-1]
    unsupported = f"a head width of {width} is more than {MAX_WIDTH}" if width > MAX_WIDTH else None
    run = reference.value_norm
    if backend.path_for("value_norm", values_BHTD, weight_QDE, unsupported=unsupported) == "triton":
        from retain.kernels.value_norm import launch

        run = launch.value_norm
    return run(values_BHTD, weight_QDE, p)


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
