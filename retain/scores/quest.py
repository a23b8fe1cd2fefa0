"""Quest: how large a logit the current query could find in a page of entries, from the page's bounds alone.

In: the last query and the keys. Out: a score in `rank`, one number a page, given to each of its entries.
Quest evicts nothing: it keeps every entry and loads the best pages anew for each query. Here its page score
ranks entries for eviction, which is a different thing; a comparison with the published method is a comparison
of its estimate, not of what it does with it. Pages are counted from the sequence's first entry, not from its
padding.
"""

import torch

from retain.evidence import Evidence
from retain.scores.score import Score, masked_score
from retain.scores.window import group_heads


def quest(evidence: Evidence, *, page_size: int = 16, group: str = "max") -> Score:
    """Upper bound, over a page, of the last query's product with a key.

    `u_q[page] = sum_d max(q_d * max_{i in page} k_i[d], q_d * min_{i in page} k_i[d])`, so that
    `u_q[page] >= q . k_i` for every entry of the page; `max: score[i] = max_{q in group(h)} u_q[page(i)]`,
    `mean` their mean.

    In a layer whose queries see a sliding window, entries that the next query no longer sees (all but the
    last `window - 1`) come after all others, whatever their page. A cap on logits and a sink logit change no
    order, so they are not read.

    Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv 2406.10774, which speaks of
    one query head a KV head. `max` is the default because the maximum is still a bound, on what any query
    head of the group could find there, and a mean of bounds bounds nothing; an entry is kept or evicted for
    the whole group.

    Args:
        evidence: the layer; only its last query is read.
        page_size: consecutive entries of a page, at least 1. The last page may be shorter.
        group: how the query heads that share a KV head agree.

    Returns:
        score in `rank`: a logit without its scaling, equal within a page (ties go to the later position);
        below the head's lowest for what is no longer seen.

    Raises:
        ValueError: if the page size or the group is not one of these.
    """
    if page_size < 1:
        raise ValueError(f"quest page_size is at least 1 entry; got {page_size}.")
    if group not in ("max", "mean"):
        raise ValueError(f"quest group is 'max' or 'mean'; got {group!r}.")
    valid_BT, keys_BHTD = evidence.valid_BT, evidence.keys_BHTD
    (B, T), (H, D) = valid_BT.shape, (evidence.num_heads, keys_BHTD.shape[-1])
    dtype = torch.promote_types(keys_BHTD.dtype, torch.float32)
    num_pages = -(-T // page_size)

    # Each sequence from its first own entry on. What would lie beyond the end repeats the last entry, which
    # changes no bound of its page; pages wholly beyond it are nobody's.
    source_BN = torch.arange(num_pages * page_size, device=valid_BT.device) + (~valid_BT).sum(
        -1, keepdim=True
    )
    source_BHND = source_BN.clamp_max(T - 1)[:, None, :, None].expand(B, H, -1, D)
    pages = keys_BHTD.gather(2, source_BHND).unflatten(2, (num_pages, page_size))
    low, high = pages.amin(3).to(dtype), pages.amax(3).to(dtype)

    query_BHGD = group_heads(evidence.queries_BQSD[:, :, -1].to(dtype), H)
    upper = query_BHGD.clamp_min(0) @ high.transpose(-1, -2) + query_BHGD.clamp_max(0) @ low.transpose(-1, -2)
    page_score = upper.amax(2) if group == "max" else upper.mean(2)
    page_BT = ((valid_BT.cumsum(-1) - 1).clamp_min(0) // page_size)[:, None].expand(B, H, T)
    score_BHT = page_score.gather(2, page_BT)
    if evidence.window is not None:
        lowest_BH1 = page_score.amin(-1, keepdim=True)
        gone_T = torch.arange(T, device=valid_BT.device) <= T - evidence.window
        score_BHT = torch.where(gone_T, lowest_BH1 - lowest_BH1.abs() - 1, score_BHT)
    return masked_score(score_BHT, valid_BT, "rank")
