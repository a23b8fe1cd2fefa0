"""Cases of `attention_stats`: named shapes, inputs, check and rivals."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from retain.kernels.attention_stats import Pool, attention_stats
from retain.kernels.measure import Claim

ALL = ("max", "sum", "scatter", "entropy", "last", "lse")
FLOATS = ("max", "sum", "entropy", "lse")
POOLED = (*FLOATS, "plain")
# Operations that round one after another, in float32 also for inputs of half precision, whose products are
# exact.
ROUNDING = 4, torch.float32
GRAPHED = False  # other than a decoding step, calls are as long as they take


@dataclass(frozen=True)
class Case:
    """A call.

    Args:
        batch, kv_heads, group_size, entries, width: B, H, G, T and D.
        num_queries: S; None: T.
        padding: entries on the left of the last sequence that are padding, with its queries.
        held: share of the entries that a head holds, drawn for each head; None: all.
        gaps: whether places are missing between entries.
        sinks: whether there are any.
        given_lse: whether the rows' log-sum-exps are known.
        wanted, soft_cap, distance, asked, pool, group: as the op's; `asked` is its `entries`.
    """

    batch: int = 1
    kv_heads: int = 2
    group_size: int = 2
    entries: int = 70
    num_queries: int | None = None
    width: int = 64
    padding: int = 0
    held: float | None = None
    gaps: bool = False
    sinks: bool = False
    given_lse: bool = False
    wanted: tuple[str, ...] = ALL
    soft_cap: float | None = None
    distance: int = 0
    asked: int | None = None
    pool: Pool | None = None
    group: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group_size

    @property
    def asking(self) -> int:
        return self.num_queries or self.entries


CASES = {
    # The entropy of a certainty is nothing but rounding.
    "one entry": Case(entries=1, wanted=("max", "sum", "scatter", "last", "lse")),
    "plain": Case(entries=150),
    "G = 1, odd length": Case(batch=2, group_size=1, entries=67),
    "G = 8, D = 33": Case(kv_heads=1, group_size=8, entries=33, width=33),
    "D = 80": Case(entries=45, width=80, num_queries=20),
    "D = 128, grouped": Case(entries=45, width=128, group=True),
    "D = 256": Case(kv_heads=1, entries=35, width=256),
    "held per head": Case(batch=2, entries=60, padding=9, held=0.5, width=32),
    "hardly held": Case(entries=40, held=0.05, width=16),
    "soft cap and sinks": Case(entries=45, soft_cap=2.0, sinks=True, width=32),
    "the first keys": Case(entries=150, distance=3, asked=90, width=32, group=True),
    "nothing is far enough": Case(entries=40, num_queries=30, width=16, distance=2**31 - 1),
    "known lse": Case(
        batch=2, entries=60, padding=9, given_lse=True, asked=50, width=32, wanted=(*ALL[:5],)
    ),
    "few queries, many keys": Case(kv_heads=1, entries=200, num_queries=8, held=0.8, sinks=True, width=16),
    "pool avg": Case(num_queries=16, pool=Pool("avg", 5, 54, True), wanted=POOLED, width=32, group=True),
    "pool max": Case(
        batch=2, entries=45, num_queries=16, padding=9, pool=Pool("max", 3, 29, True), wanted=POOLED, width=16
    ),
    "pool with gaps": Case(
        entries=45, num_queries=8, held=0.7, gaps=True, pool=Pool("avg", 5, 37), wanted=POOLED,
        width=16, sinks=True,
    ),
}  # fmt: skip

_LAYER = Case(kv_heads=8, group_size=4, width=128, wanted=("max",))
_CPU = replace(_LAYER, group_size=1, width=64, entries=4096)
SPEED = {
    "cpu": {
        "4K": _CPU,
        "4K, sums": replace(_CPU, wanted=("max", "sum")),
        "4K, G = 4": replace(_CPU, kv_heads=2, group_size=4),
        "32 of 16K": replace(_CPU, group_size=2, entries=2**14, num_queries=32, wanted=("max", "sum")),
    },
    "cuda": {
        "32K": replace(_LAYER, entries=2**15),
        "32K, sums": replace(_LAYER, entries=2**15, wanted=("max", "sum")),
        "32 of 128K": replace(_LAYER, entries=2**17, num_queries=32, wanted=("max", "sum")),
    },
}
CLAIMS = [
    Claim("32K", "sdpa", 1.0),  # a causal FlashAttention forward has as many products
    *(Claim(case, "sdpa", 1.5) for case in ("4K", "4K, sums", "4K, G = 4")),
]

_MANY = replace(_LAYER, entries=128, kv_heads=1)
_ALL: dict[str, Any] = {
    "held": 0.5,
    "padding": 3,
    "soft_cap": 2.0,
    "sinks": True,
    "wanted": ALL,
}
_HOW: list[dict[str, Any]] = [{}, {"group_size": 1, "num_queries": 16}, {"group": True}]
_BF16, _FP32 = torch.bfloat16, torch.float32
# Calls that are compiled ahead of time: every tile, and every switch of the code.
BUILDS: list[tuple[torch.dtype, Case]] = [
    *((_BF16, replace(_MANY, width=D, **how)) for D in (64, 128, 256) for how in _HOW),
    *((_FP32, replace(_MANY, width=D, **how)) for D in (128, 256) for how in _HOW[:2]),
    *((_BF16, replace(_MANY, width=D, **_ALL)) for D in (128, 256)),
    (_BF16, replace(_MANY, held=0.5, padding=3)),
    (_BF16, replace(_MANY, wanted=("max", "sum"), group=True)),
    (torch.float16, replace(_MANY, width=80)),
]


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of the op; queries lie as projections leave them, heads side by side."""
    draw = torch.Generator(device).manual_seed(seed)
    B, Q, H, T, S, D = case.batch, case.heads, case.kv_heads, case.entries, case.asking, case.width

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw, device=device)

    given: dict[str, Any] = {
        "queries_BQSD": normal(B, S, Q, D).to(dtype).transpose(1, 2),
        "keys_BHTD": normal(B, H, T, D).to(dtype),
        "scaling": D**-0.5,
        **{name: getattr(case, name) for name in ("wanted", "distance", "soft_cap")},
        **{name: getattr(case, name) for name in ("pool", "group")},
        "entries": case.asked,
    }
    if case.padding or case.held is not None:
        valid = torch.ones((B, 1, T), dtype=torch.bool, device=device)
        valid[-1, :, : case.padding] = False
        given["asks_BS"] = valid[:, 0, T - S :]
        given["exists_BHT"] = valid & (True if case.held is None else uniform(B, H, T) < case.held)
    if case.gaps:
        given["place_BT"] = (1 + 3 * uniform(B, T)).long().cumsum(-1)
    if case.sinks:
        given["sinks_Q"] = normal(Q)
    if "last" in case.wanted:
        given["least_BQS"] = 4 / T * uniform(B, Q, S)
    if case.given_lse:
        named = {**given, "wanted": ("lse",), "least_BQS": None, "entries": None}
        given["lse_BQS"] = attention_stats(**named)["lse"]
    return given


def run(case: Case, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The op."""
    return attention_stats(**kwargs)


def rivals(case: Case, kwargs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Attention itself, which walks the same pairs; of a few queries at the end, without a mask."""
    attend = partial(
        scaled_dot_product_attention,
        *(kwargs["queries_BQSD"], kwargs["keys_BHTD"], torch.randn_like(kwargs["keys_BHTD"])),
        is_causal=case.asking == case.entries,
        scale=kwargs["scaling"],
        enable_gqa=True,
    )

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend()

    return {"sdpa": flash if kwargs["queries_BQSD"].is_cuda else attend}
