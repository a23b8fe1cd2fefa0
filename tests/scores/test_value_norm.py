"""Norms of projected values against the projection made whole, in float64; memory, precision, autocast."""

import pytest
import torch

from retain.scores import value_norm as module
from retain.scores.value_norm import value_norm
from tests.close import assert_close

# (B, H, G, T, D, E)
SHAPES = [
    (1, 2, 2, 70, 64, 96),
    (1, 2, 2, 0, 16, 8),
    (2, 1, 1, 67, 33, 51),
    (1, 1, 8, 33, 300, 20),
    (2, 2, 3, 1, 16, 900),
]


def drawn(shape, dtype=torch.float32, linear=True):
    """Values and W_O as views, as models have them, with heads of unequal size."""
    B, H, G, T, D, E = shape
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(B, T, H, D, generator=draw).transpose(1, 2)
    weight = torch.randn(E, H * G * D, generator=draw).T.unflatten(0, (H * G, D))
    weight = weight * 4.0 ** (torch.arange(H * G) % 3)[:, None, None]
    return values.to(dtype), (weight if linear else weight.contiguous()).to(dtype)


def formula(values, weight, p):
    H = values.shape[1]
    product = torch.einsum("bhtd,hgde->bhgte", values.double(), weight.double().unflatten(0, (H, -1)))
    return (product.abs().pow(p).sum(-1) ** (1 / p)).flatten(1, 2)


@pytest.mark.parametrize("floats", [None, 1, 200])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_are_the_formula(shape, dtype, p, floats, monkeypatch):
    """In blocks of any size; of half precision without rounding a product."""
    if floats is not None:
        monkeypatch.setattr(module, "CPU_BLOCK", floats)
    values, weight = drawn(shape, dtype, linear=p == 1)
    norms = value_norm(values, weight, p=p)
    assert norms.dtype == torch.promote_types(dtype, torch.float32)
    assert_close(norms, formula(values, weight, p), ops=4)


@pytest.mark.parametrize("p", [1, 2])
def test_products_in_half_precision_are_near_it(p, monkeypatch):
    """As they are made on a GPU; the square of one is beyond float16."""
    monkeypatch.setattr(module, "multiplied_in", lambda values, weight: values.dtype)
    values, weight = drawn((1, 2, 2, 20, 64, 500), torch.float16)
    norms = value_norm(values * 8, weight * 8, p=p)
    assert norms.dtype == torch.float32
    assert_close(norms, formula(values * 8, weight * 8, p), dtype=torch.float16)


def test_no_gradient_passes_and_what_is_no_number_stays_that():
    values, weight = drawn((1, 2, 2, 66, 16, 8))
    values[0, 1, 65, 3] = float("nan")
    norms = value_norm(values.requires_grad_(), weight)
    assert not norms.requires_grad and norms[0, -1, 65].isnan()
    assert norms[0, -1, :65].isfinite().all() and norms[0, 0].isfinite().all()
