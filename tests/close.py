"""The one rule of tolerances.

A result is close when its error against a reference in higher precision is at most twice the error of plain
PyTorch in the same precision, plus a floor (`FLOOR`, which the kernels' benchmarks share). Integers, offsets
and masks are compared exactly, elsewhere, with `torch.equal`.
"""

import torch
from torch import Tensor

from retain.kernels.measure import FLOOR, error

# Two runs through a whole tiny model round in every layer: that many operations' floors (logits against
# logits).
MODEL = 8


def magnitude(reference: Tensor) -> float:
    """Largest finite magnitude of the reference."""
    finite = reference.detach().double()
    finite = finite[finite.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def assert_close(
    actual: Tensor,
    reference: Tensor,
    plain: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    ops: int = 1,
) -> None:
    """Assert that `actual` is as good as plain PyTorch in the same precision.

    Args:
        actual: the result under test.
        reference: the same in float64 (or float32, for half precision).
        plain: the same by plain PyTorch in `actual`'s precision; without it only the floor is allowed.
        dtype: the precision whose floor applies; default that of `actual`. Name the model's precision if the
            result was cast afterwards.
        ops: operations that round one after another; `MODEL` for logits of a whole tiny model.
    """
    assert actual.shape == reference.shape, f"shape {tuple(actual.shape)} != {tuple(reference.shape)}"
    floor = ops * FLOOR[dtype or actual.dtype] * max(magnitude(reference), 1e-30)
    allowed = floor + (0.0 if plain is None else 2.0 * error(plain, reference))
    got = error(actual, reference)
    assert got <= allowed, f"error {got:.3e} > allowed {allowed:.3e} (floor {floor:.3e})"
