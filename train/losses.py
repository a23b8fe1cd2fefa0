"""What training minimises, and the overlap by which it is judged.

In: predicted and target log-risk `[B, H, T]`, and which entries were reached. Out: one number per document,
so that the mean over documents is the same however they are spread over micro-batches and processes. The
one decision taken here: the ranking matters only where the budget cuts, so besides the regression, pairs
are drawn from just above and just below each head's boundary and must come out in the right order.
(ForesightKV, arXiv 2602.03203, hinges such pairs; DynTS, arXiv 2601.18383, uses the soft form that is
ours; KVpop, arXiv 2607.05061, looks at the boundary too.)
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from retain.ranking import rank_entries


@dataclass(frozen=True)
class LossSettings:
    """The two terms.

    Args:
        regression: `mse` or `huber` on log-risk.
        huber_delta: where the Huber loss turns linear, in log-risk.
        pairwise_weight: factor of the pairwise term (0 = off).
        keep_ratios: budgets whose boundary is trained.
        band: width of the band on either side of a boundary, as a share of the entries.
        pairs: pairs per head, budget and document.
        temperature: log-risk difference at which a pair counts as told apart.
    """

    regression: Literal["mse", "huber"] = "mse"
    huber_delta: float = 1.0
    pairwise_weight: float = 0.5
    keep_ratios: tuple[float, ...] = (0.1, 0.2, 0.4)
    band: float = 0.15
    pairs: int = 64
    temperature: float = 1.0


def check_losses(settings: LossSettings) -> None:
    """Refuse settings that mean nothing.

    Raises:
        ValueError: with all of them.
    """
    problems = []
    if not all(0 < ratio < 1 for ratio in settings.keep_ratios):
        problems.append(f"loss.keep_ratios={list(settings.keep_ratios)}: each must lie between 0 and 1")
    if settings.pairwise_weight and (not settings.keep_ratios or settings.pairs < 1):
        problems.append("loss.pairwise_weight > 0 needs at least one of loss.keep_ratios and loss.pairs >= 1")
    if settings.pairwise_weight < 0:
        problems.append(f"loss.pairwise_weight={settings.pairwise_weight} must not be negative")
    if not 0 < settings.band <= 1:
        problems.append(f"loss.band={settings.band} must lie in (0, 1]")
    if settings.temperature <= 0 or settings.huber_delta <= 0:
        problems.append("loss.temperature and loss.huber_delta must be positive")
    if problems:
        raise ValueError("; ".join(problems) + ".")


def regression_loss(
    predicted_BHT: Float[Tensor, "B H T"],
    target_BHT: Float[Tensor, "B H T"],
    reached_BHT: Bool[Tensor, "B H T"],
    settings: LossSettings,
) -> Float[Tensor, " B"]:
    """Mean over a head's reached entries, then over heads, of `(predicted - target)^2` (or its Huber
    form)."""
    target_BHT = target_BHT.masked_fill(~reached_BHT, 0.0)
    predicted_BHT = predicted_BHT.masked_fill(~reached_BHT, 0.0)
    if settings.regression == "mse":
        each_BHT = (predicted_BHT - target_BHT).square()
    else:
        each_BHT = functional.huber_loss(
            predicted_BHT, target_BHT, reduction="none", delta=settings.huber_delta
        )
    return (each_BHT.sum(-1) / reached_BHT.sum(-1).clamp_min(1)).mean(-1)


def pairwise_loss(
    predicted_BHT: Float[Tensor, "B H T"],
    target_BHT: Float[Tensor, "B H T"],
    reached_BHT: Bool[Tensor, "B H T"],
    uniform_BHKP2: Float[Tensor, "B H K P 2"],
    settings: LossSettings,
) -> Float[Tensor, " B"]:
    """Pairs across each budget's boundary: mean of `softplus(-(s_i - s_j) / temperature)`, with i kept and j
    evicted.

    With n reached entries of a head, ranked by target, the boundary of keep_ratio r lies after rank k =
    round(r n); i is drawn from the band before it, j from the band after it. Pairs of equal target do not
    count.

    Args:
        predicted_BHT: log-risk by the gate.
        target_BHT: log-risk of the teacher.
        reached_BHT: entries that count.
        uniform_BHKP2: uniform draws in [0, 1), K budgets, P pairs: for i and for j.
        settings: keep_ratios (K of them), band, temperature.
    """
    count_BH1 = reached_BHT.sum(-1, keepdim=True)
    order_BHT = target_BHT.masked_fill(~reached_BHT, float("-inf")).argsort(
        dim=-1, descending=True, stable=True
    )
    width_BH1 = torch.ceil(settings.band * count_BH1).long().clamp_min(1)
    kept_ranks, evicted_ranks = [], []
    for budget, ratio in enumerate(settings.keep_ratios):
        boundary_BH1 = (
            torch.round(ratio * count_BH1).long().clamp_min(1).minimum((count_BH1 - 1).clamp_min(0))
        )
        above_BH1 = width_BH1.minimum(boundary_BH1)
        below_BH1 = width_BH1.minimum(count_BH1 - boundary_BH1)
        draw_BHP, other_BHP = uniform_BHKP2[:, :, budget].unbind(-1)
        kept_ranks.append(boundary_BH1 - 1 - (draw_BHP * above_BH1).long())
        evicted_ranks.append(boundary_BH1 + (other_BHP * below_BH1).long())
    last = target_BHT.shape[-1] - 1
    kept = order_BHT.gather(-1, torch.cat(kept_ranks, -1).clamp(0, last))
    evicted = order_BHT.gather(-1, torch.cat(evicted_ranks, -1).clamp(0, last))
    margin = predicted_BHT.gather(-1, kept) - predicted_BHT.gather(-1, evicted)
    counts = (
        (target_BHT.gather(-1, kept) > target_BHT.gather(-1, evicted))
        & reached_BHT.gather(-1, kept)
        & reached_BHT.gather(-1, evicted)
    )
    each = functional.softplus(-margin / settings.temperature) * counts
    return (each.sum(-1) / counts.sum(-1).clamp_min(1)).mean(-1)


def pair_draws(key: tuple[int, ...], *, num_heads: int, settings: LossSettings) -> Float[Tensor, "H K P 2"]:
    """The uniform draws of one document at one step and layer: a function of `key` alone, on any device."""
    return torch.rand(num_heads, len(settings.keep_ratios), settings.pairs, 2, generator=keyed_generator(key))


def keyed_generator(key: tuple[int, ...]) -> torch.Generator:
    """A CPU generator that depends on several integers and nothing else (mixed by the constants of
    splitmix64)."""
    state = 0
    for part in key:
        state = (state + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 27
    return torch.Generator().manual_seed(state >> 1)


def top_overlap(
    predicted_BHT: Float[Tensor, "B H T"],
    target_BHT: Float[Tensor, "B H T"],
    reached_BHT: Bool[Tensor, "B H T"],
    share: float = 0.2,
) -> Float[Tensor, " B"]:
    """How much of the target's top `share` of a head's entries the prediction finds; mean over heads. Chance:
    `share`."""
    size_BH1 = torch.round(share * reached_BHT.sum(-1, keepdim=True)).long().clamp_min(1)
    both = top_entries(predicted_BHT, reached_BHT, size_BH1) & top_entries(target_BHT, reached_BHT, size_BH1)
    return (both.sum(-1) / size_BH1[..., 0]).mean(-1)


def top_entries(
    score_BHT: Float[Tensor, "B H T"], reached_BHT: Bool[Tensor, "B H T"], size_BH1: Tensor
) -> Bool[Tensor, "B H T"]:
    """True on the `size` reached entries of highest score."""
    return (rank_entries(score_BHT.masked_fill(~reached_BHT, float("-inf"))) < size_BH1) & reached_BHT
