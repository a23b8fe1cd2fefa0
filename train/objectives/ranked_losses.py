"""Computes loss terms of entries' order and probability: pairs and classes at the boundary, and lists.

ForesightKV (arXiv 2602.03203) hinges pairs across the boundary; DynTS (arXiv 2601.18383) uses the soft form
that is ours; KVpop (arXiv 2607.05061) looks at the boundary too.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from retain.train.objectives.case import Case, LossSettings, boundary_of, keyed_generator, mean_over_reached

# A probability is kept this far from 0 and 1 before its logarithm is taken; the gradient is the one there.
CLAMP = 1e-6


def bce_loss(case: Case) -> Float[Tensor, " B"]:
    """`-(t log p + (1 - t) log(1 - p))` on soft labels, of a gate that says a probability.

    `p` is kept in [1e-6, 1 - 1e-6], with the gradient there for what lies beyond, and `t` in [0, 1]. Fast
    KVzip, arXiv 2601.17668.
    """
    p_BHT = held_within(case.reached_of(case.output_BHT, 0.5), CLAMP, 1 - CLAMP)
    t_BHT = case.reached_of(case.target_BHT, 0.5).clamp(0.0, 1.0)
    each_BHT = -(t_BHT * p_BHT.log() + (1 - t_BHT) * torch.log1p(-p_BHT))
    return mean_over_reached(each_BHT, case.reached_BHT)


def held_within(
    x: Float[Tensor, "*shape"], least: float, most: float | None = None
) -> Float[Tensor, "*shape"]:
    """`x` clamped, with the gradient of `x`: a clamp's own is 0, and a gate that is sure and wrong would stay
    so for ever."""
    return x.clamp(least, most).detach() + (x - x.detach())


def smoothness(case: Case) -> Float[Tensor, " B"]:
    """`(s_i - s_{i+1})^2`, mean over a head's neighbours that are both reached, then over heads (Locret)."""
    both_BHT = case.reached_BHT[..., 1:] & case.reached_BHT[..., :-1]
    step_BHT = (case.output_BHT[..., 1:] - case.output_BHT[..., :-1]).masked_fill(~both_BHT, 0.0)
    return mean_over_reached(step_BHT.square(), both_BHT)


def pair_loss(case: Case, *, hinge: bool = False) -> Float[Tensor, " B"]:
    """Pairs across each budget's boundary, i kept and j evicted: the mean of `softplus(-(s_i - s_j) /
    temperature)`, or hinged of `max(0, margin - (s_i - s_j))` (ForesightKV, arXiv 2602.03203: margin .01, on
    scores of its own scale); over a head's pairs that count, then over heads.

    With n reached entries of a head, ranked by target, the boundary of keep_ratio r lies after rank k =
    round(r n); i is drawn from the band before it, j from the band after it. Pairs of equal target do not
    count.
    """
    settings, target_BHT, reached_BHT = case.settings, case.target_own_BHT, case.reached_BHT
    draws_HKP2 = pair_draws(case.key, num_heads=target_BHT.shape[1], settings=settings).to(target_BHT.device)
    order_BHT, count_BH1, width_BH1 = _ranked(case)
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
    if hinge:
        each_BHP = (settings.margin - ahead_BHP).relu()
    else:
        each_BHP = functional.softplus(-ahead_BHP / settings.temperature)
    return ((each_BHP * counts_BHP).sum(-1) / counts_BHP.sum(-1).clamp_min(1)).mean(-1)


def pair_draws(key: tuple[int, ...], *, num_heads: int, settings: LossSettings) -> Float[Tensor, "H K P 2"]:
    """The uniform draws of one document at one step and layer: a function of `key` alone, on any device."""
    return torch.rand(num_heads, len(settings.keep_ratios), settings.pairs, 2, generator=keyed_generator(key))


def _ranked(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Entries in the order of the target, reached ones first (B, H, T); of each head the number of reached
    ones, and the width of the band on either side of a boundary (B, H, 1)."""
    order_BHT = case.reached_of(case.target_own_BHT, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    count_BH1 = case.reached_BHT.sum(-1, keepdim=True)
    return order_BHT, count_BH1, torch.ceil(case.settings.band * count_BH1).long().clamp_min(1)


def _edges(ranked_BHT: Tensor, boundary_BH1: Tensor) -> list[Tensor]:
    """The last number that is kept, and the first that is not, of numbers in falling order."""
    last = ranked_BHT.shape[-1] - 1
    return [ranked_BHT.gather(-1, (boundary_BH1 + side).clamp(0, last)) for side in (-1, 0)]


def threshold_of(
    predicted_BHT: Float[Tensor, "B H T"], reached_BHT: Bool[Tensor, "B H T"], ratio: float
) -> Float[Tensor, "B H 1"]:
    """The score at which a head's budget cuts: half way between the last kept and the first evicted of the
    reached entries, by the prediction itself; no gradient passes."""
    known_BHT = predicted_BHT.detach().masked_fill(~reached_BHT, -torch.inf)
    kept_BH1, evicted_BH1 = _edges(
        known_BHT.sort(dim=-1, descending=True).values, boundary_of(reached_BHT.sum(-1, keepdim=True), ratio)
    )
    middle_BH1 = 0.5 * (kept_BH1 + evicted_BH1)
    return torch.where(middle_BH1.isfinite(), middle_BH1, 0.0)


def boundary_loss(case: Case) -> Float[Tensor, " B"]:
    """Keep or drop, asked of the entries near each budget's boundary.

    Of a head's n reached entries ranked by target, those of rank k - w .. k + w - 1 (k = round(r n), w =
    ceil(band n)) are labelled 1 before rank k and 0 from there on; binary cross-entropy of `sigmoid((s_i -
    threshold) / temperature)`, with `threshold_of` the prediction; mean over them, then over budgets and
    heads. A boundary between equal targets teaches nothing and does not count.

    After KVpop (arXiv 2607.05061), whose code is not public: the form is ours.
    """
    known_BHT, settings = case.reached_of(case.output_BHT), case.settings
    order_BHT, count_BH1, width_BH1 = _ranked(case)
    rank_BHT = order_BHT.argsort(-1)
    ranked_BHT = case.reached_of(case.target_own_BHT, -torch.inf).gather(-1, order_BHT)
    total_B = known_BHT.new_zeros(len(known_BHT))
    for ratio in settings.keep_ratios:
        boundary_BH1 = boundary_of(count_BH1, ratio)
        kept_BH1, evicted_BH1 = _edges(ranked_BHT, boundary_BH1)
        near_BHT = (rank_BHT >= boundary_BH1 - width_BH1) & (rank_BHT < boundary_BH1 + width_BH1)
        near_BHT &= case.reached_BHT & (kept_BH1 > evicted_BH1)
        threshold_BH1 = threshold_of(case.output_BHT, case.reached_BHT, ratio)
        logit_BHT = (known_BHT - threshold_BH1) / settings.temperature
        keep_BHT = (rank_BHT < boundary_BH1).to(logit_BHT.dtype)
        each_BHT = functional.binary_cross_entropy_with_logits(logit_BHT, keep_BHT, reduction="none")
        total_B = total_B + mean_over_reached(each_BHT, near_BHT)
    return total_B / len(settings.keep_ratios)


def listwise_loss(case: Case) -> Float[Tensor, " B"]:
    """`KL(p || q) = sum_i p_i (log p_i - log q_i)`, mean over heads, with `p = target / sum target`.

    `q` is the prediction, at least 1e-6 (with the gradient there for less), divided by its sum (LookaheadKV,
    arXiv 2603.10899; of a logarithm, that is its softmax), or with `loss.listwise: softmax` the softmax of
    the output over the temperature (ListNet). A head whose targets are all 0 gives 0.
    """
    known_BHT = case.reached_of(case.output_BHT)
    if case.settings.listwise == "softmax":
        logit_BHT = known_BHT / case.settings.temperature
    else:
        logit_BHT = known_BHT if case.gate.unit == "log_risk" else held_within(known_BHT, CLAMP).log()
    # The lowest number, not -inf: a head without entries would give NaN, and its gradient too.
    log_q_BHT = case.reached_of(logit_BHT, torch.finfo(logit_BHT.dtype).min).log_softmax(-1)
    target_BHT = case.reached_of(case.target_BHT).clamp_min(0.0)
    total_BH1 = target_BHT.sum(-1, keepdim=True)
    p_BHT = target_BHT / torch.where(total_BH1 > 0, total_BH1, 1.0)
    each_BHT = torch.where(p_BHT > 0, p_BHT * (p_BHT.clamp_min(1e-38).log() - log_q_BHT), 0.0)
    return each_BHT.sum(-1).mean(-1)
