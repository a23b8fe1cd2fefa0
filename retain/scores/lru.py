"""LRU: the entry that was last used longest ago goes first.

In: every query of a layer, or the last accesses that a cache kept while it saw them. Out: a score in `rank`,
the place of the last access. Two decisions are taken here. What an access is: attention above a share of what
an indifferent query would pay, since softmax pays everybody something. And that coming into the cache is the
first access, as in any LRU, so that an entry which nobody attends to is as old as itself.
"""

import torch
from jaxtyping import Int64
from torch import Tensor

from retain.attention_chunks import attention_chunks
from retain.evidence import Evidence
from retain.scores.score import Score, masked_score
from retain.scores.window import group_heads

# Softmax over equal logits is 1/n only up to rounding; an indifferent query must count the same on every
# backend and under any padding.
ROUNDING = 1e-5


def lru(evidence: Evidence, *, share: int | float = 1.0, chunk: int = 128) -> Score:
    """Place in its sequence of the last query that accessed the entry.

    `score[i] = max({i} | {j >= i: max_{q in group(h)} a_qj[i] >= share / n_j})`, where `n_j` is the number of
    entries that query j sees, so that `share = 1` asks for at least what uniform attention would pay. Both
    ends are recency: with `share = 0` every query accesses all that it sees, all entries tie, and ties go to
    the later position; with a share that nobody reaches, each entry is as old as itself.

    In a layer with a sink logit, which takes part in the softmax and pays for nothing, an indifferent query
    pays each entry less than `1 / n_j`: what is asked for is still that share of 1, so that at `share = 1` a
    query whose sink takes most may access nothing. Pass a smaller share there.

    LRU is the classical rule of caches; no paper. One published comparison's LRU breaks its ties by the
    position's decimal *string* and so keeps neither the beginning nor the end: numbers made with it are not
    comparable with this one.

    Args:
        evidence: the layer, with `running`, or with S == T queries. A cache that kept `running` decided what
            an access is while it did so; `share` is then not read.
        share: of 1 / n_j, at least 0.
        chunk: queries at a time; changes memory, not the result.

    Returns:
        score in `rank`, counted from the sequence's first entry, exact in float32 up to 2**24.

    Raises:
        ValueError: if the share is negative, or the evidence has neither running statistics nor every query.
    """
    if not share >= 0:
        raise ValueError(f"lru share is a multiple of uniform attention, at least 0; got {share}.")
    if evidence.running is None:
        last_BHT = last_access(evidence, share=share, chunk=chunk)
    else:
        last_BHT = evidence.running.last_access_BHT
    num_padded_B = (~evidence.valid_BT).sum(-1)
    return masked_score((last_BHT - num_padded_B[:, None, None]).float(), evidence.valid_BT, "rank")


def last_access(evidence: Evidence, *, share: int | float = 1.0, chunk: int = 128) -> Int64[Tensor, "B H T"]:
    """Entry index of the last query that accessed each entry: what `Running.last_access_BHT` holds.

    Args:
        evidence: the layer, with S == T queries.
        share: as in `lru`.
        chunk: queries at a time.

    Raises:
        ValueError: if the evidence does not hold every query.
    """
    T, S = evidence.num_seen, evidence.num_queries
    if S != T:
        raise ValueError(
            f"lru asks every query what it accessed, but the evidence holds the last {S} of {T} and no "
            "running statistics: record all queries at prefill, keep running.last_access_BHT, or use a "
            "window score such as snapkv."
        )
    valid_BT = evidence.valid_BT
    entry_T = torch.arange(T, device=valid_BT.device)
    last_BHT = entry_T.expand(*evidence.keys_BHTD.shape[:3]).clone()
    for start, probs in attention_chunks(evidence, chunk):
        stop = start + probs.shape[2]
        own_s1 = entry_T[start:stop, None]
        seen_sK = entry_T[:stop] <= own_s1
        if evidence.window is not None:
            seen_sK = seen_sK & (entry_T[:stop] > own_s1 - evidence.window)
        seen_BsK = seen_sK & valid_BT[:, None, :stop]
        least_BsK = (share * (1 - ROUNDING) / seen_BsK.sum(-1, keepdim=True).clamp_min(1)).to(probs.dtype)
        most_BHsK = group_heads(probs, evidence.num_heads).amax(2)
        accessed_BHsK = (most_BHsK >= least_BsK[:, None]) & seen_BsK[:, None]
        when_BHK = torch.where(accessed_BHsK, own_s1, -1).amax(2)
        last_BHT[..., :stop] = torch.maximum(last_BHT[..., :stop], when_BHK)
    return last_BHT
