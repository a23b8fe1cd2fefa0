"""Ranks the entries of each head, and keeps the first: by a budget (`select`), or by a threshold (`admit`).

Higher scores come first, and of equal scores the LATER position. `torch.topk` leaves ties open (and devices
differ); floors and padding make ties common. A stable sort of the reversed row settles them alike on every
backend. No head is left empty that has entries.

Under a threshold each entry is judged alone: nothing is shared, and protected entries never exceed a budget.
With `recent` protection the decision on an entry waits until it leaves the recent window. This is the rule of
gates that decide at write time: WG-KV (arXiv 2512.17452) stores an entry whose gate is above 0.1, outside a
window of 256; DMS (arXiv 2506.05345) drops one whose logit is above 0, behind 512 (here its score is minus
that logit); KVzap (arXiv 2601.07891) one whose score is below a threshold, behind 128.
"""

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor


def order_entries(score_BHT: Float[Tensor, "*rows T"]) -> Int64[Tensor, "*rows T"]:
    """Sort the entries of each row: indices, best first.

    Args:
        score_BHT: scores, higher = keep; any leading axes; -inf comes last, and NaN is not allowed.
    """
    last = score_BHT.shape[-1] - 1
    return last - score_BHT.flip(-1).sort(dim=-1, descending=True, stable=True).indices


def rank_entries(score_BHT: Float[Tensor, "*rows T"]) -> Int64[Tensor, "*rows T"]:
    """Rank of each entry in its row, 0..T-1: `rank[i] = #{k: s[k] > s[i]} + #{k > i: s[k] == s[i]}`."""
    order = order_entries(score_BHT)
    place = torch.arange(score_BHT.shape[-1], device=score_BHT.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def rank_kept_first(
    score_BHT: Float[Tensor, "B H T"], kept_BHT: Bool[Tensor, "B H T"]
) -> Int64[Tensor, "B H T"]:
    """Rank the entries of each head, with those of `kept_BHT` before all others, in order of position."""
    kept = kept_BHT.long()
    rest_rank = rank_entries(score_BHT.masked_fill(kept_BHT, float("-inf")))
    return torch.where(kept_BHT, kept.cumsum(-1) - 1, rest_rank + kept.sum(-1, keepdim=True))


def refuse_nan(score_BHT: Float[Tensor, "B H T"]) -> None:
    """Refuse scores that hold NaN: a ValueError that names the first such entry."""
    if score_BHT.isnan().any():
        b, h, i = score_BHT.isnan().nonzero()[0].tolist()
        raise ValueError(
            f"the score of sequence {b}, head {h}, entry {i} is NaN: check that the model's keys, values and "
            "hidden states are finite (its weights, its precision), and, where gates score, their weights."
        )


def select(
    score_BHT: Float32[Tensor, "B H T"], protected_BHT: Bool[Tensor, "B H T"], budget_BH: Int64[Tensor, "B H"]
) -> Bool[Tensor, "B H T"]:
    """Keep the first `budget` entries of each head in the order (protected, score, later position).

    `keep[b, h, i] = protected[b, h, i] or #{k unprotected: s[k] > s[i], or s[k] == s[i] and k > i} < budget -
    #protected`

    Args:
        score_BHT: higher = keep; -inf where a head holds no entry, and nowhere else; no NaN.
        protected_BHT: kept whatever the score.
        budget_BH: entries to keep, protected ones included.

    Raises:
        ValueError: if a score is NaN.
    """
    refuse_nan(score_BHT)
    assert (protected_BHT.sum(-1) <= budget_BH).all(), "a budget holds what is protected"
    return rank_kept_first(score_BHT, protected_BHT) < budget_BH[..., None]


def admit(
    score_BHT: Float[Tensor, "B H T"], protected_BHT: Bool[Tensor, "B H T"], threshold: float
) -> Bool[Tensor, "B H T"]:
    """Keep protected entries, those that score at least the threshold, and of a head left with nothing its
    best.

    `keep[b, h, i] = exists[b, h, i] and (protected[b, h, i] or s[i] >= threshold)`; where that is no entry of
    a head, the first of the head in the order (score, later position).

    Args:
        score_BHT: higher = keep; -inf where a head holds no entry; no NaN.
        protected_BHT: kept whatever the score.
        threshold: in the unit of the score; compared in the precision of the score.

    Examples:
        >>> score = torch.tensor([[[0.3, 0.1, 0.2], [0.0, 0.05, 0.05]]])
        >>> admit(score, torch.zeros(1, 2, 3, dtype=torch.bool), 0.2).int().tolist()
        [[[1, 0, 1], [0, 0, 1]]]
    """
    refuse_nan(score_BHT)
    exists_BHT = score_BHT > float("-inf")
    keep_BHT = exists_BHT & (protected_BHT | (score_BHT >= threshold))
    empty_BH1 = ~keep_BHT.any(-1, keepdim=True)
    return keep_BHT | (empty_BH1 & exists_BHT & (rank_entries(score_BHT) == 0))
