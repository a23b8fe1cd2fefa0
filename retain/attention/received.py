"""Computes statistics of the attention that entries receive: for scores, future risk and running statistics.

All of them come from one op on every device (`retain.kernels.attention_stats`), so that rows of attention
need not exist. `retain.evidence.attention_probs` defines the rows.
"""

from jaxtyping import Float
from torch import Tensor

from retain.evidence import Evidence
from retain.kernels.attention_stats import Pool, attention_stats


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
    chunk: int | None = None,
) -> tuple[Tensor, ...]:
    """Statistics of the attention that the first entries receive from the queries from `start` on.

    With `a_qj` the row of `retain.evidence.attention_probs`, over the queries `j >= start` that are there:
    `max: max_j a_qj[i]`, `sum: sum_j a_qj[i]`, `squares: sum_j a_qj[i]^2`,
    `scatter: sum_j (a_qj[i] - mean_j a_qj[i])^2` (over all from `start` on; a missing query gives 0),
    `entropy: - sum_j a_qj[i] log(a_qj[i] + 1e-10)`, `last`: the entry index of the last query that gives at
    least `least_qj`, -1 for none. An entry that a head does not hold receives 0.

    Args:
        wanted: of `max`, `sum`, `squares`, `scatter`, `entropy`, `last`; `lse` of the rows; and of rows that
            are pooled (no `scatter`, no `last`) `plain`, their sum before.
        entries: number of first entries (rows still sum to one over all that a query sees); None: all.
        distance: a query gives nothing to entries nearer than this.
        pool: rows are smoothed along the entries before anything is taken of them.
        group: reduce over the query heads of a KV head (largest, sum, last).
        lse_BQs: of an earlier call for the same queries, which spares a pass over the keys.
        least_BQs: for `last`.
        chunk: queries at a time; changes memory, not the result.

    Returns:
        the wanted statistics, in order: `[B, Q, entries]` each (`[B, H, entries]` by group; `lse` `[B, Q,
        s]`), in float32 (float64 if the evidence is), `last` in int64.
    """
    T, S = evidence.num_seen, evidence.num_queries
    counts_places = evidence.window is not None or pool is not None
    stats = attention_stats(
        evidence.queries_BQSD[:, :, start:],
        evidence.keys_BHTD,
        scaling=evidence.scaling,
        wanted=wanted,
        first_query=T - S + start,
        keys=None if entries is None else (0, entries),
        distance=distance,
        window=evidence.window,
        # One head stands for all that hold the same.
        exists_BHT=evidence.valid_BT[:, None] if evidence.held_BHT is None else evidence.exists_BHT,
        asks_BS=evidence.asks_BS[:, start:],
        place_BT=evidence.place_BT if counts_places else None,
        soft_cap=evidence.soft_cap,
        sinks_Q=evidence.sinks_Q,
        lse_BQS=lse_BQs,
        least_BQS=least_BQs,
        pool=pool,
        group=group,
        chunk=chunk,
    )
    return tuple(getattr(stats, name) for name in wanted)
