"""Keeps entries by a threshold on their score, without a budget.

Each entry is judged alone: entries do not compete, nothing is shared, and protected entries never exceed a
budget. How many entries stay depends on the text. With `recent` protection (`retain.protection`) the decision
on an entry waits until it leaves the recent window.

Gates that decide at write time use this rule. KV Admission (WG-KV), arXiv 2512.17452: outside a local window
of 256 entries, an entry is stored if its gate is above 0.1. DMS, arXiv 2506.05345: an entry goes if its logit
is above 0, delayed by a window of 512; here its score is minus that logit, and the threshold 0. KVzap, arXiv
2601.07891: outside a window of 128, an entry goes if its predicted score is below a threshold.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from retain.ranking import rank_entries, refuse_nan


def admit(
    score_BHT: Float[Tensor, "B H T"], protected_BHT: Bool[Tensor, "B H T"], threshold: float
) -> Bool[Tensor, "B H T"]:
    """Keep what is protected, what scores at least the threshold, and of a head left with nothing its best.

    `keep[b, h, i] = exists[b, h, i] and (protected[b, h, i] or s[i] >= threshold)`; where that is no entry
    of a head, the first of the head in the order (score, later position). A head that holds nothing keeps
    nothing.

    Args:
        score_BHT: higher = keep; -inf where a head holds no entry (padding, or gone before); no NaN.
        protected_BHT: kept whatever the score.
        threshold: in the unit of the score; compared in the precision of the score.

    Returns:
        True where kept.

    Raises:
        ValueError: if a score is NaN.

    Example:
        >>> import torch
        >>> score = torch.tensor([[[0.3, 0.1, 0.2], [0.0, 0.05, 0.05]]])
        >>> admit(score, torch.zeros(1, 2, 3, dtype=torch.bool), 0.2).int().tolist()
        [[[1, 0, 1], [0, 0, 1]]]
    """
    refuse_nan(score_BHT)
    exists_BHT = score_BHT > float("-inf")
    keep_BHT = exists_BHT & (protected_BHT | (score_BHT >= threshold))
    empty_BH1 = ~keep_BHT.any(-1, keepdim=True)
    return keep_BHT | (empty_BH1 & exists_BHT & (rank_entries(score_BHT) == 0))
