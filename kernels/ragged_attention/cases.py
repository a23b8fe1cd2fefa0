"""Cases of ragged attention: named shapes, inputs and rivals.

Inputs are hostile wherever they may be: free slots hold NaN keys, and large values
(of codes: scales that make them so), so that a kernel that reads them fails in every case.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from retain.kernels.codes import SCALES, Codes, bytes_wide, decode, encode
from retain.kernels.measure import Claim
from retain.kernels.ragged_attention import ragged_attention
from retain.kernels.ragged_attention.pages import PAGE, Pages, pages_for

# Entries that share the scales of their keys, side by side.
ENTRIES = 32
# Results round once; where the op runs on a GPU, nothing waits for the host.
ROUNDING, GRAPHED = (1, None), True


@dataclass(frozen=True)
class Case:
    """A call.

    Args:
        batch, kv_heads, group, num_queries, width: B, H, G, S and D; the last query is the newest entry of
            its row.
        lengths: entries held in each of the B * H rows, the queries' among them.
        value_width: of the values, if it is another.
        soft_cap: as the op has it.
        sinks, weighted: whether there are sinks and log weights.
        padded: sequence b has b * padded fewer queries than S: the first ones are padding.
        strided: queries and the store are views into something larger.
        bits: of codes that keys and values are held as; 0: numbers.
        span: neighbouring channels of a coded value that share a scale.
    """

    batch: int
    kv_heads: int
    group: int
    num_queries: int
    width: int
    lengths: tuple[int, ...]
    value_width: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    padded: int = 0
    strided: bool = False
    weighted: bool = False
    bits: int = 0
    span: int = 32

    @property
    def values_wide(self) -> int:
        return self.width if self.value_width is None else self.value_width


ALL: dict[str, Any] = {"soft_cap": 4.0, "sinks": True, "weighted": True}
CASES: dict[str, Case] = {
    "decode": Case(2, 2, 2, 1, 64, (7, 130, 8, 64)),
    "decode, all options": Case(2, 2, 4, 1, 64, (70, 130, 8, 64), **ALL),
    "an empty row and a long one": Case(1, 3, 2, 1, 32, (0, 200, 1)),
    "all rows empty": Case(2, 1, 2, 3, 32, (0, 0)),
    "one entry a row": Case(1, 2, 2, 1, 33, (1, 1), sinks=True),
    "odd lengths, G = 7": Case(1, 2, 7, 1, 80, (65, 127)),
    "G = 1": Case(3, 1, 1, 2, 64, (5, 33, 71)),
    "G = 8, a turn of 5": Case(1, 2, 8, 5, 128, (13, 100), weighted=True),
    "padded turn": Case(2, 2, 2, 5, 64, (70, 8, 129, 9), padded=3),
    "chunk of 40": Case(1, 2, 2, 40, 64, (40, 150)),
    "chunk of 40, all options": Case(2, 1, 4, 40, 33, (60, 130), padded=11, **ALL),
    "wide heads": Case(1, 2, 2, 1, 256, (6, 100)),
    "values of another width": Case(1, 2, 2, 2, 64, (30, 70), value_width=40),
    "strided": Case(2, 2, 2, 3, 64, (70, 5, 66, 3), strided=True),
    "decode, 4 bits": Case(2, 2, 2, 1, 64, (7, 130, 8, 64), bits=4),
    "4 bits, all options": Case(2, 2, 4, 1, 64, (70, 130, 8, 64), bits=4, **ALL),
    "8 bits": Case(1, 2, 2, 2, 128, (70, 0), bits=8),
    "2 bits, a span of all": Case(1, 2, 2, 1, 33, (30, 70), bits=2, span=33),
    "chunk of 40, 4 bits": Case(2, 1, 4, 40, 64, (60, 130), padded=11, bits=4),
    "wide heads, 8 bits": Case(1, 1, 2, 1, 256, (100,), bits=8),
    "strided, 2 bits": Case(2, 2, 2, 3, 64, (70, 5, 0, 131), strided=True, bits=2),
}


def unequal(rows: int, mean: int, spread: float) -> tuple[int, ...]:
    """Lengths evenly from the shortest to the longest, which is `spread` times that, shuffled."""
    shortest = 2 * mean / (1 + spread)
    steps = torch.linspace(shortest, spread * shortest, rows, dtype=torch.float64).round().long()
    return tuple(steps[torch.randperm(rows, generator=torch.Generator().manual_seed(0))].tolist())


# 20 % of 128K tokens, head lengths spread 10 : 1.
_HELD = 26_214
SPEED: dict[str, dict[str, Case]] = {
    "cuda": {
        "decode": Case(8, 8, 4, 1, 128, unequal(64, _HELD, 10)),
        "decode, 4 bits": Case(8, 8, 4, 1, 128, unequal(64, _HELD, 10), bits=4),
        "decode, one sequence": Case(1, 8, 4, 1, 128, unequal(8, _HELD, 10)),
        "a turn of 64": Case(8, 8, 4, 64, 128, unequal(64, _HELD, 10)),
        "a chunk of 2,048": Case(1, 8, 4, 2048, 128, unequal(8, _HELD, 10)),
    },
    "cpu": {"decode": Case(4, 8, 4, 1, 128, unequal(32, 819, 4))},
}
DENSE, NUMBERS = "dense SDPA, enable_gqa", "the op over the same rows as numbers"
CLAIMS = [
    Claim("decode", "copy", 0.8),
    Claim("decode", DENSE, 1.1),
    Claim("decode, 4 bits", NUMBERS, 1.0),
]
_HALF, _FULL = torch.bfloat16, torch.float32
# Calls that are compiled ahead of time: decoding, few queries and many, heads of every width, with all
# options and with none, over numbers and over codes; a row of 200 entries is cut.
BUILDS: list[tuple[torch.dtype, Case]] = [
    *((_HALF, Case(1, 1, 4, S, D, (200,))) for D in (64, 128, 256) for S in (1, 16, 128)),
    *((_FULL, Case(1, 1, 4, S, D, (200,))) for D in (64, 128, 256) for S in (1, 16)),
    *((_HALF, Case(1, 1, 4, S, 128, (200,), bits=4, **ALL)) for S in (1, 16, 128)),
    *((_HALF, Case(1, 1, 4, 1, 128, (200,), bits=bits)) for bits in (8, 2)),
    *((_HALF, Case(1, 1, 4, 1, D, (200,), bits=4)) for D in (64, 256)),
    (_HALF, Case(1, 1, 4, 128, 128, (200,), **ALL)),
    (_FULL, Case(1, 1, 4, 1, 128, (200,), bits=4)),
    (_HALF, Case(1, 1, 4, 1, 192, (200,), value_width=128)),
    (torch.float16, Case(1, 1, 4, 16, 80, (200,))),
]


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of `ragged_attention`."""
    draw = torch.Generator(device=device).manual_seed(seed)
    B, H, S, R = case.batch, case.kv_heads, case.num_queries, len(case.lengths)

    def random(*shape: int) -> Tensor:
        wide = (*shape[:-1], shape[-1] + 3 * case.strided)
        made = torch.randn(wide, generator=draw, device=device).to(dtype)
        return made[..., 1:-2] if case.strided else made

    counts = [pages_for(length + row % 3) for row, length in enumerate(case.lengths)]
    starts = list(accumulate((PAGE * count for count in counts), initial=0))
    C = starts[-1]
    keys_CD, values_CD, free_C = random(C, case.width), random(C, case.values_wide), torch.ones(C).bool()
    weights_C = torch.full((C,), float("nan"), device=device)
    for start, length in zip(starts, case.lengths, strict=False):
        held = slice(start, start + length)
        free_C[held] = False
        weights_C[held] = torch.randint(1, 50, (length,), generator=draw, device=device).log()
    free_C = free_C.to(device)
    # Behind the pads of its sequence, each query sees one entry more than the one before, up to all.
    valid_BS = torch.arange(S, device=device) >= case.padded * torch.arange(B, device=device)[:, None] % S
    rank_RS = valid_BS.cumsum(-1).repeat_interleave(H, 0)
    lengths_R = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    seen_RS = (lengths_R[:, None] - rank_RS[:, -1:] + rank_RS).clamp_min(0)
    return {
        # Heads side by side for each query, as projections leave them.
        "queries_BQSD": random(B, S, H * case.group, case.width).transpose(1, 2),
        "keys_CD": _held(case, keys_CD, free_C, float("nan"), None),
        "values_CD": _held(case, values_CD, free_C, 1e4, case.span),
        "offsets_R1": torch.tensor(starts, device=device),
        "seen_RS": seen_RS.masked_fill(~valid_BS.repeat_interleave(H, 0), 0).view(R, S),
        "scaling": case.width**-0.5,
        "soft_cap": case.soft_cap,
        "sinks_Q": torch.linspace(-3, 3, H * case.group, device=device).to(dtype) if case.sinks else None,
        "pages": Pages.of(counts, device),
        "log_weight_C": weights_C if case.weighted else None,
    }


def _held(case: Case, numbers_CD: Tensor, free_C: Tensor, least: float, span: int | None) -> Tensor | Codes:
    """A store whose free slots hold numbers from `least` on; as codes, if there are bits. Keys, without a
    span, share scales between `ENTRIES` entries."""
    if not case.bits:
        numbers_CD[free_C] = least
        return numbers_CD
    groups_C = None
    if span is None:  # numbered as they come to be laid out, backwards here
        groups_C = (torch.arange(len(free_C), device=free_C.device) // ENTRIES).flip(0)
        groups_C = groups_C.masked_fill(free_C, int(groups_C.max()) + 1)
    codes = encode(numbers_CD, case.bits, span or 1, groups_C)
    codes.codes_CW[free_C] = 255
    codes.scales_G2N[free_C if groups_C is None else groups_C[free_C].long(), 1] = least
    if not case.strided:
        return codes
    wide = codes.codes_CW.new_zeros(codes.codes_CW.shape[0], codes.codes_CW.shape[1] + 3)
    wide[:, 1:-2] = codes.codes_CW
    return codes._replace(codes_CW=wide[:, 1:-2])


def numbers_of(store_CD: Tensor | Codes, dtype: torch.dtype) -> Tensor:
    """A store as numbers."""
    return decode(store_CD, dtype) if isinstance(store_CD, Codes) else store_CD.to(dtype)


def run(case: Case, kwargs: Mapping[str, Any]) -> Any:
    """The op."""
    return ragged_attention(**kwargs)


def entry_bytes(case: Case, size: int) -> float:
    """Bytes of an entry that are read: numbers of that size, or codes with their scales."""
    scales = 2 * SCALES.itemsize
    if not case.bits:
        return size * (case.width + case.values_wide) + 4 * case.weighted
    keys = bytes_wide(case.width, case.bits) + 4 + scales * case.width / ENTRIES
    values = bytes_wide(case.values_wide, case.bits) + scales * -(-case.values_wide // case.span)
    return keys + values + 4 * case.weighted


def least_bytes(case: Case, dtype: torch.dtype) -> float:
    """Held entries and queries are read once, outputs are written once."""
    wide = dtype.itemsize * (case.width + case.values_wide) + 4
    queries = len(case.lengths) * case.group * case.num_queries * wide
    return sum(case.lengths) * entry_bytes(case, dtype.itemsize) + queries


def rivals(case: Case, kwargs: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """A dense cache of equal rows which holds the same total; and numbers in place of codes."""
    queries_BQSD = kwargs["queries_BQSD"]
    S, T = case.num_queries, max(case.num_queries, sum(case.lengths) // len(case.lengths))
    keys, values = (queries_BQSD.new_empty(case.batch, case.kv_heads, T, case.width).normal_() for _ in "kv")
    mask = causal_lower_right(S, T) if S > 1 else None
    calls: dict[str, Callable[[], Any]]
    calls = {DENSE: lambda: scaled_dot_product_attention(queries_BQSD, keys, values, mask, enable_gqa=True)}
    if case.bits:
        rows = {name: numbers_of(kwargs[name], queries_BQSD.dtype) for name in ("keys_CD", "values_CD")}
        calls[NUMBERS] = lambda: ragged_attention(**{**kwargs, **rows})
    return calls
