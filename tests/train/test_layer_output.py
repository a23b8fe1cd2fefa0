"""A soft keep-mask keeps its budget, and its loss teaches which entries to keep and rewards nothing else."""

from dataclasses import replace

import pytest
import torch

from retain.train.objectives.layer_output import budget_threshold, layer_output, relative_change
from tests.train.test_losses import H, T, evidence_of, naive_output, of, one, soft_threshold, view_of


@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_the_soft_threshold_keeps_the_budget_whatever_is_said(temperature: float) -> None:
    output, _, reached, _ = one("log_risk")
    for ratio in (0.1, 0.5):
        for said in (output, output + 7.0, torch.full_like(output, -3.0), 1e4 * output):
            (cut,) = budget_threshold(said[None], reached[None], (ratio,), temperature)
            kept = torch.sigmoid((said[None] - cut) / temperature).masked_fill(~reached, 0.0).sum(-1)
            wanted = [[float(round(ratio * n)) for n in reached.sum(-1).tolist()]]
            torch.testing.assert_close(kept, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=0.0)
        for h in range(H):
            cut = budget_threshold(output[None], reached[None], (0.3, ratio), temperature)[1, 0, h, 0]
            assert float(cut) == pytest.approx(soft_threshold(output, reached, h, ratio, temperature))
    said = output[None].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: budget_threshold(x, reached[None], (0.3, 0.6), temperature), (said,)
    )


def test_layer_output_does_not_reward_saying_more_of_all() -> None:
    """Softmax does not see a mask that is the same everywhere, so the loss must not pay for one."""
    output = one("log_risk")[0]
    view = view_of(evidence_of(), evidence_of(T + 6, 6, seed=1))
    losses = []
    for shift in (0.0, 4.0):
        said = (output + shift).requires_grad_()
        loss = of("layer_output", "log_risk", output=said, view=view)
        loss.backward()
        assert said.grad is not None and said.grad.abs().max() > 1e-5
        assert said.grad.sum(-1).abs().max() < 1e-9 * said.grad.abs().max() * T
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_queries_that_are_not_there_change_nothing() -> None:
    torch.manual_seed(0)
    evidence, keep = evidence_of(), torch.rand(H, T, dtype=torch.float64)
    whole, masked = (naive_output(evidence, mask, 5) for mask in (torch.ones_like(keep), keep))
    for asks in (torch.arange(T) % 3 == 0, torch.arange(T) == T - 1):
        some = replace(evidence, queried_BS=asks[None])
        moved, scale = ((x.norm(dim=-1)[asks]).mean() for x in (whole - masked, whole))
        found = relative_change(some, keep.log()[None], 5, layer_output(some, None, 5))
        torch.testing.assert_close(found, moved / scale)
