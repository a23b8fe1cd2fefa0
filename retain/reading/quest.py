"""QUEST: scores pages by an upper bound of what the query finds in them.

Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv 2406.10774; code
github.com/mit-han-lab/Quest. Of each page the largest and smallest number of every channel are held, over
keys after RoPE. Where paper and code leave open or differ:

- *Query heads.* The paper speaks of heads with keys of their own. The evaluation code repeats KV heads and
  lets each query head choose, so that a KV head may be read for each of its group apart. Here the group
  chooses together (`Reading.group`), and a KV head is read once. The maximum of bounds is a bound.
- *The last page.* The serving code always reads it and counts it in the budget; the evaluation code lets it
  compete, and reads at least 3 pages. Here it is always read.
- *The first two layers* are read whole by both, beside the budget; here they are paid for.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from retain.scores.quest import bound_of


def bounds(keys_NpD: Float[Tensor, "N p D"]) -> Float[Tensor, "N 2 D"]:
    """The largest and the smallest number of each channel, over the keys of a page."""
    return torch.stack([keys_NpD.amax(1), keys_NpD.amin(1)], dim=1)


def bound_scores(
    queries_RGD: Float[Tensor, "R G D"], bounds_RP2D: Float[Tensor, "R P 2 D"]
) -> Float[Tensor, "R G P"]:
    """The bound of each page (`retain.scores.quest.bound_of`).

    Args:
        queries_RGD: the query heads of each row, after RoPE.
        bounds_RP2D: M and m of every page (`bounds`).
    """
    return bound_of(queries_RGD, *bounds_RP2D.to(queries_RGD.dtype).unbind(2))
