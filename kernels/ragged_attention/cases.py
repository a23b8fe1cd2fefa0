"""Cases of ragged attention: named shapes, inputs, check and rivals.

Inputs are hostile wherever they may be: free slots hold NaN keys, large values and positions of the far
future (of codes: scales that make them so), so that a kernel that reads them fails in every case.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from retain.kernels.backend import using
from retain.kernels.codes import SCALES, Codes, bytes_wide, decode, encode
from retain.kernels.measure import Claim, Cost, cast, wrong
from retain.kernels.ragged_attention import ragged_attention
from retain.kernels.ragged_attention.pages import PAGE, Pages, pages_for


class Held(NamedTuple):
    """How keys or values are held as codes.

    Args:
        bits: of a code.
        span: neighbouring channels of a value that share a scale; None: keys, of which `ENTRIES` in a row
            share one a channel.
    """

    bits: int
    span: int | None = None

    def bytes_of(self, width: int) -> float:
        """Bytes an entry."""
        scales = 2 * SCALES.itemsize * -(-width // (self.span or 1))
        return bytes_wide(width, self.bits) + (scales if self.span else 4 + scales / ENTRIES)


# Entries that share scales, side by side; KIVI's (arXiv 2402.02750) keys and values.
ENTRIES = 32
KIVI_4: dict[str, Any] = {"keys": Held(4), "values": Held(4, ENTRIES)}
KIVI_2: dict[str, Any] = {"keys": Held(2), "values": Held(2, ENTRIES)}


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        batch: B, sequences.
        kv_heads: H.
        group: G, query heads of a KV head.
        num_queries: S, of which the last is the newest entry of its row.
        width: D.
        lengths: entries held in each of the B * H rows, the queries' own among them.
        value_width: of the values, if it is another.
        soft_cap: on the logits.
        window: in positions.
        sinks: one more logit a query head.
        padded: sequence b has b * padded fewer queries than S: the first ones are padding.
        paged: rooms are whole pages, and the call knows them; else only offsets are known, of odd rooms.
        strided: queries and the store are views into something larger.
        weighted: log weights of the entries.
        keys: codes that keys are held as; None: numbers.
        values: codes that values are held as.
        lse: the log-sum-exp is asked for too.
    """

    batch: int
    kv_heads: int
    group: int
    num_queries: int
    width: int
    lengths: tuple[int, ...]
    value_width: int | None = None
    soft_cap: float | None = None
    window: int | None = None
    sinks: bool = False
    padded: int = 0
    paged: bool = True
    strided: bool = False
    weighted: bool = False
    keys: Held | None = None
    values: Held | None = None
    lse: bool = False

    def __post_init__(self) -> None:
        assert len(self.lengths) == self.batch * self.kv_heads

    @property
    def values_wide(self) -> int:
        return self.width if self.value_width is None else self.value_width

    @property
    def held(self) -> dict[str, Held | None]:
        return {"keys": self.keys, "values": self.values}

    def __str__(self) -> str:
        mean = sum(self.lengths) / len(self.lengths)
        shown = f"{min(self.lengths):,} to {max(self.lengths):,} entries a row, {mean:,.0f} on average"
        heads = f"{self.kv_heads * self.group} query and {self.kv_heads} KV heads of width {self.width}"
        bits = [f"{name} of {held.bits} bits" for name, held in self.held.items() if held is not None]
        return ", ".join([f"{self.batch} sequences, {heads}, {self.num_queries} queries, {shown}", *bits])


ALL: dict[str, Any] = {"soft_cap": 4.0, "window": 40, "sinks": True, "weighted": True}
CASES: dict[str, Case] = {
    "decode": Case(2, 2, 2, 1, 64, (7, 130, 8, 64)),
    "decode, all options": Case(2, 2, 4, 1, 64, (70, 130, 8, 64), **ALL),
    "decode, weighted": Case(2, 2, 2, 1, 64, (7, 130, 8, 64), weighted=True),
    "an empty row and a long one": Case(1, 3, 2, 1, 32, (0, 200, 1)),
    "all rows empty": Case(2, 1, 2, 3, 32, (0, 0)),
    "one entry a row": Case(1, 2, 2, 1, 33, (1, 1), sinks=True),
    "odd lengths, G = 7": Case(1, 2, 7, 1, 80, (65, 127)),
    "G = 1": Case(3, 1, 1, 2, 64, (5, 33, 71)),
    "G = 8, a turn of 5": Case(1, 2, 8, 5, 128, (13, 100)),
    "padded turn": Case(2, 2, 2, 5, 64, (70, 8, 129, 9), padded=3),
    "chunk of 40": Case(1, 2, 2, 40, 64, (40, 150)),
    "chunk of 40, all options": Case(
        2, 1, 4, 40, 33, (60, 130), soft_cap=5.0, window=30, sinks=True, padded=11, weighted=True
    ),
    "chunk of 40, weighted": Case(1, 2, 2, 40, 64, (40, 150), weighted=True),
    "wide heads": Case(1, 2, 2, 1, 256, (6, 100)),
    "values of another width": Case(1, 2, 2, 2, 64, (30, 70), value_width=40),
    "strided": Case(2, 2, 2, 3, 64, (70, 5, 66, 3), strided=True, window=50),
    "rooms that are no pages": Case(2, 2, 2, 3, 64, (70, 5, 0, 131), paged=False, window=60, weighted=True),
    "log-sum-exp": Case(2, 2, 2, 5, 64, (70, 0, 200, 9), padded=3, lse=True),
    "decode, 4 bits": Case(2, 2, 2, 1, 64, (7, 130, 8, 64), **KIVI_4),
    "decode, 4 bits, all options": Case(2, 2, 4, 1, 64, (70, 130, 8, 64), lse=True, **ALL, **KIVI_4),
    "keys of 20 channels, 2 bits": Case(
        1, 2, 7, 1, 20, (65, 127), value_width=64, keys=Held(2), values=Held(2, 24), lse=True
    ),
    "8 bits and 2": Case(1, 2, 2, 2, 128, (70, 0), keys=Held(8), values=Held(2, 32), lse=True),
    "values as codes alone": Case(1, 2, 2, 1, 33, (30, 70), values=Held(4, 64)),
    "keys as codes alone": Case(1, 2, 2, 1, 80, (30, 70), keys=Held(4)),
    "chunk of 40, 4 bits": Case(2, 1, 4, 40, 64, (60, 130), padded=11, **KIVI_4),
    "wide heads, 8 bits": Case(1, 1, 2, 1, 256, (100,), keys=Held(8), values=Held(8, 256)),
    "strided, 4 bits": Case(2, 2, 2, 3, 64, (70, 5, 0, 131), strided=True, paged=False, **KIVI_4),
}


def unequal(rows: int, mean: int, spread: float, seed: int = 0) -> tuple[int, ...]:
    """Lengths evenly from the shortest to the longest, which is `spread` times that, shuffled; `mean` on
    average."""
    shortest = 2 * mean / (1 + spread)
    steps = torch.linspace(shortest, spread * shortest, rows, dtype=torch.float64).round().long()
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return tuple(steps[order].tolist())


# 20 % of 128K tokens, head lengths spread 10 : 1.
_HELD = 26_214
SPEED: dict[str, dict[str, Case]] = {
    "cuda": {
        "decode": Case(8, 8, 4, 1, 128, unequal(64, _HELD, 10)),
        "decode, weighted": Case(8, 8, 4, 1, 128, unequal(64, _HELD, 10), weighted=True),
        "decode, 4 bits": Case(8, 8, 4, 1, 128, unequal(64, _HELD, 10), **KIVI_4),
        "decode, 2 bits": Case(8, 8, 4, 1, 128, unequal(64, _HELD, 10), **KIVI_2),
        "decode, one long row among empty ones": Case(8, 8, 4, 1, 128, (131_072, *[0] * 63)),
        "decode, one sequence": Case(1, 8, 4, 1, 128, unequal(8, _HELD, 10)),
        "a turn of 64": Case(8, 8, 4, 64, 128, unequal(64, _HELD, 10)),
        "a chunk of 2,048": Case(1, 8, 4, 2048, 128, unequal(8, _HELD, 10)),
    },
    "cpu": {
        "decode": Case(4, 8, 4, 1, 128, unequal(32, 819, 4)),
        "decode, weighted": Case(4, 8, 4, 1, 128, unequal(32, 819, 4), weighted=True),
        "a chunk of 128": Case(1, 8, 4, 128, 128, unequal(8, 819, 4)),
    },
}

DENSE = "dense SDPA, enable_gqa"
NUMBERS = "the op over the same rows as numbers"
CLAIMS: dict[str, list[Claim]] = {
    "cuda": [
        Claim("at least 80 % of the bandwidth of a copy", "copy", at_least=0.8, case="decode"),
        Claim("no slower than dense over as many bytes", DENSE, at_most=1.1, case="decode"),
        Claim("4 bits are read no slower than 16", NUMBERS, at_most=1.0, case="decode, 4 bits"),
        Claim("2 bits are read no slower than 16", NUMBERS, at_most=1.0, case="decode, 2 bits"),
    ],
    "cpu": [Claim("little slower than dense over as many entries", DENSE, at_most=1.3, case="decode")],
}


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of `ragged_attention`."""
    draw = torch.Generator(device=device).manual_seed(seed)
    B, H, S, R = case.batch, case.kv_heads, case.num_queries, len(case.lengths)
    Q = H * case.group

    def random(*shape: int) -> Tensor:
        wide = (*shape[:-1], shape[-1] + (3 if case.strided else 0))
        made = torch.randn(wide, generator=draw, device=device).to(dtype)
        return made[..., 1:-2] if case.strided else made

    if case.paged:
        counts = [pages_for(length + row % 3) for row, length in enumerate(case.lengths)]
        rooms = [PAGE * count for count in counts]
    else:
        rooms = [length + row % 3 for row, length in enumerate(case.lengths)]
    rest = 0 if case.paged else 5  # a store may end behind its last room
    starts, lengths = list(accumulate(rooms, initial=0)), case.lengths
    C = starts[-1] + rest
    keys_CD, values_CD = random(C, case.width), random(C, case.values_wide)
    positions_C = torch.full((C,), 2**31 - 1 - PAGE, dtype=torch.int32, device=device)
    weights_C = torch.full((C,), float("nan"), device=device)
    tokens = max(lengths) + 3
    free_C = torch.zeros(C, dtype=torch.bool, device=device)
    for row, length in enumerate(lengths):
        held, free = slice(starts[row], starts[row] + length), slice(starts[row] + length, starts[row + 1])
        if case.keys is None:
            keys_CD[free] = float("nan")
        if case.values is None:
            values_CD[free] = 1e4
        free_C[free] = True
        places = torch.randperm(tokens, generator=draw, device=device)[:length].sort().values
        positions_C[held] = places.to(torch.int32)
        weights_C[held] = torch.randint(1, 50, (length,), generator=draw, device=device).log()
    # Behind the pads of its sequence, each query sees one entry more than the one before, up to all.
    valid_BS = torch.arange(S, device=device) >= case.padded * torch.arange(B, device=device)[:, None] % S
    rank_RS = valid_BS.cumsum(-1).repeat_interleave(H, 0)
    lengths_R = torch.tensor(lengths, dtype=torch.int32, device=device)
    seen_RS = (lengths_R[:, None] - rank_RS[:, -1:] + rank_RS).clamp_min(0)
    seen_RS = seen_RS.masked_fill(~valid_BS.repeat_interleave(H, 0), 0)
    places = torch.arange(tokens - S, tokens, device=device).expand(B, S)
    return {
        # Heads beside one another for each query, as projections leave them.
        "queries_BQSD": random(B, S, Q, case.width).transpose(1, 2),
        "keys_CD": _coded(case, case.keys, keys_CD, free_C, float("nan")),
        "values_CD": _coded(case, case.values, values_CD, free_C, 1e4),
        "offsets_R1": torch.tensor(starts, device=device),
        "lengths_R": lengths_R,
        "seen_RS": seen_RS.view(R, S),
        "scaling": case.width**-0.5,
        "soft_cap": case.soft_cap,
        "sinks_Q": torch.linspace(-3.0, 3.0, Q, device=device).to(dtype) if case.sinks else None,
        "window": case.window,
        "positions_C": positions_C if case.window else None,
        "query_positions_BS": places if case.window else None,
        "pages": Pages.of(counts, device) if case.paged else None,
        "log_weight_C": weights_C if case.weighted else None,
        **({"with_lse": True} if case.lse else {}),
    }


def _coded(case: Case, held: Held | None, numbers_CD: Tensor, free_C: Tensor, least: float) -> Tensor | Codes:
    """A store as codes (None: as it is), whose free slots have scales that begin at `least`."""
    if held is None:
        return numbers_CD
    groups_C = None
    if held.span is None:  # numbered as they come to be laid out, backwards here
        groups_C = (torch.arange(len(free_C), device=free_C.device) // ENTRIES).flip(0)
        groups_C = groups_C.masked_fill(free_C, int(groups_C.max()) + 1)
    codes = encode(numbers_CD, held.bits, held.span or 1, groups_C)
    codes.codes_CW[free_C] = 255
    codes.scales_G2N[free_C if groups_C is None else groups_C[free_C].long(), 1] = least
    if not case.strided:
        return codes
    wide = codes.codes_CW.new_zeros(codes.codes_CW.shape[0], codes.codes_CW.shape[1] + 3)
    wide[:, 1:-2] = codes.codes_CW
    return codes._replace(codes_CW=wide[:, 1:-2])


def numbers_of(store_CD: Tensor | Codes, dtype: torch.dtype, held: slice = slice(None)) -> Tensor:
    """These entries of a store, as numbers."""
    return decode(store_CD.part(held), dtype) if isinstance(store_CD, Codes) else store_CD[held].to(dtype)


def run(case: Case, kwargs: Mapping[str, Any]) -> Any:
    """The op."""
    return ragged_attention(**kwargs)


def cost(case: Case, dtype: torch.dtype) -> Cost:
    """Held entries and queries are read once, outputs are written once."""
    S, size = case.num_queries, dtype.itemsize
    both = case.width + case.values_wide
    entry = sum(
        size * wide if as_codes is None else as_codes.bytes_of(wide)
        for wide, as_codes in ((case.width, case.keys), (case.values_wide, case.values))
    )
    # Causal at a row's end: the first of S queries sees S - 1 fewer than the last.
    seen = sum(S * length - S * (S - 1) // 2 if length >= S else length**2 // 2 for length in case.lengths)
    held, queries = sum(case.lengths), len(case.lengths) * case.group * S
    read = held * entry + size * queries * both + 4 * held * case.weighted + 4 * queries * case.lse
    flops = 2 * case.group * seen * both
    return Cost(float(flops), float(read))


def plain(case: Case, kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, row by row, in one precision throughout."""
    queries_BQSD, seen_RS, window = kwargs["queries_BQSD"], kwargs["seen_RS"], case.window
    B, Q, S, _ = queries_BQSD.shape
    G, cap = case.group, case.soft_cap
    out_RGSD = queries_BQSD.new_zeros(B * Q // G, G, S, case.values_wide, dtype=dtype)
    lse_RGS = out_RGSD.new_full(out_RGSD.shape[:3], float("-inf"))
    queries_RGSD = queries_BQSD.reshape(-1, G, S, case.width).to(dtype)
    sinks_Q = kwargs["sinks_Q"]
    for row, (start, length) in enumerate(zip(kwargs["offsets_R1"].tolist(), case.lengths, strict=False)):
        if not length and sinks_Q is None:
            continue
        held = slice(start, start + length)
        keys_TD, values_TD = (numbers_of(kwargs[name], dtype, held) for name in ("keys_CD", "values_CD"))
        logits_GST = queries_RGSD[row] @ keys_TD.T * kwargs["scaling"]
        if cap is not None:
            logits_GST = cap * torch.tanh(logits_GST / cap)
        if case.weighted:
            logits_GST = logits_GST + kwargs["log_weight_C"][held].to(dtype)
        shown_ST = torch.arange(length, device=keys_TD.device) < seen_RS[row, :, None]
        if window is not None:
            oldest_S1 = kwargs["query_positions_BS"][row // case.kv_heads, :, None] - window
            shown_ST = shown_ST & (kwargs["positions_C"][held] > oldest_S1)
        logits_GST = logits_GST.masked_fill(~shown_ST, float("-inf"))
        if sinks_Q is not None:
            sinks_HG = sinks_Q.to(dtype).view(-1, G)
            sink_GS1 = sinks_HG[row % case.kv_heads, :, None, None].expand(-1, S, -1)
            logits_GST = torch.cat([logits_GST, sink_GS1], -1)
        probs_GST = torch.softmax(logits_GST, -1)[..., :length].masked_fill(~shown_ST, 0.0)
        out_RGSD[row] = probs_GST @ values_TD
        lse_RGS[row] = logits_GST.logsumexp(-1)
    return out_RGSD.view(B, Q, S, -1), lse_RGS.view(B, Q, S)


def check(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> str | None:
    """Compares the op with the reference in float64."""
    kwargs = inputs(case, dtype, device, seed)
    with using("reference"):
        exact = ragged_attention(**cast(kwargs, torch.float64))
    found, simple = run(case, kwargs), plain(case, kwargs, dtype)
    if not case.lse:
        return wrong(found, exact, simple[0], dtype=dtype, what="output")
    pairs = zip(("output", "log-sum-exp"), found, exact, simple, strict=True)
    problems = (wrong(one, true, other, dtype=dtype, what=what) for what, one, true, other in pairs)
    return "; ".join(problem for problem in problems if problem is not None) or None


def rivals(case: Case, kwargs: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Other ways to the same attention, or to as much of it, on the device of these inputs."""
    queries_BQSD = kwargs["queries_BQSD"]
    calls = {DENSE: _dense(case, queries_BQSD)}
    if case.keys is not None or case.values is not None:
        rows = {name: numbers_of(kwargs[name], queries_BQSD.dtype) for name in ("keys_CD", "values_CD")}
        calls |= {NUMBERS: lambda: ragged_attention(**{**kwargs, **rows})}
    elif case.soft_cap is None and case.window is None and not case.sinks and not case.weighted:
        calls |= _padded(case, kwargs)
    if queries_BQSD.is_cuda:

        def by_reference() -> Any:
            with using("reference"):
                return ragged_attention(**kwargs)

        calls |= {"the reference": by_reference}
    return calls


def _dense(case: Case, queries_BQSD: Tensor) -> Callable[[], Any]:
    """A dense cache of equal rows which holds the same total."""
    B, H, S = case.batch, case.kv_heads, case.num_queries
    T = max(S, sum(case.lengths) // len(case.lengths))
    keys = queries_BQSD.new_empty(B, H, T, case.width).normal_()
    values = queries_BQSD.new_empty(B, H, T, case.values_wide).normal_()
    mask = causal_lower_right(S, T) if S > 1 else None
    return lambda: scaled_dot_product_attention(queries_BQSD, keys, values, mask, enable_gqa=True)


def _rows(case: Case, kwargs: Mapping[str, Any], name: str) -> list[Tensor]:
    """Held entries of each row."""
    starts = kwargs["offsets_R1"].tolist()
    return [kwargs[name][start : start + n] for start, n in zip(starts, case.lengths, strict=False)]


def _padded(case: Case, kwargs: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Every row as long as the longest, and a mask: what is done where rows cannot be ragged."""
    G, S, longest = case.group, case.num_queries, max(case.lengths)
    if len(case.lengths) * longest > 4 * sum(case.lengths) or S > 64:
        return {}  # far more memory than a store's
    keys, values = (
        torch.stack([pad(row, (0, 0, 0, longest - len(row))) for row in _rows(case, kwargs, name)])[:, None]
        for name in ("keys_CD", "values_CD")
    )
    entry_T = torch.arange(longest, device=keys.device)
    shown_RST = entry_T < kwargs["seen_RS"][..., None]
    mask = shown_RST[:, None, None].expand(-1, -1, G, -1, -1).flatten(2, 3)
    queries = kwargs["queries_BQSD"].reshape(-1, 1, G * S, case.width)
    return {"padded rows, SDPA and a mask": lambda: scaled_dot_product_attention(queries, keys, values, mask)}
