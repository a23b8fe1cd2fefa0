import math

import pytest
import torch

from retain.attention.rotary import Rotary
from tests.close import MODEL, assert_close

FREQUENCIES = torch.tensor([1.0, 0.25, 0.01])


def _naive(x, positions, scaling):
    """Dimension d turns with d + R/2 by the angle position * frequency; the rest stands still."""
    F = len(FREQUENCIES)
    out = x.double().clone()
    for index in range(x.shape[2]):
        for f, frequency in enumerate(FREQUENCIES):
            for b in range(x.shape[0]):
                angle = float(positions[b, index].float() * frequency)
                a, c = x[b, :, index, f].double(), x[b, :, index, f + F].double()
                out[b, :, index, f] = scaling * (a * math.cos(angle) - c * math.sin(angle))
                out[b, :, index, f + F] = scaling * (c * math.cos(angle) + a * math.sin(angle))
    return out


@pytest.mark.parametrize("scaling", [1.0, 1.3])
@pytest.mark.parametrize("width", [6, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rotary_turns_back(width, scaling, dtype):
    rotary = Rotary(FREQUENCIES, scaling)
    x = torch.randn(2, 3, 5, width, dtype=torch.float64).to(dtype)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 0, 4000, 12, 3]])
    turned = _naive(x, positions, scaling).to(torch.promote_types(dtype, torch.float32))
    assert_close(rotary.unrotate(turned, positions), x.to(turned.dtype), dtype=torch.float32, ops=MODEL)
    assert torch.equal(turned[..., 6:], x[..., 6:].to(turned.dtype))
