"""Cases of `attention_stats`: named shapes, inputs, check and rivals."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from retain.kernels.attention_stats import Pool, Stats, attention_stats
from retain.kernels.backend import using
from retain.kernels.measure import Claim, Cost, cast, wrong

ALL = ("max", "sum", "scatter", "entropy", "last", "lse")
FLOATS = ("max", "sum", "entropy", "lse")
POOLED = (*FLOATS, "plain")
# Pairs from which on a check looks at the first KV head alone.
MANY = 2**33
# An access is right if it would be one at a threshold that is this much lower, or higher.
ROUNDING = 1e-4


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        batch: B.
        kv_heads: H.
        group_size: G.
        entries: T.
        num_queries: S; None: T.
        width: D.
        wanted: statistics.
        padding: entries on the left of the last sequence that are padding, with its queries.
        held: share of the entries that a head holds, drawn for each head; None: all.
        gaps: whether places are missing between entries.
        window, soft_cap, distance, keys, pool, group: as the op's.
        sinks: whether there are any.
        given_lse: whether the rows' log-sum-exps are known.
        heads_last: queries and keys are views of `[B, T, heads, D]`.
    """

    batch: int = 1
    kv_heads: int = 2
    group_size: int = 2
    entries: int = 70
    num_queries: int | None = None
    width: int = 64
    wanted: tuple[str, ...] = ALL
    padding: int = 0
    held: float | None = None
    gaps: bool = False
    window: int | None = None
    soft_cap: float | None = None
    distance: int = 0
    keys: tuple[int, int] | None = None
    pool: Pool | None = None
    group: bool = False
    sinks: bool = False
    given_lse: bool = False
    heads_last: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group_size

    @property
    def asking(self) -> int:
        return self.num_queries or self.entries


CASES = {
    "one entry": Case(entries=1),
    "plain": Case(entries=150),
    "G = 1, odd length": Case(batch=2, group_size=1, entries=67),
    "G = 8": Case(kv_heads=1, group_size=8, entries=33, width=32),
    "strided": Case(batch=2, entries=40, heads_last=True, width=16),
    "D = 33": Case(entries=45, width=33),
    "D = 80": Case(entries=45, width=80, num_queries=20),
    "D = 128, grouped": Case(entries=45, width=128, group=True),
    "D = 256": Case(kv_heads=1, entries=35, width=256),
    "padding": Case(batch=2, entries=60, padding=23, width=32),
    "held per head": Case(batch=2, entries=60, padding=9, held=0.5, width=32),
    "hardly held": Case(entries=40, held=0.05, width=16),
    "window": Case(entries=150, window=19, width=32),
    "window, few queries": Case(entries=150, num_queries=20, window=31, width=32),
    "window in places": Case(batch=2, entries=50, padding=6, held=0.7, gaps=True, window=24, width=32),
    "soft cap and sinks": Case(entries=45, soft_cap=2.0, sinks=True, width=32),
    "distance": Case(entries=80, distance=7, width=32, group=True),
    "a range of keys": Case(entries=150, distance=3, keys=(17, 90), width=32),
    "grouped": Case(entries=45, width=32, group=True),
    "known lse": Case(batch=2, entries=60, padding=9, given_lse=True, keys=(10, 50), width=32),
    "few queries, many keys": Case(kv_heads=1, entries=200, num_queries=8, held=0.8, sinks=True, width=16),
    "pool avg": Case(
        entries=70, num_queries=16, pool=Pool("avg", 5, 54, True), wanted=POOLED, width=32, group=True
    ),
    "pool max": Case(
        batch=2, entries=45, num_queries=16, padding=9, pool=Pool("max", 3, 29, True), wanted=POOLED, width=16
    ),
    "pool with gaps": Case(
        entries=45, num_queries=8, held=0.7, gaps=True, window=60, pool=Pool("avg", 5, 37, True),
        wanted=POOLED, width=16, sinks=True,
    ),
    "pool, masses not kept": Case(
        kv_heads=1, entries=40, num_queries=8, held=0.7, pool=Pool("max", 5, 32), wanted=POOLED, width=16
    ),
}  # fmt: skip

_LARGE = Case(kv_heads=8, group_size=4, width=128, wanted=("max",))


SPEED = {
    "cpu": {
        "4K": Case(kv_heads=8, group_size=1, entries=4096, wanted=("max",)),
        "4K, sums": Case(kv_heads=8, group_size=1, entries=4096, wanted=("max", "sum")),
        "4K, G = 4": Case(entries=4096, group_size=4, wanted=("max",)),
        "4K, D = 128": Case(kv_heads=8, group_size=1, entries=4096, width=128, wanted=("max",)),
        "32 of 16K": Case(kv_heads=8, entries=2**14, num_queries=32, wanted=("max", "sum")),
        "32 of 16K, pooled": Case(
            kv_heads=8, entries=2**14, num_queries=32, wanted=("max",), pool=Pool("avg", 5, 2**14 - 32, True)
        ),
    },
    "cuda": {
        "32K": replace(_LARGE, entries=2**15),
        "32K, sums": replace(_LARGE, entries=2**15, wanted=("max", "sum")),
        "128K": replace(_LARGE, entries=2**17, group=True),
        "4K": replace(_LARGE, entries=2**12),
        "32 of 128K": replace(_LARGE, entries=2**17, num_queries=32, wanted=("max", "sum")),
        "32 of 128K, pooled": replace(
            _LARGE, entries=2**17, num_queries=32, pool=Pool("avg", 5, 2**17 - 32, True), group=True
        ),
    },
}

CLAIMS = {
    "cuda": [
        Claim("no slower than a causal FlashAttention forward", "sdpa_flash", at_most=1.0, case="32K"),
        Claim("memory is linear in T", extra_mb_at_most=64, case="128K"),
    ],
    "cpu": [
        *(
            Claim("near SDPA's forward", "sdpa", at_most=1.5, case=case)
            for case in ("4K", "4K, sums", "4K, G = 4", "4K, D = 128")
        ),
        Claim("the matrix of all pairs never exists", extra_mb_at_most=64),
    ],
}


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of the op."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    B, Q, H, T, S, D = case.batch, case.heads, case.kv_heads, case.entries, case.asking, case.width

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def rows(length: int, heads: int) -> Tensor:
        drawn = normal(B, length, heads, D).to(dtype).transpose(1, 2)
        return drawn if case.heads_last else drawn.contiguous()

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    given: dict[str, Any] = {
        "queries_BQSD": rows(S, Q),
        "keys_BHTD": rows(T, H),
        "scaling": D**-0.5,
        "wanted": case.wanted,
        "keys": case.keys,
        "distance": case.distance,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "pool": case.pool,
        "group": case.group,
    }
    if case.padding or case.held is not None:
        valid = torch.ones((B, 1, T), dtype=torch.bool, device=device)
        valid[-1, :, : case.padding] = False
        given["asks_BS"] = valid[:, 0, T - S :]
        held = True if case.held is None else uniform(B, H, T) < case.held
        given["exists_BHT"] = valid & held
    if case.gaps:
        given["place_BT"] = (1 + 3 * uniform(B, T)).long().cumsum(-1)
    if case.sinks:
        given["sinks_Q"] = normal(Q)
    if "last" in case.wanted:
        given["least_BQS"] = 4 / T * uniform(B, Q, S)
    if case.given_lse:
        named = {key: value for key, value in given.items() if key not in ("wanted", "least_BQS", "keys")}
        given["lse_BQS"] = attention_stats(**named, wanted="lse").lse
    return given


def run(case: Case, kwargs: dict[str, Any]) -> Stats:
    """The op."""
    return attention_stats(**kwargs)


def cost(case: Case, dtype: torch.dtype) -> Cost:
    """Of one product of the queries with the keys that they see; a second pass is the kernel's own affair."""
    S, T = case.asking, case.entries
    seen = S * T - S * (S - 1) // 2
    B, H, Q, D = case.batch, case.kv_heads, case.heads, case.width
    numbers = (B * Q * S + B * H * T) * D * dtype.itemsize
    return Cost(2.0 * B * Q * D * seen, numbers + 4.0 * B * (H if case.group else Q) * T * len(case.wanted))


def rivals(case: Case, kwargs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Attention itself, which walks the same pairs; and rows of a few queries at a time over all keys."""
    queries, keys = kwargs["queries_BQSD"], kwargs["keys_BHTD"]
    values = torch.randn_like(keys)
    # Of a few queries at the end, all see nearly all keys: attention that hides nothing does that work.
    attend = partial(
        scaled_dot_product_attention,
        queries,
        keys,
        values,
        is_causal=case.asking == case.entries,
        scale=kwargs["scaling"],
        enable_gqa=True,
    )
    found: dict[str, Callable[[], Any]] = {"chunks of rows": partial(chunks_of_rows, kwargs)}
    if queries.is_cuda:
        found["sdpa_flash"] = partial(_by_flash, attend)
    else:
        found["sdpa"] = attend
    return found


def _by_flash(attend: Callable[[], Tensor]) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attend()


def chunks_of_rows(kwargs: dict[str, Any], chunk: int = 128) -> Tensor:
    """The largest probability of each key, of plain causal attention: what one would write."""
    queries, keys = kwargs["queries_BQSD"], kwargs["keys_BHTD"]
    B, Q, S, _ = queries.shape
    H, T = keys.shape[1:3]
    worst = queries.new_zeros((B, H, Q // H, T), dtype=torch.float32)
    entry = torch.arange(T, device=keys.device)
    for start in range(0, S, chunk):
        part = queries[:, :, start : start + chunk].unflatten(1, (H, Q // H))
        logits = (part @ keys[:, :, None].transpose(-1, -2)).float() * kwargs["scaling"]
        own = torch.arange(T - S + start, T - S + start + part.shape[3], device=keys.device)
        probs = logits.masked_fill_(entry > own[:, None], float("-inf")).softmax(-1)
        worst = torch.maximum(worst, probs.amax(3))
    return worst.flatten(1, 2)


def check(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> str | None:
    """Compares the op with the reference in float64, with the tolerance of the one in float32 even for
    inputs of half precision: no product of those is rounded."""
    kwargs = inputs(case, dtype, device, seed)
    found = run(case, kwargs)
    heads = case.heads
    if case.batch * case.heads * case.asking * case.entries > MANY:
        heads = case.group_size
        kwargs = _of_first_head(kwargs, heads)
    asked = {**kwargs, "wanted": {*case.wanted, "sum"}}
    with using("reference"):
        exact, plain = (attention_stats(**cast(asked, kind)) for kind in (torch.float64, torch.float32))
    shown = heads // case.group_size if case.group else heads
    for name in case.wanted:
        own = getattr(found, name)[:, : heads if name == "lse" else shown]
        if name == "last":
            problem = wrong_last(own, kwargs)
        else:
            # The entropy of a certainty is nothing, but its rounding is that of the probability, 1.
            least: Any = exact.sum if name == "entropy" else 0.0
            three = (own, getattr(exact, name), getattr(plain, name))
            problem = wrong(*(one + least for one in three), dtype=torch.float32, ops=4, what=name)
        if problem is not None:
            return problem
    return None


def wrong_last(last: Tensor, kwargs: dict[str, Any]) -> str | None:
    """Checks last accesses of a call: a probability at the very threshold may count as either."""
    bounds: list[Any] = []
    for factor in (1 + ROUNDING, 1 - ROUNDING):
        moved = {**cast(kwargs, torch.float64), "wanted": "last"}
        moved["least_BQS"] = moved["least_BQS"] * factor
        with using("reference"):
            bounds.append(attention_stats(**moved).last)
    outside = int(((last < bounds[0]) | (last > bounds[1])).sum())
    return f"last: {outside} of {last.numel()} differ" if outside else None


def _of_first_head(kwargs: dict[str, Any], heads: int) -> dict[str, Any]:
    """The same call of the first KV head alone."""
    own = {"queries_BQSD": heads, "lse_BQS": heads, "least_BQS": heads}
    own |= {"keys_BHTD": 1, "exists_BHT": 1}
    found = {name: one[:, : own[name]] if name in own else one for name, one in kwargs.items()}
    if "sinks_Q" in kwargs:
        found["sinks_Q"] = kwargs["sinks_Q"][:heads]
    return found
