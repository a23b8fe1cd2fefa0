"""The loss and the overlap agree with three-loop float64 versions, per document and per head."""

import math

import pytest
import torch

from retain.train.losses import (
    LossSettings,
    check_losses,
    keyed_generator,
    pair_draws,
    pairwise_loss,
    regression_loss,
    top_overlap,
)

B, H, T = 2, 3, 40


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    reached_BHT = (torch.arange(T) >= torch.tensor([[0], [7]]))[:, None].expand(B, H, T) & (
        torch.arange(T) < 35
    )
    target = torch.randn(B, H, T, dtype=torch.float64).masked_fill(~reached_BHT, torch.nan)
    return torch.randn(B, H, T, dtype=torch.float64), target, reached_BHT


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_regression(kind: str) -> None:
    predicted, target, reached = case()
    settings = LossSettings(regression=kind, huber_delta=0.7)
    expected = []
    for b in range(B):
        heads = []
        for h in range(H):
            terms = []
            for i in range(T):
                if reached[b, h, i]:
                    d = abs(float(predicted[b, h, i] - target[b, h, i]))
                    terms.append(d * d if kind == "mse" else (0.5 * d * d if d <= 0.7 else 0.7 * (d - 0.35)))
            heads.append(sum(terms) / len(terms))
        expected.append(sum(heads) / H)
    torch.testing.assert_close(
        regression_loss(predicted, target, reached, settings), torch.tensor(expected, dtype=torch.float64)
    )


def test_pairwise() -> None:
    predicted, target, reached = case()
    settings = LossSettings(keep_ratios=(0.2, 0.5), pairs=5, band=0.1, temperature=0.5)
    uniform = torch.stack([pair_draws((1, b), num_heads=H, settings=settings) for b in range(B)]).double()
    expected = []
    for b in range(B):
        heads = []
        for h in range(H):
            entries = [i for i in range(T) if reached[b, h, i]]
            ranked = sorted(entries, key=lambda i: -float(target[b, h, i]))
            n, terms = len(ranked), []
            width = math.ceil(0.1 * n)
            for k, ratio in enumerate((0.2, 0.5)):
                boundary = round(ratio * n)
                for p in range(5):
                    i = ranked[boundary - 1 - int(uniform[b, h, k, p, 0] * width)]
                    j = ranked[boundary + int(uniform[b, h, k, p, 1] * width)]
                    assert target[b, h, i] > target[b, h, j]
                    terms.append(math.log1p(math.exp(-float(predicted[b, h, i] - predicted[b, h, j]) / 0.5)))
            heads.append(sum(terms) / len(terms))
        expected.append(sum(heads) / H)
    torch.testing.assert_close(
        pairwise_loss(predicted, target, reached, uniform, settings),
        torch.tensor(expected, dtype=torch.float64),
    )


def test_pairs_of_equal_target_do_not_count() -> None:
    settings = LossSettings(pairs=4)
    uniform = pair_draws((0,), num_heads=1, settings=settings)[None]
    flat, reached = torch.zeros(1, 1, T), torch.ones(1, 1, T, dtype=torch.bool)
    assert pairwise_loss(torch.randn(1, 1, T), flat, reached, uniform, settings).item() == 0.0


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_reached_entries(count: int) -> None:
    settings = LossSettings(pairs=4)
    uniform = pair_draws((0,), num_heads=1, settings=settings)[None]
    predicted, target = torch.randn(1, 1, 6), torch.randn(1, 1, 6)
    reached = (torch.arange(6) < count)[None, None]
    assert pairwise_loss(predicted, target, reached, uniform, settings).isfinite().all()
    assert regression_loss(predicted, target, reached, settings).isfinite().all()


def test_unreached_entries_get_no_gradient() -> None:
    predicted, target, reached = case()
    predicted.requires_grad_()
    settings = LossSettings()
    uniform = torch.stack([pair_draws((1, b), num_heads=H, settings=settings) for b in range(B)]).double()
    (
        regression_loss(predicted, target, reached, settings).sum()
        + pairwise_loss(predicted, target, reached, uniform, settings).sum()
    ).backward()
    assert predicted.grad is not None
    assert (predicted.grad[~reached] == 0).all() and (predicted.grad[reached] != 0).all()


def test_overlap() -> None:
    predicted, target, reached = case()
    expected = []
    for b in range(B):
        heads = []
        for h in range(H):
            entries = [i for i in range(T) if reached[b, h, i]]
            k = round(0.2 * len(entries))
            tops = [set(sorted(entries, key=lambda i: -float(x[b, h, i]))[:k]) for x in (predicted, target)]
            heads.append(len(tops[0] & tops[1]) / k)
        expected.append(sum(heads) / H)
    torch.testing.assert_close(top_overlap(predicted, target, reached), torch.tensor(expected))
    assert (top_overlap(target, target, reached) == 1).all()


def test_draws_depend_on_the_key_alone() -> None:
    first, again, other = (keyed_generator(key).initial_seed() for key in [(3, 1, 4), (3, 1, 4), (3, 4, 1)])
    assert first == again != other


def test_settings_that_mean_nothing_are_refused_together() -> None:
    with pytest.raises(ValueError, match="keep_ratios.*band.*temperature"):
        check_losses(LossSettings(keep_ratios=(1.2,), band=0.0, temperature=0.0))
