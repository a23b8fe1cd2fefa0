"""Judges results of ops; words for what a benchmark is to find.

A result is right by the project's tolerance rule: at most twice the error of plain PyTorch in the same
precision, plus a floor of some units in the last place.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retain.kernels.backend import using

# Error allowed beyond twice that of plain PyTorch, relative to the reference's largest magnitude: some units
# in the last place of the format. tests/close.py takes these.
FLOOR = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Claim:
    """Target of an op on one shape of its benchmark.

    Args:
        case: name of the shape.
        rival: the alternative that it is measured against; `copy` for the machine's bandwidth.
        bound: of the op's time over the rival's, at most; of its share of the copy's bandwidth, at least.
    """

    case: str
    rival: str
    bound: float


def check(cases: Any, case: Any, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> str | None:
    """The problem of an op's results on one of its `cases`, by the rule of tests/close.py; None: nothing.

    `max |actual - exact| <= 2 max |plain - exact| + ops * FLOOR[dtype] * max |exact|` for each floating
    result, where exact is the op's reference in float64 and plain the same in `dtype`; numbers that are not
    finite must be equal. `cases.ROUNDING` gives the operations that round one after another, and the
    precision whose floor applies (None: `dtype`).
    """
    kwargs = cases.inputs(case, dtype, device, seed)
    found = tensors_of(cases.run(case, kwargs))
    with using("reference"):
        exact, plain = (tensors_of(cases.run(case, given)) for given in (cast(kwargs, torch.float64), kwargs))
    ops, floor = cases.ROUNDING
    for place, (actual, true, rough) in enumerate(zip(found, exact, plain, strict=True)):
        magnitude = true[true.isfinite()].abs().amax().item() if true.isfinite().any() else 0.0
        allowed = 2 * error(rough, true) + ops * FLOOR[floor or dtype] * max(magnitude, 1e-30)
        if actual.shape != true.shape or not (got := error(actual, true)) <= allowed:
            return f"result {place}: error {got:.2e}, {allowed:.2e} allowed"
    return None


def tensors_of(results: Any) -> list[Tensor]:
    """Floating tensors of an op's results: a tensor, several, or some by name."""
    parts = results.values() if isinstance(results, dict) else results
    parts = [results] if isinstance(results, Tensor) else parts
    return [one.detach() for one in parts if isinstance(one, Tensor) and one.is_floating_point()]


def error(actual: Tensor, reference: Tensor) -> float:
    """Largest absolute difference; inf where one is not finite and the other is not equal to it."""
    actual, reference = actual.detach().double(), reference.detach().double()
    difference = torch.where(actual == reference, 0.0, (actual - reference).abs())
    difference = difference.nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(difference.max()) if difference.numel() else 0.0


def cast(kwargs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same arguments in another precision; leaves that require gradients stay such leaves."""
    return {
        name: value.detach().to(dtype).requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in kwargs.items()
    }


@contextmanager
def quiet(threads: int | None) -> Iterator[None]:
    """Sets the number of threads (None: unchanged), stops garbage collection, and restores both."""
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads or before)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()
