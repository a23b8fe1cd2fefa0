"""Quest: scores pages of entries by an upper bound of the current query's logits.

Quest itself evicts nothing: it keeps every entry and loads the best pages anew for each query. Here its page
score ranks entries for eviction, so a comparison is one of its estimate only. A page is `page_size`
consecutive places of the sequence: an entry stays in its page whatever is evicted around it, and a page's
bounds are those of its remaining entries.
"""

import torch
from torch import Tensor

from retain.config import Many
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.window import group_heads


@family(
    "rank",
    needs=("window",),
    reads=("keys",),
    paper="Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv 2406.10774",
)
def quest(evidence: Evidence, *, page_size: Many = 16) -> Score:
    """Score by the upper bound, over a page, of the last query's product with a key.

    `u_q[page] = sum_d max(q_d * max_{i in page} k_i[d], q_d * min_{i in page} k_i[d])`, so that
    `u_q[page] >= q . k_i` for every entry of the page; `score[i] = max_{q in group(h)} u_q[page(i)]`. What
    merges add to logits is not counted.

    A cap on logits and a sink logit change no order, so they are not read.

    Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv 2406.10774, which speaks of
    one query head a KV head. The maximum over a group is still a bound; a mean of bounds bounds nothing.

    Args:
        evidence: the layer; only its last query is read.
        page_size: consecutive entries of a page. The last page may be shorter.

    Returns:
        score in `rank`: a logit without its scaling, equal within a page (ties go to the later position).
    """
    exists_BHT, keys_BHTD = evidence.exists_BHT, evidence.keys_BHTD
    B, H, T, _ = keys_BHTD.shape
    dtype = torch.promote_types(keys_BHTD.dtype, torch.float32)
    page_BT, low, high = _pages(evidence, page_size)
    low, high = low.to(dtype), high.to(dtype)

    query_BHGD = group_heads(evidence.queries_BQSD[:, :, -1].to(dtype), H)
    highest, lowest = high.transpose(-1, -2), low.transpose(-1, -2)
    upper = query_BHGD.clamp(min=0) @ highest + query_BHGD.clamp(max=0) @ lowest
    score_BHT = upper.amax(2).gather(2, page_BT[:, None].expand(B, H, T))
    return masked_score(score_BHT, exists_BHT, "rank")


def _pages(evidence: Evidence, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Page of each entry, and least and largest coordinates of each page's keys; pages that no head holds are
    not counted."""
    keys_BHTD, exists_BHT1 = evidence.keys_BHTD, evidence.exists_BHT[..., None]
    B, H, T, D = keys_BHTD.shape
    number_BT = evidence.places_BT // page_size
    fresh_BT = torch.ones_like(evidence.valid_BT)
    fresh_BT[:, 1:] = number_BT[:, 1:] != number_BT[:, :-1]
    page_BT = fresh_BT.cumsum(-1) - 1
    into_BHTD = page_BT[:, None, :, None].expand(B, H, T, D)
    low, high = (
        keys_BHTD.new_full((B, H, int(page_BT.max()) + 1, D), end).scatter_reduce_(
            2, into_BHTD, keys_BHTD.masked_fill(~exists_BHT1, end), reduce
        )
        for end, reduce in ((float("inf"), "amin"), (float("-inf"), "amax"))
    )
    # A page that this head holds nothing of bounds nothing, and infinities would make NaN of it.
    return page_BT, low.masked_fill(low == float("inf"), 0.0), high.masked_fill(high == float("-inf"), 0.0)
