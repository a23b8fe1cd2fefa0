"""Hard decisions keep the soft gate's gradient, and noise follows its key."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from retain.gates import build_gates
from retain.kernels.gated_attention import gated_attention
from retain.train.objectives.soft_threshold import CLOSED, SoftThreshold, decided, logistic_noise

B, H, T = 2, 3, 12
VALID = torch.arange(T) >= torch.tensor([[0], [4]])


def linear(family: str = "linear", **settings):
    return build_gates(family, {0: {"E": 4, "H": H, **settings}, 2: {"E": 4, "H": H, **settings}})


def output(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(B, H, T, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_a_decision_is_hard_and_its_gradient_soft(temperature: float) -> None:
    z = output().requires_grad_()
    noise = output(1)
    made = decided(functional.logsigmoid(z), noise, temperature)
    wanted = torch.where(z + noise > 0, 0.0, math.log(CLOSED)).double()
    torch.testing.assert_close(made, wanted)
    weight = output(2)
    (made.exp() * weight).sum().backward()
    soft = z.detach().clone().requires_grad_()
    (torch.sigmoid((soft + noise) / temperature) * weight).sum().backward()
    torch.testing.assert_close(z.grad, soft.grad)


def test_what_is_closed_can_open_again() -> None:
    """Through attention, the gradient of a closed entry is that of its openness: of the size it has where it
    is open, and not a millionth of that."""
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(1, 1, T, 8, dtype=torch.float64) for _ in range(3))
    found = {}
    for z in (-1.0, 1.0):
        logit = torch.full((1, 1, T), 1.0, dtype=torch.float64)
        logit[..., 3] = z
        logit.requires_grad_()
        log_gate = decided(functional.logsigmoid(logit), None, 1.0)
        out = gated_attention(queries, keys, values, log_gate, scaling=1.0, protected=1)
        out[..., 5, 0].sum().backward()
        found[z] = abs(float(logit.grad[0, 0, 3]))
    assert found[-1.0] > 0.2 * found[1.0] > 0


@pytest.mark.parametrize("sure", [0.0, -1e-12, -1e-3, -30.0])
def test_sure_gates_give_finite_gradients(sure: float) -> None:
    phi = torch.full((1, 1, 3), sure, requires_grad=True)
    made = decided(phi, None, 0.1)
    made.sum().backward()
    assert made.isfinite().all() and phi.grad is not None and phi.grad.isfinite().all() and (made <= 0).all()


def test_noise_is_logistic_and_follows_the_document() -> None:
    like = torch.zeros(B, H, T)
    made = logistic_noise([(1, 2), (1, 3)], like, VALID)
    assert not made[1, :, :4].any() and made[1, :, 4:].all()
    alone = logistic_noise([(1, 3)], torch.zeros(1, H, 8), torch.ones(1, 8, dtype=torch.bool))
    assert torch.equal(alone[0], made[1, :, 4:]), "whatever it is padded to"
    many = logistic_noise([(0,)], torch.zeros(1, 4, 5000), torch.ones(1, 5000, dtype=torch.bool))
    assert abs(float(many.mean())) < 0.06 and abs(float(many.var()) / (math.pi**2 / 3) - 1) < 0.06


def test_an_opening_gives_the_same_again_and_no_noise_when_it_looks() -> None:
    gates = linear()
    opening = SoftThreshold(gates, "gumbel", 0.1, VALID, [(3, 7, 5), (3, 7, 6)])
    first = opening(output(), gates[0])
    assert torch.equal(opening(output(), gates[0]), first), "a layer that is computed again"
    assert not torch.equal(opening(output(), gates[2]), first), "each layer its own noise"
    other = replace(opening, keys=[(3, 8, 5), (3, 8, 6)])
    assert not torch.equal(other(output(), gates[0]), first), "each step its own noise"
    for how in ("gumbel", "straight_through"):
        expected = torch.where(output() > 0, 0.0, math.log(CLOSED)).double()
        torch.testing.assert_close(replace(opening, hard=how, keys=None)(output(), gates[0]), expected)
    soft = replace(opening, hard="none")
    torch.testing.assert_close(soft(output(), gates[0]), functional.logsigmoid(output()))
