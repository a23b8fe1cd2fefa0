"""Cases of `value_norm`: named shapes, inputs, check and rivals."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from retain.kernels.measure import Claim, Cost, cast, wrong
from retain.kernels.value_norm import reference, value_norm

# Elements of the product that the plain rival makes at a time.
PRODUCT = {"cuda": 2**28, "cpu": 2**20}


@dataclass(frozen=True)
class Case:
    """One shape.

    Args:
        batch: B.
        kv_heads: H.
        group_size: G.
        entries: T.
        width: D.
        model_width: E.
        p: of the norm.
        linear: W_O is a view of a linear layer's `[E, Q * D]`, as models have it; else `[Q, D, E]` itself.
        heads_last: values are a view of `[B, T, H, D]`.
        dtype: of values and weights, whatever is asked for; None: what is asked for.
    """

    batch: int = 1
    kv_heads: int = 2
    group_size: int = 2
    entries: int = 70
    width: int = 64
    model_width: int = 96
    p: int = 1
    linear: bool = True
    heads_last: bool = False
    dtype: torch.dtype | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group_size


CASES = {
    "one entry": Case(entries=1),
    "no entry": Case(entries=0),
    "G = 1, odd lengths": Case(batch=2, group_size=1, entries=67, model_width=51),
    "G = 8": Case(kv_heads=1, group_size=8, entries=33),
    "strided": Case(batch=2, entries=40, linear=False, heads_last=True),
    "D = 16": Case(width=16, model_width=40),
    "D = 33": Case(width=33, model_width=66),
    "D = 80": Case(width=80, heads_last=True),
    "D = 128, G = 3": Case(batch=2, group_size=3, width=128, entries=50, model_width=130),
    "D = 256": Case(kv_heads=1, width=256, entries=20, model_width=70),
    "split columns": Case(kv_heads=1, group_size=1, entries=3, model_width=900, linear=False),
    "split columns, p = 2": Case(batch=2, entries=2, model_width=400, p=2),
    "p = 2": Case(batch=2, p=2, entries=65),
}

# Further cases for a GPU: so many entries that tall tiles fill it.
_TALL = Case(batch=2, kv_heads=8, entries=4100)
LARGE = {
    "tall": replace(_TALL, width=128, model_width=520),
    "tall, D = 80": replace(_TALL, width=80),
    "tall, p = 2": replace(_TALL, p=2, model_width=60, linear=False),
    "tall, D = 256": replace(_TALL, width=256, heads_last=True),
    "many sequences of one token": replace(_TALL, batch=64, entries=1, width=128),
}

_LAYER = Case(kv_heads=8, group_size=4, width=128, model_width=4096)
_SMALLER = replace(_LAYER, model_width=1024)
_HALF = replace(_LAYER, dtype=torch.bfloat16)
SPEED = {
    "cpu": {
        "1K": replace(_SMALLER, entries=1024),
        "bfloat16, one new token": replace(_HALF, entries=1),
    },
    "cuda": {
        "128K": replace(_LAYER, entries=2**17),
        "2K of a prompt": replace(_LAYER, entries=2048),
        "one new token": replace(_LAYER, batch=8, entries=1),
    },
}

CLAIMS = {
    "cuda": [
        Claim("near the rate of a matrix product", "matmul", at_least=0.6, case="128K"),
        Claim("the [T, E] product never exists", extra_mb_at_most=1, case="128K"),
    ],
    "cpu": [Claim("the [T, E] product never exists", extra_mb_at_most=16)],
}


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of the op."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = case.dtype or dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    values = normal(case.batch, case.entries, case.kv_heads, case.width).transpose(1, 2)
    if case.linear:
        weight = normal(case.model_width, case.heads * case.width).T.unflatten(0, (case.heads, case.width))
    else:
        weight = normal(case.heads, case.width, case.model_width)
    # Heads of unequal size: 1, 4, 16, 1, ...
    sizes_Q = 4.0 ** (torch.arange(case.heads, device=device) % 3) * case.model_width**-0.5
    return {
        "values_BHTD": values if case.heads_last else values.contiguous(),
        "output_weight_QDE": weight.mul_(sizes_Q[:, None, None]),
        "p": case.p,
    }


def run(case: Case, kwargs: dict[str, Any]) -> Tensor:
    """The op."""
    return value_norm(**kwargs)


def cost(case: Case, dtype: torch.dtype) -> Cost:
    """Of the product."""
    dtype = case.dtype or dtype
    rows, columns = case.batch * case.heads * case.entries, case.model_width
    flops = 2.0 * rows * case.width * columns
    numbers = case.batch * case.kv_heads * case.entries * case.width + case.heads * case.width * columns
    return Cost(flops, numbers * dtype.itemsize + 4.0 * rows)


def plain(kwargs: dict[str, Any]) -> Tensor:
    """The norm as one would write it, of some entries at a time, in the inputs' precision."""
    values, weight = kwargs["values_BHTD"], kwargs["output_weight_QDE"]
    (B, H, T, _), (Q, _, E) = values.shape, weight.shape
    weight_HGDE = weight.unflatten(0, (H, Q // H))
    step = max(1, PRODUCT[values.device.type] // (B * Q * E))
    wider = torch.promote_types(values.dtype, torch.float32)
    norm = values.new_empty(B, Q, T, dtype=wider)
    for start in range(0, T, step):
        product = values[:, :, None, start : start + step] @ weight_HGDE
        sizes = torch.linalg.vector_norm(product, kwargs["p"], -1, dtype=wider)
        norm[..., start : start + step] = sizes.flatten(1, 2)
    return norm


def rivals(case: Case, kwargs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Plain products, some at a time."""
    return {"chunks of the product": lambda: plain(kwargs)}


def check(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> str | None:
    """Compares the op with float64, with float32's tolerance even for inputs of half precision, since no
    product of those is rounded."""
    kwargs = inputs(case, dtype, device, seed)
    wanted = reference.value_norm(**cast(kwargs, torch.float64))
    return wrong(run(case, kwargs), wanted, plain(cast(kwargs, torch.float32)), ops=2, what="norm")
