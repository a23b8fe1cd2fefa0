import math

import pytest
import torch

from retain.attention.rotary import Rotary, turn
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
def test_rotary_turns_and_turns_back(width, scaling, dtype):
    rotary = Rotary(FREQUENCIES, scaling)
    x = torch.randn(2, 3, 5, width, dtype=torch.float64).to(dtype)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 0, 4000, 12, 3]])
    turned = rotary.rotate(x, positions)
    assert turned.dtype == torch.promote_types(dtype, torch.float32)
    assert_close(turned, _naive(x, positions, scaling), dtype=torch.float32)
    assert_close(rotary.unrotate(turned, positions), x.to(turned.dtype), dtype=torch.float32, ops=MODEL)
    assert torch.equal(turned[..., 6:], x[..., 6:].to(turned.dtype))


def test_tables_and_their_means():
    rotary = Rotary(FREQUENCIES, 2.0)
    cos, sin = rotary.tables(torch.tensor([0, 3]))
    assert cos.shape == sin.shape == (2, 6) and cos.dtype == torch.float32
    assert cos[0].tolist() == [2.0] * 6 and sin[0].tolist() == [0.0] * 6
    assert_close(cos[1, 1].double(), torch.tensor(2 * math.cos(0.75)).double(), dtype=torch.float32)
    assert torch.equal(cos[:, :3], cos[:, 3:]) and torch.equal(sin[:, :3], sin[:, 3:])
    x = torch.randn(1, 1, 1, 7)
    cos, sin = rotary.tables(torch.arange(1, 9))
    mean = torch.stack([turn(x, cos[i], sin[i]) for i in range(8)]).mean(0)
    assert_close(turn(x, cos.mean(0), sin.mean(0)), mean)
