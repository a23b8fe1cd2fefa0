"""Running statistics: what every query so far has paid to each entry, and when it was last used.

In: evidence, and the statistics of the queries before those that it holds. Out: the statistics with its
queries folded in, a few at a time. The decision taken here: this is the only place that counts, so that what
a cache counts while it reads and decodes and what the scores `h2o` and `lru` count from all queries at once
are the same numbers. A query pays what it would pay to the entries that are held now.
"""

import torch
from torch import Tensor

from retain.attention_chunks import attention_chunks
from retain.evidence import Evidence, Running, visible

# Softmax over equal logits is 1/n only up to rounding; an indifferent query must count the same on every
# backend and under any padding.
ROUNDING = 1e-5


def advance(
    evidence: Evidence, running: Running | None = None, chunk: int = 128, *, share: int | float = 1.0
) -> Running:
    """Fold the S held queries into the statistics of the queries before them.

    `mass[h, i] += mean_{q in group(h)} sum_j a_qj[i]`;
    `last[h, i] = max(last[h, i], place(i), {place(j) | max_{q in group(h)} a_qj[i] >= share / n_j})`, where
    `n_j` is the number of entries that query j sees in head h.

    Args:
        evidence: the layer.
        running: statistics of all queries before the held ones, over the same entries; of an entry that came
            after those, a mass of 0 and any place not above its own. None: there were no queries before.
        chunk: queries at a time; changes memory, not the result.
        share: of what an indifferent query would pay, from which on it is an access, at least 0.

    Returns:
        statistics in float32 (float64 if the evidence is float64) and places in int64; what they say of
            entries that a head does not hold means nothing.
    """
    valid_BT, T, S, H = evidence.valid_BT, evidence.num_seen, evidence.num_queries, evidence.num_heads
    place_BT = evidence.places_BT
    own_BHT = place_BT[:, None].expand(-1, H, -1)
    if running is None:
        dtype = torch.promote_types(evidence.keys_BHTD.dtype, torch.float32)
        mass_BHT = torch.zeros(own_BHT.shape, dtype=dtype, device=valid_BT.device)
        last_BHT = own_BHT.clone()
    else:
        mass_BHT = running.mass_BHT.clone()
        last_BHT = torch.maximum(running.last_access_BHT, own_BHT)
    for start, probs in attention_chunks(evidence, chunk, first=T - S):
        # The chunk's queries are consecutive entries, and so are those that they may see.
        stop = start + probs.shape[2]
        paid_BHGsK = probs.unflatten(1, (H, -1))
        mass_BHT[..., :stop] += paid_BHGsK.sum(3).mean(2)
        when_BHK = _last_access(evidence, paid_BHGsK.amax(2), start, share)
        last_BHT[..., :stop] = torch.maximum(last_BHT[..., :stop], when_BHK)
    return Running(mass_BHT, last_BHT)


def _last_access(evidence: Evidence, most_BHsK: Tensor, start: int, share: int | float) -> Tensor:
    """Place of the last of the queries at entries `start..start+s` that accessed an entry; -1 for none."""
    s, K = most_BHsK.shape[2:]
    first = start - (evidence.num_seen - evidence.num_queries)
    seen_BHsK = visible(evidence, first, first + s)[..., :K]
    least_BHs1 = share * (1 - ROUNDING) / seen_BHsK.sum(-1, keepdim=True).clamp_min(1)
    accessed_BHsK = (most_BHsK >= least_BHs1.to(most_BHsK.dtype)) & seen_BHsK
    place_Bs = evidence.places_BT[:, start : start + s]
    return torch.where(accessed_BHsK, place_Bs[:, None, :, None], -1).amax(2)
