"""Computes the losses of layer-local training.

A loss is a weighted sum of named terms (`loss.terms`), each a function of one `Case`; so every published gate
loss is a row of one table, and they mix. A term is one number a document, so that the mean over documents is
the same however they are spread over micro-batches and processes.

The ranking matters only where the budget cuts. So besides the regression, by default, pairs are drawn from
just above and just below each head's boundary and must come out in the right order (`pair_loss`; the soft
form of ForesightKV's, arXiv 2602.03203, as in DynTS, arXiv 2601.18383).
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import add

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from retain.train.objectives.case import Case, LossSettings, boundary_of, keyed_generator, mean_over_reached
from retain.train.objectives.layer_output import layer_output_loss

# A probability is kept this far from 0 and 1 before its logarithm is taken.
CLAMP = 1e-6


def local_losses(case: Case) -> dict[str, Float[Tensor, ""]]:
    """Returns every term of `settings.terms`, unweighted, of one layer and one document: all 0, with a
    gradient of 0, where no entry is reached. ValueError: `layer_output` without a view."""
    return {name: TERMS[name](case)[0] for name in case.settings.terms}


def total_loss(found: Mapping[str, Tensor], settings: LossSettings) -> Tensor:
    """`sum_k weight_k term_k`, in the order of the settings; a term of weight 0 is only reported."""
    return reduce(add, [weight * found[name] for name, weight in settings.terms.items() if weight])


def regression_loss(loss: Callable[..., Tensor], case: Case) -> Float[Tensor, " B"]:
    """A loss of torch's on `d = predicted - target`, mean over a head's reached entries, then over heads:
    `d^2` (`mse_loss`), or `d^2 / 2` up to `|d| = 1` and `|d| - 1 / 2` beyond (`smooth_l1_loss`: Locret, arXiv
    2410.01805, on mass or risk itself, with `.0025` of `smoothness`)."""
    known_BHT, wanted_BHT = case.reached_of(case.output_BHT), case.reached_of(case.wanted_BHT)
    return mean_over_reached(loss(known_BHT, wanted_BHT, reduction="none"), case.reached_BHT)


def bce_loss(case: Case) -> Float[Tensor, " B"]:
    """`-(t log p + (1 - t) log(1 - p))` on soft labels, of a gate that says a probability.

    `p` is kept in [1e-6, 1 - 1e-6], with the gradient there for what lies beyond (a clamp's is 0, and a gate
    that is sure and wrong would stay so), and `t` in [0, 1]. Fast KVzip, arXiv 2601.17668.
    """
    p_BHT = case.reached_of(case.output_BHT, 0.5)
    p_BHT = p_BHT.clamp(CLAMP, 1 - CLAMP).detach() + (p_BHT - p_BHT.detach())
    t_BHT = case.reached_of(case.target_BHT, 0.5).clamp(0.0, 1.0)
    each_BHT = -(t_BHT * p_BHT.log() + (1 - t_BHT) * torch.log1p(-p_BHT))
    return mean_over_reached(each_BHT, case.reached_BHT)


def smoothness(case: Case) -> Float[Tensor, " B"]:
    """`(s_i - s_{i+1})^2`, mean over a head's neighbours that are both reached, then over heads (Locret)."""
    both_BHT = case.reached_BHT[..., 1:] & case.reached_BHT[..., :-1]
    step_BHT = (case.output_BHT[..., 1:] - case.output_BHT[..., :-1]).masked_fill(~both_BHT, 0.0)
    return mean_over_reached(step_BHT.square(), both_BHT)


def pair_loss(case: Case) -> Float[Tensor, " B"]:
    """Pairs across each budget's boundary, i kept and j evicted: the mean of `softplus(-(s_i - s_j) /
    temperature)` over a head's pairs that count, then over heads.

    With n reached entries of a head, ranked by target, the boundary of keep_ratio r lies after rank k =
    round(r n); i is drawn from the `ceil(band n)` entries before it, j from those after it. Pairs of equal
    target do not count.
    """
    settings, target_BHT, reached_BHT = case.settings, case.wanted_BHT, case.reached_BHT
    draws_HKP2 = pair_draws(case.key, num_heads=target_BHT.shape[1], settings=settings).to(target_BHT.device)
    order_BHT = case.reached_of(target_BHT, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    count_BH1 = reached_BHT.sum(-1, keepdim=True)
    width_BH1 = torch.ceil(settings.band * count_BH1).long().clamp_min(1)
    kept_ranks, evicted_ranks = [], []
    for budget, ratio in enumerate(settings.keep_ratios):
        boundary_BH1 = boundary_of(count_BH1, ratio)
        above_BH1 = width_BH1.minimum(boundary_BH1)
        below_BH1 = width_BH1.minimum(count_BH1 - boundary_BH1)
        draw_BHP, other_BHP = draws_HKP2[None, :, budget].unbind(-1)
        kept_ranks.append(boundary_BH1 - 1 - (draw_BHP * above_BH1).long())
        evicted_ranks.append(boundary_BH1 + (other_BHP * below_BH1).long())
    last = target_BHT.shape[-1] - 1
    kept, evicted = (
        order_BHT.gather(-1, torch.cat(ranks, -1).clamp(0, last)) for ranks in (kept_ranks, evicted_ranks)
    )
    counts_BHP = target_BHT.gather(-1, kept) > target_BHT.gather(-1, evicted)
    counts_BHP &= reached_BHT.gather(-1, kept) & reached_BHT.gather(-1, evicted)
    known_BHT = case.reached_of(case.output_BHT)
    ahead_BHP = known_BHT.gather(-1, kept) - known_BHT.gather(-1, evicted)
    each_BHP = functional.softplus(-ahead_BHP / settings.temperature)
    return ((each_BHP * counts_BHP).sum(-1) / counts_BHP.sum(-1).clamp_min(1)).mean(-1)


def pair_draws(key: tuple[int, ...], *, num_heads: int, settings: LossSettings) -> Float[Tensor, "H K P 2"]:
    """The uniform draws of one document at one step and layer: a function of `key` alone, on any device."""
    return torch.rand(num_heads, len(settings.keep_ratios), settings.pairs, 2, generator=keyed_generator(key))


TERMS: dict[str, Callable[[Case], Float[Tensor, " B"]]] = {
    "mse": partial(regression_loss, functional.mse_loss),
    "smooth_l1": partial(regression_loss, functional.smooth_l1_loss),
    "bce": bce_loss,
    "smooth": smoothness,
    "pairwise": pair_loss,
    "layer_output": lambda case: layer_output_loss(case)[None],
}
