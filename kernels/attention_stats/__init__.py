"""Statistics of attention over its queries, per key, without a matrix of all pairs.

For every key: the largest probability that any query pays it, the sum, the spread around the mean, the
entropy, the last query that accessed it; and the row log-sum-exps on request. Targets
(all future queries), H2O, SnapKV, CAKE, DefensiveKV and LRU use them. Rows are always softmaxed over all
keys that the query sees; distances and pools only choose which pairs are counted.
"""

from collections.abc import Collection

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retain.kernels import backend
from retain.kernels.attention_stats import reference
from retain.kernels.attention_stats.reference import WANTED, Call, Pool, pool_

__all__ = ["Pool", "attention_stats", "pool_"]

# Bound of a head width: a tile of wider ones does not fit on a multiprocessor.
_WIDEST = 256


@torch.compiler.disable(reason="statistics of attention are taken between graphs")
@backend.without_autocast
def attention_stats(
    queries_BQSD: Float[Tensor, "B Q S D"],
    keys_BHTD: Float[Tensor, "B H T D"],
    *,
    scaling: float,
    wanted: Collection[str],
    entries: int | None = None,
    distance: int = 0,
    exists_BHT: Bool[Tensor, "B heads T"] | None = None,
    asks_BS: Bool[Tensor, "B S"] | None = None,
    place_BT: Int[Tensor, "B T"] | None = None,
    soft_cap: float | None = None,
    sinks_Q: Float[Tensor, " Q"] | None = None,
    log_weight_BHT: Float[Tensor, "B H T"] | None = None,
    lse_BQS: Float[Tensor, "B Q S"] | None = None,
    least_BQS: Float[Tensor, "B Q S"] | None = None,
    pool: Pool | None = None,
    group: bool = False,
) -> dict[str, Tensor]:
    """For every key, statistics over queries of the probability that they pay it.

    `a_qj[i] = exp(cap(scaling * q_j . k_i) + log_weight_i - lse_qj)` over the keys `i` that query `j` sees:
    not after its own entry `T - S + j`, held by the head of q; `lse_qj` is over all
    of those, and the sink. With `pool`, `a_qj` is then `pool(a_qj)`. Over the queries `j` that are there, and
    at least `distance` entries behind the key:

    `max[q, i] = max_j a_qj[i]`, `sum[q, i] = sum_j a_qj[i]`, `plain[q, i]`: the sum before the pool,
    `scatter[q, i] = sum_j (a_qj[i] - mean_j)^2` (over all queries: one that is not there, or does not count
    for the key, pays 0), `entropy[q, i] = sum_j -a_qj[i] log(a_qj[i] + 1e-10)`,
    `last[q, i] = max {T - S + j : a_qj[i] >= least_qj, j sees i}`.

    No gradient flows through it. The largest term serves the training targets and DefensiveKV (arXiv
    2510.13334), the sum H2O (arXiv 2306.14048) and SnapKV (arXiv 2404.14469), scatter and entropy CAKE
    (arXiv 2503.12491).

    Args:
        queries_BQSD: the queries of the last S of the T entries, float32, float16, bfloat16 (or float64); any
            strides.
        keys_BHTD: in the queries' precision; what lies where no entry exists may be anything.
        scaling: factor on the logits.
        wanted: of `max`, `sum`, `scatter`, `entropy`, `last`, `lse`; of pooled rows `plain` too, and neither
            `scatter` nor `last`.
        entries: number of first keys that are asked about; None: all.
        distance: entries that a query must lie behind a key for the pair to be counted.
        exists_BHT: which head holds which entry; one head stands for all; None: all hold all.
        asks_BS: False where there is no such query (what lies there may be anything); None: all are there.
        place_BT: number of the sequence's own tokens before each entry, ascending where entries exist;
            pools are counted in it. None: no place is missing.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        sinks_Q: one extra logit per query head, which takes part in the softmax.
        log_weight_BHT: added to the logits of each entry that exists; None: nothing is. By the reference
            alone.
        lse_BQS: of every row (sinks included), if it is known: then no pass over the other keys is needed.
        least_BQS: the probability from which on a query accesses a key; for `last`.
        pool: rows are smoothed over neighbouring entries before they are counted; for few queries, in plain
            PyTorch on every device.
        group: whether the query heads of a KV head are reduced too: the largest `max` and `last`, sums of the
            others.

    Returns:
        each wanted statistic by its name, `[B, Q, K]` over the keys asked about, or `[B, H, K]` with `group`,
        float32 (float64 if the inputs are; `last` int64: an entry index, -1 for none); `lse`, the natural
        log-sum-exp of each row, `[B, Q, S]`, -inf where a query is not there or sees nothing.
    """
    (B, Q, S, D), (H, T) = queries_BQSD.shape, keys_BHTD.shape[1:3]
    assert keys_BHTD.shape == (B, H, T, D) and Q % H == 0 and 0 < S <= T, keys_BHTD.shape
    assert queries_BQSD.dtype == keys_BHTD.dtype and scaling > 0, keys_BHTD.dtype
    assert {*wanted} <= {*WANTED} and ("last" in wanted) == (least_BQS is not None), wanted
    assert (pool is not None or "plain" not in wanted) and (lse_BQS is None or "lse" not in wanted), wanted
    assert pool is None or not (distance or {"last", "scatter"} & {*wanted}), (pool, wanted)
    fields = (exists_BHT, asks_BS, place_BT, sinks_Q, log_weight_BHT, lse_BQS, least_BQS)
    call = Call(
        *(queries_BQSD, keys_BHTD, *fields, scaling, tuple(wanted)),
        *(T if entries is None else entries, min(distance, T), soft_cap, pool, group),
    )
    # Not left to `path_for`, which is not given all of them: float64 beside half precision is fine here.
    backend.check_devices("attention_stats", queries_BQSD, keys_BHTD, *fields)
    if pool is not None:
        return reference.attention_stats(call)
    unsupported = "log weights of the entries" if log_weight_BHT is not None else None
    if D > _WIDEST:
        unsupported = f"a head width of {D} (at most {_WIDEST})"
    path = backend.path_for("attention_stats", queries_BQSD, keys_BHTD, unsupported=unsupported)
    if path == "reference":
        return reference.attention_stats(call)
    from retain.kernels.attention_stats import launch

    return launch.attention_stats(call)
