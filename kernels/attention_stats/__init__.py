"""Statistics of attention over its queries, per key, without a matrix of all pairs.

For every key: the largest probability that any query pays it, the sum, the spread around the mean, the
entropy, the last query that accessed it; and the row log-sum-exps on request. Targets
(all future queries), H2O, SnapKV, CAKE, DefensiveKV and LRU use them. Rows are always softmaxed over all
keys that the query sees; distances and pools only choose which pairs are counted.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from retain.kernels import backend
from retain.kernels.attention_stats import reference
from retain.kernels.attention_stats.reference import WANTED, Call, Pool

__all__ = ["WANTED", "Pool", "Stats", "attention_stats"]


# Bounds of a head width and of strides: offsets within a tile are 32 bits wide.
_WIDEST, _LARGEST_STRIDE = 256, 2**31 // 512


@dataclass(frozen=True)
class Stats:
    """Statistics of K keys, float32 (float64 if the inputs are); None where one was not wanted.

    Args:
        max: largest probability that a query pays the key.
        sum: of the probabilities.
        scatter: sum of the probabilities' squared distances from their mean.
        entropy: `sum_j -a_j log(a_j + 1e-10)`.
        last: entry index of the last query that accessed the key, -1 for none.
        plain: the sum before rows were pooled.
        lse: natural log-sum-exp of each row, `-inf` where a query is not there or sees nothing.
    """

    max: Float[Tensor, "B heads K"] | None = None
    sum: Float[Tensor, "B heads K"] | None = None
    scatter: Float[Tensor, "B heads K"] | None = None
    entropy: Float[Tensor, "B heads K"] | None = None
    last: Int64[Tensor, "B heads K"] | None = None
    lse: Float[Tensor, "B Q s"] | None = None
    plain: Float[Tensor, "B heads K"] | None = None


@torch.compiler.disable(reason="statistics of attention are taken between graphs")
def attention_stats(
    queries_BQSD: Float[Tensor, "B Q S D"],
    keys_BHTD: Float[Tensor, "B H T D"],
    *,
    scaling: float,
    wanted: Collection[str] = ("max",),
    first_query: int | None = None,
    keys: tuple[int, int] | None = None,
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
    chunk: int | None = None,
) -> Stats:
    """For every key, statistics over queries of the probability that they pay it.

    `a_qj[i] = exp(cap(scaling * q_j . k_i) + log_weight_i - lse_qj)` over the keys `i` that query `j` sees:
    not after its own entry `first_query + j`, held by the head of q; `lse_qj` is over all
    of those, and the sink. With `pool`, `a_qj` is then `pool(a_qj)`. Over the queries `j` that are there, and
    at least `distance` entries behind the key:

    `max[q, i] = max_j a_qj[i]`, `sum[q, i] = sum_j a_qj[i]`, `plain[q, i]`: the sum before the pool,
    `scatter[q, i] = sum_j (a_qj[i] - mean_j)^2` (over all queries: one that is not there, or does not count
    for the key, pays 0), `entropy[q, i] = sum_j -a_qj[i] log(a_qj[i] + 1e-10)`,
    `last[q, i] = max {first_query + j : a_qj[i] >= least_qj, j sees i}`.

    No gradient flows through it. The largest term serves the training targets and DefensiveKV (arXiv
    2510.13334), the sum H2O (arXiv 2306.14048) and SnapKV (arXiv 2404.14469), scatter and entropy CAKE
    (arXiv 2503.12491).

    Args:
        queries_BQSD: float32, float16, bfloat16 (or float64); any strides.
        keys_BHTD: in the queries' precision; what lies where no entry exists may be anything.
        scaling: factor on the logits.
        wanted: of `max`, `sum`, `scatter`, `entropy`, `last`, `lse`, and `plain` of pooled rows.
        first_query: entry index of query 0; None: the queries are the last S of the T entries.
        keys: first key that is asked about and one past the last; None: all.
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
        chunk: queries of a block of the reference: changes its memory and rounding, nothing else. None: what
            fits its cache.

    Returns:
        statistics `[B, Q, K]` over the keys asked about, or `[B, H, K]` with `group`.

    Raises:
        ValueError: the arguments do not fit each other.
    """
    wanted = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    call = Call(
        queries_BQSD, keys_BHTD, exists_BHT, asks_BS, place_BT, sinks_Q, log_weight_BHT,
        lse_BQS, least_BQS,
        scaling, wanted, 0, (0, 0), distance, soft_cap, pool, group, chunk,
    )  # fmt: skip
    return Stats(**_run(_checked(call, first_query, keys)))


@backend.without_autocast
def _run(call: Call) -> dict[str, Tensor]:
    """Each wanted statistic, by the path that this call takes."""
    if call.pool is not None:
        return reference.attention_stats(call)
    tensors, find = (call.queries_BQSD, call.keys_BHTD), reference.attention_stats
    if backend.path_for("attention_stats", *tensors, unsupported=_unsupported(call)) == "triton":
        from retain.kernels.attention_stats import launch

        find = launch.attention_stats
    return find(call)


def _unsupported(call: Call) -> str | None:
    """The property of a call that the kernels do not support."""
    D = call.keys_BHTD.shape[3]
    if D > _WIDEST:
        return f"a head width of {D} (at most {_WIDEST})"
    if not call.scaling > 0:
        return f"a scaling of {call.scaling} (more than 0)"
    if call.log_weight_BHT is not None:
        return "log weights of the entries"
    strides = [*call.queries_BQSD.stride()[2:], *call.keys_BHTD.stride()[2:]]
    if max(strides) >= _LARGEST_STRIDE:
        return f"rows {max(strides)} elements apart (less than {_LARGEST_STRIDE})"
    return None


def _checked(call: Call, first_query: int | None, keys: tuple[int, int] | None) -> Call:
    """The call, once its arguments fit each other."""
    queries_BQSD, keys_BHTD, wanted, distance = call.queries_BQSD, call.keys_BHTD, call.wanted, call.distance
    shapes = f"queries {list(queries_BQSD.shape)} and keys {list(keys_BHTD.shape)}"
    if queries_BQSD.dim() != 4 or keys_BHTD.dim() != 4:
        raise ValueError(f"attention_stats takes queries [B, Q, S, D] and keys [B, H, T, D]; got {shapes}.")
    B, Q, S, D = queries_BQSD.shape
    H, T = keys_BHTD.shape[1:3]
    if keys_BHTD.shape[0] != B or keys_BHTD.shape[3] != D or not H or Q % H:
        raise ValueError(
            f"queries [B, Q, S, D] and keys [B, H, T, D] share B and D, and Q is a multiple of H; got "
            f"{shapes}."
        )
    if not (B and Q and S and T and D):
        raise ValueError(f"attention_stats needs at least one query and one key; got {shapes}.")
    if queries_BQSD.dtype != keys_BHTD.dtype:
        raise ValueError(
            f"queries are {queries_BQSD.dtype} and keys {keys_BHTD.dtype}: cast one to the other's precision."
        )
    unknown = [name for name in wanted if name not in WANTED]
    if unknown or not wanted:
        raise ValueError(
            f"wanted is one or more of {', '.join(WANTED)}; got {', '.join(unknown) or 'nothing'}."
        )
    first = T - S if first_query is None else first_query
    if first < 0 or first + S > T:
        raise ValueError(
            f"query 0 sits at entry {first}, and {S} queries end at {first + S}, of {T} entries: pass "
            "0 <= first_query <= T - S, and the keys of every entry up to the last query's own."
        )
    if call.soft_cap is not None and not call.soft_cap > 0:
        raise ValueError(f"soft_cap is more than 0, or None for no cap; got {call.soft_cap}.")
    if call.chunk is not None and call.chunk < 1:
        raise ValueError(f"chunk is 1 query or more; got {call.chunk}.")
    if distance < 0:
        raise ValueError(f"distance is 0 or more entries behind a query; got {distance}.")
    k0, k1 = (0, T) if keys is None else keys
    if not 0 <= k0 < k1 <= T:
        raise ValueError(f"keys {k0}..{k1} are not inside 0..{T}: pass 0 <= start < stop <= {T}.")
    _shape("exists_BHT", call.exists_BHT, (B, H, T), (B, 1, T), dtype=torch.bool)
    _shape("asks_BS", call.asks_BS, (B, S), dtype=torch.bool)
    _shape("place_BT", call.place_BT, (B, T))
    _shape("sinks_Q", call.sinks_Q, (Q,))
    _shape("log_weight_BHT", call.log_weight_BHT, (B, H, T))
    _shape("lse_BQS", call.lse_BQS, (B, Q, S))
    _shape("least_BQS", call.least_BQS, (B, Q, S))
    if ("last" in wanted) != (call.least_BQS is not None):
        raise ValueError(
            "'last' asks for the last query that accessed a key, and least_BQS says from which probability "
            "on that is: pass both or neither."
        )
    _check_pool(call.pool, T, wanted, distance)
    # Not left to `path_for`, which is not given all of them: float64 beside half precision is fine here.
    backend.check_devices("attention_stats", *call.tensors)
    return replace(
        call,
        wanted=tuple(name for name in WANTED if name in wanted),
        first=first,
        keys=(k0, k1),
        distance=min(distance, T),
    )


def _shape(
    name: str, tensor: Tensor | None, *allowed: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    if tensor is None:
        return
    if tuple(tensor.shape) not in allowed:
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        raise ValueError(f"{name} is {wanted} here; got {list(tensor.shape)}.")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} is {dtype}; got {tensor.dtype}.")


def _check_pool(pool: Pool | None, T: int, wanted: tuple[str, ...], distance: int) -> None:
    if pool is None:
        if "plain" in wanted:
            raise ValueError("'plain' is the sum before rows are pooled: name a pool, or ask for the 'sum'.")
        return
    if pool.kind not in ("avg", "max"):
        raise ValueError(f"pool kind is 'avg' or 'max'; got {pool.kind!r}.")
    if pool.size < 1 or pool.size % 2 == 0:
        raise ValueError(f"pool size is an odd number of places, so that it is centred; got {pool.size}.")
    if not 0 <= pool.split <= T:
        raise ValueError(f"pool split is one of the {T} entries, or {T} for none; got {pool.split}.")
    if "last" in wanted or distance:
        raise ValueError(
            "pooled rows have no accesses and no distances, since an entry is paid its neighbours' share: "
            "leave out 'last' and distance, or the pool."
        )
    if "scatter" in wanted:
        raise ValueError("pooled rows have no 'scatter' here: leave it out, or the pool.")
