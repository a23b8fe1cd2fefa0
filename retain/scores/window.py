"""Computes statistics of the attention from the observation window (the last `W` queries), and pools them.

Rows of attention are softmaxed over all entries and keep the window's columns (published code drops them
and pads them with huge scores instead; here protection keeps the window). Pooling treats the entries before
the window and those inside it apart, so that the window's large self-attention does not leak, as if its
columns had been dropped. Neighbours are defined by place: a gap of evicted entries stays a gap.
"""

from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import AfterValidator
from torch import Tensor

from retain.attention.received import received_attention
from retain.config import Many
from retain.evidence import Evidence
from retain.kernels.attention_stats import Pool, pool_


def _odd(size: int) -> int:
    if size % 2 == 0:
        raise ValueError(f"an odd number of entries, so that the pool is centred; got {size}")
    return size


Pooling = Literal["avg", "max"] | None
Odd = Annotated[Many, AfterValidator(_odd)]


def window_received(
    evidence: Evidence,
    window: int,
    *wanted: str,
    pool: Pooling = None,
    pool_size: int = 1,
    keep_mass: bool = False,
    group: bool = False,
) -> tuple[Tensor, ...]:
    """Statistics of the attention that the last `window` queries pay to each entry
    (`retain.attention.received`), of rows that are pooled first if a pool is named.

    Args:
        window: queries observed, at least 1.
        wanted: of `max`, `sum`, `scatter`, `entropy`; of pooled rows no `scatter`, but `plain`,
            their sum before.
        pool: smoothing of each row over neighbouring entries, as in `pool_entries`; None for none.
        keep_mass: each pooled row, before and inside the window apart, is scaled to the mass that it had
            before, and entries that a head does not hold get nothing of it.
        group: of the query heads of a KV head together.

    Returns:
        the wanted statistics, in order, `[B, Q, T]` each (`[B, H, T]` by group).

    Raises:
        ValueError: the evidence holds fewer queries.
    """
    if window > (S := evidence.num_queries):
        raise ValueError(
            f"the evidence holds the last {S} queries, the observation window needs {window}: "
            f"record more queries, or pass window={S}."
        )
    pooled = None if pool is None else Pool(pool, pool_size, evidence.num_seen - window, keep_mass)
    return received_attention(evidence, *wanted, start=S - window, pool=pooled, group=group)


def pool_entries(
    values_T: Float[Tensor, "*rows T"],
    kind: Pooling,
    size: int,
    *,
    window: int,
    place_BT: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "*rows T"]:
    """Smooth along the entries: the average or the maximum over `size` places, window and prefix apart.

    With `r = size // 2`, `p` the places and the segment (prefix or window) of entry i:
    `avg: sum_{|p_k - p_i| <= r} x[k] / size` (places outside the segment, or without an entry, count as zero:
    edges are damped, as in the released code), `max: max_{|p_k - p_i| <= r} x[k]`.

    Args:
        values_T: non-negative, zero on padding and where the head holds no entry.
        kind: `avg`, `max`, or None to leave the values alone.
        size: places, odd.
        window: the last `window` entries are pooled apart.
        place_BT: place of each entry in its sequence (the first axis of the values), ascending; None: no
            place is missing.
    """
    if kind is None:
        return values_T
    split, pooled_T = values_T.shape[-1] - window, torch.zeros_like(values_T)
    for side in (slice(0, split), slice(split, None)):
        place = None if place_BT is None else place_BT[:, side]
        pool_(pooled_T[..., side], values_T[..., side], kind, size, place)
    return pooled_T


def pool_group(
    values_BQT: Float[Tensor, "B Q T"],
    evidence: Evidence,
    window: int,
    pool: Pooling,
    pool_size: int,
) -> Float[Tensor, "B H T"]:
    """Pool each query head along the entries, and take the mean over the group."""
    pooled = pool_entries(values_BQT, pool, pool_size, window=window, place_BT=evidence.place_BT)
    return group_heads(pooled, evidence.num_heads).mean(2)


def group_heads(values_BQT: Float[Tensor, "B Q *rest"], num_heads: int) -> Float[Tensor, "B H G *rest"]:
    """Group query heads by KV head: `[B, Q, ...] -> [B, H, G, ...]` (a view)."""
    return values_BQT.unflatten(1, (num_heads, -1))
