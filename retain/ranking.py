"""One order for the whole project: the higher score first, and of equal scores the LATER position first.

In: scores whose last axis is the position. Out: the rank of each entry, 0 for the one to keep first. The
decision taken here is the tie: `torch.topk` leaves it open (and devices differ), floors and padding make ties
common, and a stable sort of the reversed row settles it once, alike on every backend. Fusion, budgets and
selection all rank through this file.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def order_entries(score_BHT: Float[Tensor, "*rows T"]) -> Int64[Tensor, "*rows T"]:
    """Entries of each row in the order of the project: index of the best first.

    Args:
        score_BHT: scores, higher = keep; any leading axes; -inf is allowed and comes last. NaN is not
            allowed.
    """
    last = score_BHT.shape[-1] - 1
    return last - score_BHT.flip(-1).sort(dim=-1, descending=True, stable=True).indices


def rank_entries(score_BHT: Float[Tensor, "*rows T"]) -> Int64[Tensor, "*rows T"]:
    """Rank of each entry in its row: `rank[i] = #{k: s[k] > s[i]} + #{k > i: s[k] == s[i]}`.

    Args:
        score_BHT: as in `order_entries`.

    Returns:
        ranks 0..T-1, each once a row.
    """
    order = order_entries(score_BHT)
    place = torch.arange(score_BHT.shape[-1], device=score_BHT.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def rank_kept_first(
    score_BHT: Float[Tensor, "B H T"], kept_BHT: Bool[Tensor, "B H T"]
) -> Int64[Tensor, "B H T"]:
    """Rank of each entry in its head, those to be kept in any case before all others, whatever the scores.

    Args:
        score_BHT: as in `order_entries`.
        kept_BHT: in order of position among themselves.
    """
    kept = kept_BHT.long()
    rest_rank = rank_entries(score_BHT.masked_fill(kept_BHT, float("-inf")))
    return torch.where(kept_BHT, kept.cumsum(-1) - 1, rest_rank + kept.sum(-1, keepdim=True))


def refuse_nan(score_BHT: Float[Tensor, "B H T"]) -> None:
    """Raise where a score is not a number, which no order could place.

    Raises:
        ValueError: names the first such entry.
    """
    if score_BHT.isnan().any():
        b, h, i = score_BHT.isnan().nonzero()[0].tolist()
        raise ValueError(
            f"the score of sequence {b}, head {h}, entry {i} is NaN: check that the model's keys, values and "
            "hidden states are finite (its weights, its precision), and, where gates score, their weights."
        )
