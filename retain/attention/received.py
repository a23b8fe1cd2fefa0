"""Computes statistics of the attention that entries receive, also over a whole conversation (`advance`).

All of them come from one op on every device (`retain.kernels.attention_stats`), so that rows of attention
need not exist. `retain.evidence.attention_probs` defines the rows. Scores, future risk and a cache that reads
and decodes use the same functions, so their numbers agree.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.attention.chunked import attention_chunks
from retain.evidence import Evidence, RunningStatistics
from retain.kernels.attention_stats import Pool, attention_stats

# Softmax over equal logits is 1/n only up to rounding; an indifferent query must count the same on every
# backend and under any padding.
ROUNDING = 1e-5

# Numbers of the rows of attention made at once: half a GiB in float32, and temporaries.
ROW_NUMBERS = 2**27


def received_attention(
    evidence: Evidence,
    *wanted: str,
    start: int = 0,
    entries: int | None = None,
    distance: int = 0,
    pool: Pool | None = None,
    group: bool = False,
    lse_BQs: Float[Tensor, "B Q s"] | None = None,
    least_BQs: Float[Tensor, "B Q s"] | None = None,
) -> tuple[Tensor, ...]:
    """Statistics of the attention that the first entries receive from the queries from `start` on.

    With `a_qj` the row of `retain.evidence.attention_probs`, over the queries `j >= start` that are there:
    `max: max_j a_qj[i]`, `sum: sum_j a_qj[i]`,
    `scatter: sum_j (a_qj[i] - mean_j a_qj[i])^2` (over all from `start` on; a missing query gives 0),
    `entropy: - sum_j a_qj[i] log(a_qj[i] + 1e-10)`, `last`: the entry index of the last query that gives at
    least `least_qj`, -1 for none. An entry that a head does not hold receives 0.

    Args:
        wanted: of `max`, `sum`, `scatter`, `entropy`, `last`; `lse` of the rows; and of rows that
            are pooled (no `scatter`, no `last`) `plain`, their sum before.
        entries: number of first entries (rows still sum to one over all that a query sees); None: all.
        distance: a query gives nothing to entries nearer than this.
        pool: rows are smoothed along the entries before anything is taken of them.
        group: reduce over the query heads of a KV head (largest, sum, last).
        lse_BQs: of an earlier call for the same queries, which spares a pass over the keys.
        least_BQs: for `last`.

    Returns:
        the wanted statistics, in order: `[B, Q, entries]` each (`[B, H, entries]` by group; `lse` `[B, Q,
        s]`), in float32 (float64 if the evidence is), `last` in int64.
    """
    stats = attention_stats(
        evidence.queries_BQSD[:, :, start:],
        evidence.keys_BHTD,
        scaling=evidence.scaling,
        wanted=wanted,
        entries=entries,
        distance=distance,
        # One head stands for all that hold the same.
        exists_BHT=evidence.valid_BT[:, None] if evidence.held_BHT is None else evidence.exists_BHT,
        asks_BS=evidence.asks_BS[:, start:],
        place_BT=None if pool is None else evidence.place_BT,
        soft_cap=evidence.soft_cap,
        sinks_Q=evidence.sinks_Q,
        log_weight_BHT=evidence.log_weight_BHT,
        lse_BQS=lse_BQs,
        least_BQS=least_BQs,
        pool=pool,
        group=group,
    )
    return tuple(stats[name] for name in wanted)


def advance(
    evidence: Evidence, running: RunningStatistics | None = None, *, share: int | float = 1.0
) -> RunningStatistics:
    """Fold the S held queries into the statistics of the queries before them.

    `mass[h, i] += mean_{q in group(h)} sum_j a_qj[i]`;
    `last[h, i] = max(last[h, i], place(i), {place(j) | max_{q in group(h)} a_qj[i] >= share / n_j})`, where
    `n_j` is the number of entries that query j sees in head h.

    Args:
        running: statistics of all queries before the held ones, over the same entries; of an entry that came
            after those, a mass of 0 and any place not above its place. None: there were no queries before.
        share: of uniform attention, from which on a query counts as an access, at least 0.

    Returns:
        statistics in float32 (float64 if the evidence is float64) and places in int64; undefined for entries
            that a head does not hold.
    """
    place_BT = evidence.places_BT
    place_BHT = place_BT[:, None].expand(-1, evidence.num_heads, -1)
    least_BQS = share * (1 - ROUNDING) / _entries_seen(evidence).clamp_min(1)
    sum_BHT, entry_BHT = received_attention(evidence, "sum", "last", least_BQs=least_BQS, group=True)
    mass_BHT, last_BHT = sum_BHT / evidence.group, _places_of(entry_BHT, place_BT)
    if running is None:
        return RunningStatistics(mass_BHT, torch.maximum(last_BHT, place_BHT))
    known_BHT = torch.maximum(running.last_access_BHT, place_BHT)
    return RunningStatistics(running.mass_BHT + mass_BHT, torch.maximum(known_BHT, last_BHT))


def advance_with_gaps(
    evidence: Evidence, running: RunningStatistics | None = None, *, alpha: float = 1e-4
) -> RunningStatistics:
    """As `advance`, where an access is attention of at least `alpha`, with the longest gap between accesses.

    With the accesses `j_1 < j_2 < ...` of an entry, and `j_0` its place (writing it is one),
    `gap[h, i] = max_n (place(j_n) - place(j_{n-1}))`, at least 1 once a query (also its token's)
    has accessed it.
    Rows of attention are made (`rows_of`), at the cost of a prefill's attention without a fused kernel.

    Args:
        running: as in `advance`; of an entry that came since, a gap of 0.
        alpha: attention, of 1 that a query pays.

    Returns:
        as `advance`, with gaps in int64.
    """
    H, place_BT = evidence.num_heads, evidence.places_BT
    last_BHT = place_BT[:, None].expand(-1, H, -1).clone()
    mass_BHT = torch.zeros(last_BHT.shape, dtype=accumulated_in(evidence), device=last_BHT.device)
    gap_BHT = torch.zeros_like(last_BHT)
    if running is not None:
        assert running.longest_gap_BHT is not None
        mass_BHT = running.mass_BHT.to(mass_BHT.dtype).clone()
        gap_BHT = running.longest_gap_BHT.long().clone()
        last_BHT = torch.maximum(running.last_access_BHT.long(), last_BHT)
    for start, rows_BQsK in rows_of(evidence):
        seen = rows_BQsK.shape[-1]
        rows_BHGsK = rows_BQsK.unflatten(1, (H, -1))
        hit_BHsK = rows_BHGsK.amax(2) >= alpha * (1 - ROUNDING)
        asked_B1s1 = place_BT[:, None, start:seen, None]
        at_BHsK = torch.where(hit_BHsK, asked_B1s1, -1)
        known_BHsK = torch.cat([last_BHT[:, :, None, :seen], at_BHsK], dim=2).cummax(2).values
        gap_BHsK = (at_BHsK - known_BHsK[:, :, :-1]).clamp_min(1).masked_fill(~hit_BHsK, 0)
        gap_BHT[..., :seen] = torch.maximum(gap_BHT[..., :seen], gap_BHsK.amax(2))
        last_BHT[..., :seen] = known_BHsK[:, :, -1]
        mass_BHT[..., :seen] += rows_BHGsK.mean(2).sum(2)
    return RunningStatistics(mass_BHT, last_BHT, gap_BHT)


def rows_of(evidence: Evidence) -> Iterator[tuple[int, Float[Tensor, "B Q s K"]]]:
    """Yield the rows of attention of the held queries, as many at a time as `ROW_NUMBERS` numbers hold: the
    entry index of the first, and rows over the entries up to the last (`attention_chunks`)."""
    B, Q, S, _ = evidence.queries_BQSD.shape
    T = evidence.num_seen
    evidence = replace(evidence, keys_BHTD=evidence.keys_BHTD.to(accumulated_in(evidence)))
    return attention_chunks(evidence, max(1, ROW_NUMBERS // (B * Q * T)), first=T - S)


def accumulated_in(evidence: Evidence) -> torch.dtype:
    """float32, or float64 if the evidence is."""
    return torch.promote_types(evidence.keys_BHTD.dtype, torch.float32)


def _places_of(entry_BHT: Int[Tensor, "B H T"], place_BT: Int[Tensor, "B T"]) -> Int[Tensor, "B H T"]:
    """Places of the queries at these entries; -1 stays."""
    place_BHT = place_BT[:, None].expand_as(entry_BHT).gather(-1, entry_BHT.clamp_min(0))
    return place_BHT.masked_fill(entry_BHT < 0, -1)


def _entries_seen(evidence: Evidence) -> Int[Tensor, "B Q S"]:
    """Number of entries that each query sees: those of its head up to its place."""
    T, S = evidence.num_seen, evidence.num_queries
    exists_BHT = evidence.valid_BT[:, None] if evidence.held_BHT is None else evidence.exists_BHT
    seen_BHS = exists_BHT.cumsum(-1)[..., T - S :]
    return seen_BHS.expand(-1, evidence.num_heads, -1).repeat_interleave(evidence.group, dim=1)
