"""MPCache's dynamic selection: one product a cluster of tokens, coarse clusters before the fine ones in them.

MPCache: MPC-Friendly KV Cache Eviction for Efficient Private LLM Inference, arXiv 2501.06807; code
github.com/zwxandy/MPCache. The paper's own text could not be read: formulas are those of the code, its README
and a summary of the paper. The bound of QUEST is made linear, so that a cluster is one vector. Left out or
different here:

- The *static eviction* after the prompt, whose thresholds are set by hand for each data set: this regime
  holds everything.
- *Neighbouring layers that share their choice*, which the released code does not have either.
- The code keeps `int(0.5 P)` coarse clusters, then `int(r P)` fine ones, each beside the first and last
  cluster; it has a KV head for every query head. Here the budget says how many fine clusters are read, the
  first and last among them (`Reading.sinks`, `recent`), and a group chooses together.
- The code fills the last cluster up with tokens of its end; here it is always read.
"""

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.reading.page_index import PageIndex


def mixed(keys_NpD: Float[Tensor, "N p D"], alpha: float) -> Float[Tensor, "N 1 D"]:
    """`alpha * max_i k_i[d] + (1 - alpha) * min_i k_i[d]`, over the keys of a cluster."""
    return (alpha * keys_NpD.amax(1) + (1 - alpha) * keys_NpD.amin(1))[:, None]


def clusters(page: int, alpha: float) -> PageIndex:
    """An index of such vectors, for clusters of so many tokens."""
    return PageIndex(page, partial(mixed, alpha=alpha))


def mixed_scores(
    queries_RGD: Float[Tensor, "R G D"], mixed_RP1D: Float[Tensor, "R P 1 D"]
) -> Float[Tensor, "R G P"]:
    """`s[g, p] = q_g . (alpha M_p + (1 - alpha) m_p)`, with M and m the largest and smallest numbers of the
    cluster's keys.

    Args:
        queries_RGD: the query heads of each row, after RoPE.
        mixed_RP1D: the vector of every cluster (`mixed`).
    """
    return queries_RGD @ mixed_RP1D[:, :, 0].transpose(1, 2).to(queries_RGD.dtype)


def inside(score_RP: Float[Tensor, "R P"], kept_RC: Bool[Tensor, "R C"], each: int) -> Float[Tensor, "R P"]:
    """Scores of fine clusters, -inf outside the coarse ones that are kept.

    Args:
        kept_RC: coarse clusters of `each` fine ones.
    """
    kept_RP = kept_RC.repeat_interleave(each, dim=1)[:, : score_RP.shape[1]]
    return torch.where(kept_RP, score_RP, float("-inf"))
