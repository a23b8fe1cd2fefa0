"""Computes statistics of the attention from the observation window (the last `W` queries), and pools them.

Rows of attention are softmaxed over all entries and keep the window's columns (published code drops them
and pads them with huge scores instead; here protection keeps the window). Pooling treats the entries before
the window and those inside it apart, so that the window's large self-attention does not leak, as if its
columns had been dropped. Neighbours are defined by place: a gap of evicted entries stays a gap.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import max_pool1d

from retain.attention.received import received_attention
from retain.evidence import Evidence
from retain.kernels.attention_stats import Pool
from retain.process.registry import check_choice


def window_received(
    evidence: Evidence,
    window: int,
    *wanted: str,
    pool: str | None = None,
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
        ValueError: if a sequence is shorter than the window, the evidence holds fewer queries of it, or the
            pool is unknown.
    """
    _check_window(evidence, window)
    pooled = None
    if pool is not None:
        _check_pool(pool, pool_size)
        pooled = Pool(pool, pool_size, evidence.num_seen - window, keep_mass)
    start = evidence.num_queries - window
    return received_attention(evidence, *wanted, start=start, pool=pooled, group=group)


def _check_window(evidence: Evidence, window: int) -> None:
    """Refuse a window that some sequence does not fill. Waits for the device; asked once a score."""
    if window < 1:
        raise ValueError(f"the observation window is at least 1 query; got {window}.")
    S = evidence.num_queries
    counts = [evidence.valid_BT.sum(-1)]
    if evidence.queried_BS is not None:
        counts.append(evidence.queried_BS[:, max(0, S - window) :].sum(-1))
    lengths, *queried = torch.stack(counts).tolist()
    for row, length in enumerate(lengths):
        if length < window:
            raise ValueError(
                f"sequence {row} of {len(lengths)} has {length} tokens, which is shorter than the "
                f"observation window of {window}: pass a smaller window, or keep this sequence whole."
            )
    if window > S:
        raise ValueError(
            f"the evidence holds the last {S} queries, the observation window needs {window}: "
            f"record more queries, or pass window={S}."
        )
    if queried and (number := min(queried[0])) < window:
        raise ValueError(
            f"the evidence holds the last {number} queries of a sequence, the observation window needs "
            f"{window}: keep more queries, or pass window={number}."
        )


def pool_entries(
    values_T: Float[Tensor, "*rows T"],
    kind: str | None,
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

    Raises:
        ValueError: for another kind, or an even size.
    """
    if kind is None:
        return values_T
    _check_pool(kind, size)
    split = values_T.shape[-1] - window
    pooled_T = torch.zeros_like(values_T)
    for segment in (slice(0, split), slice(split, None)):
        part, pooled = values_T[..., segment], pooled_T[..., segment]
        num_entries = part.shape[-1]
        if not num_entries:
            continue
        if place_BT is not None:
            _pool_places_(pooled, part, kind, size // 2, place_BT[:, segment])
        elif kind == "max":
            rows = part.reshape(-1, 1, num_entries)
            pooled.copy_(max_pool1d(rows, size, stride=1, padding=size // 2).view(part.shape))
        else:
            # avg_pool1d makes these sums in the same order, several times slower.
            for here, other in _shifted(num_entries, size // 2):
                pooled[..., here] += part[..., other]
    return pooled_T.div_(size) if kind == "avg" else pooled_T


def pool_group(
    values_BQT: Float[Tensor, "B Q T"],
    evidence: Evidence,
    window: int,
    pool: str | None,
    pool_size: int,
) -> Float[Tensor, "B H T"]:
    """Pool each query head along the entries, and take the mean over the group."""
    pooled = pool_entries(values_BQT, pool, pool_size, window=window, place_BT=evidence.place_BT)
    return group_heads(pooled, evidence.num_heads).mean(2)


def _check_pool(kind: str, size: int) -> None:
    check_choice("pool", kind, ("avg", "max", None))
    if size < 1 or size % 2 == 0:
        raise ValueError(f"pool_size is an odd number of entries, so that the pool is centred; got {size}.")


def _pool_places_(pooled_T: Tensor, part_T: Tensor, kind: str, reach: int, place_BT: Tensor) -> None:
    """Sum, or take the largest, over neighbours at most `reach` places away."""
    between = [1] * (part_T.dim() - 2)
    # Places ascend, so that nothing near is more columns away than places.
    for here, other in _shifted(part_T.shape[-1], reach):
        near_Bt = (place_BT[:, other] - place_BT[:, here]).abs() <= reach
        near = near_Bt.to(part_T.dtype).unflatten(0, (-1, *between))
        if kind == "avg":
            pooled_T[..., here].addcmul_(part_T[..., other], near)
        else:
            torch.maximum(pooled_T[..., here], part_T[..., other] * near, out=pooled_T[..., here])


def _shifted(num_entries: int, reach: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the entries that have a neighbour `shift` columns on, and of those neighbours, for each
    shift."""
    for shift in range(-reach, reach + 1):
        first, last = max(0, -shift), min(num_entries, num_entries - shift)
        if first < last:
            yield slice(first, last), slice(first + shift, last + shift)


def group_heads(values_BQT: Float[Tensor, "B Q *rest"], num_heads: int) -> Float[Tensor, "B H G *rest"]:
    """Group query heads by KV head: `[B, Q, ...] -> [B, H, G, ...]` (a view)."""
    return values_BQT.unflatten(1, (num_heads, -1))
