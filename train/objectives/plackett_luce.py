"""Draws keep sets without replacement by Gumbel top-k, and computes the log-probability of what was drawn.

`k` entries drawn one after another, each among those that are left and in proportion to `exp(z)`, are the `k`
largest of `z + noise` with standard Gumbel noise, in that order (Stochastic Beams and Where to Find Them,
arXiv 1903.06059). The order's probability is that of Plackett and Luce.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.train.objectives.case import keyed_generator

# Stands for a logit that is never drawn: its exponential is 0 in float32, and it has a gradient of 0.
NEVER = -1e30


def gumbel_noise(key: tuple[int, ...], shape: Sequence[int]) -> Float[Tensor, "..."]:
    """Standard Gumbel numbers `-log(-log u)`, float32 on the CPU, a function of the key alone."""
    draw = torch.rand(tuple(shape), generator=keyed_generator(key), dtype=torch.float64)
    return -(-draw.clamp(1e-12, 1 - 1e-12).log()).log().float()


def log_probability(
    logits_KgN: Float[Tensor, "K groups N"],
    perturbed_KgN: Float[Tensor, "K groups N"],
    drawn_KgN: Bool[Tensor, "K groups N"],
    candidates_KgN: Bool[Tensor, "K groups N"],
) -> Float[Tensor, " K"]:
    """Log-probability of each ordered sample, summed over the groups that are drawn from on their own.

        log p = sum_g sum_{r < k_g} ( z_{i_r} - log sum_{r' >= r} exp(z_{i_r'}) )

    with `i_0, i_1, ...` the candidates of group `g` in falling order of `z + noise`, the first `k_g` of which
    were drawn.

    Args:
        logits_KgN: `z` of K samples, some groups and N entries, with their graph.
        perturbed_KgN: `z + noise`; only its order is read.
        drawn_KgN: which were drawn: the first of the candidates in that order.
        candidates_KgN: which could be drawn.
    """
    order_KgN = perturbed_KgN.detach().masked_fill(~candidates_KgN, NEVER).argsort(-1, descending=True)
    z_KgN = logits_KgN.masked_fill(~candidates_KgN, NEVER).gather(-1, order_KgN)
    left_KgN = z_KgN.flip(-1).logcumsumexp(-1).flip(-1)
    drawn_KgN = drawn_KgN.gather(-1, order_KgN)
    return (z_KgN - left_KgN).masked_fill(~drawn_KgN, 0.0).sum((-1, -2))


def against_the_others(reward_K: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    """Each reward less the mean of the other samples' of the same document: a baseline that leaves the
    gradient's expectation as it is (Buy 4 REINFORCE Samples, Get a Baseline for Free!, Kool et al. 2019).

    Args:
        reward_K: of at least two samples.
    """
    K = len(reward_K)
    return (reward_K - reward_K.mean()) * (K / (K - 1))
