"""Accumulates the attention that each entry received from all queries so far, and its last access.

A cache while it reads and decodes and the scores `h2o` and `lru` from all queries at once use this one
function, so their numbers agree. A query counts with its attention over the entries that are held now.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from retain.attention.received import received_attention
from retain.evidence import Evidence, RunningStatistics

# Softmax over equal logits is 1/n only up to rounding; an indifferent query must count the same on every
# backend and under any padding.
ROUNDING = 1e-5


def advance(
    evidence: Evidence,
    running: RunningStatistics | None = None,
    chunk: int | None = None,
    *,
    share: int | float = 1.0,
) -> RunningStatistics:
    """Fold the S held queries into the statistics of the queries before them.

    `mass[h, i] += mean_{q in group(h)} sum_j a_qj[i]`;
    `last[h, i] = max(last[h, i], place(i), {place(j) | max_{q in group(h)} a_qj[i] >= share / n_j})`, where
    `n_j` is the number of entries that query j sees in head h.

    Args:
        running: statistics of all queries before the held ones, over the same entries; of an entry that came
            after those, a mass of 0 and any place not above its own. None: there were no queries before.
        chunk: queries at a time; changes memory, not the result. None: as many as are quick.
        share: of uniform attention, from which on a query counts as an access, at least 0.

    Returns:
        statistics in float32 (float64 if the evidence is float64) and places in int64; undefined for entries
            that a head does not hold.
    """
    place_BT = evidence.places_BT
    own_BHT = place_BT[:, None].expand(-1, evidence.num_heads, -1)
    least_BQS = share * (1 - ROUNDING) / _entries_seen(evidence).clamp_min(1)
    sum_BHT, entry_BHT = received_attention(
        evidence, "sum", "last", least_BQs=least_BQS, group=True, chunk=chunk
    )
    mass_BHT, last_BHT = sum_BHT / evidence.group, _places_of(entry_BHT, place_BT)
    if running is None:
        return RunningStatistics(mass_BHT, torch.maximum(last_BHT, own_BHT))
    known_BHT = torch.maximum(running.last_access_BHT, own_BHT)
    return RunningStatistics(running.mass_BHT + mass_BHT, torch.maximum(known_BHT, last_BHT))


def _places_of(entry_BHT: Int[Tensor, "B H T"], place_BT: Int[Tensor, "B T"]) -> Int[Tensor, "B H T"]:
    """Places of the queries at these entries; -1 stays (places ascend, so the last query has the last)."""
    place_BHT = place_BT[:, None].expand_as(entry_BHT).gather(-1, entry_BHT.clamp_min(0))
    return place_BHT.masked_fill(entry_BHT < 0, -1)


def _entries_seen(evidence: Evidence) -> Int[Tensor, "B Q S"]:
    """Number of entries that each query sees: those of its head up to its own, within the window if there is
    one."""
    T, S = evidence.num_seen, evidence.num_queries
    exists_BHT = evidence.valid_BT[:, None] if evidence.held_BHT is None else evidence.exists_BHT
    heads = exists_BHT.shape[1]
    before_BHT1 = torch.nn.functional.pad(exists_BHT.cumsum(-1), (1, 0))
    own_S = torch.arange(T - S, T, device=exists_BHT.device)
    seen_BHS = before_BHT1[..., own_S + 1]
    if evidence.window is not None:
        if evidence.place_BT is None:
            first_BS = (own_S + 1 - evidence.window).clamp_min(0).expand(len(exists_BHT), -1)
        else:
            # Places ascend over a sequence's own entries; what padding has means nothing.
            place_BT = evidence.place_BT.masked_fill(~evidence.valid_BT, -1).cummax(-1).values
            far_BS = place_BT[:, T - S :] - evidence.window
            first_BS = torch.searchsorted(place_BT, far_BS, right=True)
        seen_BHS = seen_BHS - before_BHT1.gather(-1, first_BS[:, None].expand(-1, heads, -1))
    return seen_BHS.expand(-1, evidence.num_heads, -1).repeat_interleave(evidence.group, dim=1)
