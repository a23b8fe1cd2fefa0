"""Ranks entries: higher score first, and of equal scores the LATER position first.

`torch.topk` leaves ties open (and devices differ); floors and padding make ties common. A stable sort of the
reversed row settles them alike on every backend. Fusion, budgets and selection all rank with this file.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def order_entries(score_BHT: Float[Tensor, "*rows T"]) -> Int64[Tensor, "*rows T"]:
    """Sort the entries of each row: indices, best first.

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
    """Rank the entries of each head, with entries that are kept in any case before all others.

    Args:
        score_BHT: as in `order_entries`.
        kept_BHT: in order of position among themselves.
    """
    kept = kept_BHT.long()
    rest_rank = rank_entries(score_BHT.masked_fill(kept_BHT, float("-inf")))
    return torch.where(kept_BHT, kept.cumsum(-1) - 1, rest_rank + kept.sum(-1, keepdim=True))


def refuse_nan(score_BHT: Float[Tensor, "B H T"]) -> None:
    """Refuse scores that hold NaN.

    Raises:
        ValueError: names the first such entry.
    """
    if score_BHT.isnan().any():
        b, h, i = score_BHT.isnan().nonzero()[0].tolist()
        raise ValueError(
            f"the score of sequence {b}, head {h}, entry {i} is NaN: check that the model's keys, values and "
            "hidden states are finite (its weights, its precision), and, where gates score, their weights."
        )
