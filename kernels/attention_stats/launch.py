"""Launches the kernels of attention statistics.

Work is cut by a table (`tile`), without tuning at run time, so that the same call is computed in the same
way every time. Nothing waits for the device: properties that the host cannot know (whether padding exists,
where places have gaps) are masked on it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retain.kernels import backend
from retain.kernels.attention_stats import kernel
from retain.kernels.attention_stats.reference import Call, empty_outputs
from retain.kernels.backend import LOG2E
from retain.kernels.build import Tile

# So many queries, or keys, are a whole number of tiles.
WHOLE = 128


def tile(
    kernel: str,
    dtype: torch.dtype,
    block: int,
    arch: int,
    num_queries: int,
    *,
    busy: bool = False,
    heads: int = 1,
) -> Tile:
    """The tile of a kernel: queries (in the first pass rows: a query and a query head) by keys.

    Args:
        kernel: `lse` or `stats`.
        dtype: of queries and keys.
        block: the head width, as a power of two.
        arch: whose table: 90 for Hopper, 80 for all others (`backend.architecture`).
        num_queries: S, in the first pass rows of a KV head, G * S.
        busy: whether much more than a maximum is made of a probability: then registers are short.
        heads: query heads that a program of the second pass takes.
    """
    few, large = num_queries <= 32, arch == 90
    if dtype == torch.float32:
        # Products by plain multiply-adds, whose operands are registers.
        return Tile(16 if few else 32, 32 if block <= 128 else 16, 4, 2)
    if few:
        return Tile(32, 128 if block <= 128 else 64, 4, 2)
    if busy and large:
        return Tile(64, 64, 4, 2) if kernel == "lse" else Tile(64, 128, 8, 2)
    # Where registers are bounded, it is for two programs to a multiprocessor: one multiplies while the other
    # takes exponentials and maxima.
    if kernel == "lse":
        if block <= 128:
            return Tile(128, 128, 8, 2, 128) if large else Tile(128, 64, 8, 3)
        return Tile(128, 64, 8, 2) if large else Tile(64, 64, 8, 1)
    if block <= 128:
        if large and heads == 1:
            return Tile(128, 128, 8, 2, 128)
        return Tile(64, 128, 8, 3)
    return Tile(64, 128, 8, 2) if large else Tile(64, 64, 8, 1)


@torch.no_grad()
def attention_stats(call: Call) -> dict[str, Tensor]:
    """Each wanted statistic, as the reference's."""
    with torch.cuda.device_of(call.keys_BHTD):
        return _launch(call)


def _launch(call: Call) -> dict[str, Tensor]:
    found = empty_outputs(call, filled=False)
    S = call.queries_BQSD.shape[2]
    shift_BQS = _rows(call, float("-inf"))
    if call.lse_BQS is None:
        _first_pass(call, shift_BQS)
    else:
        shift_BQS[..., :S] = _as_shift(call.lse_BQS, call.asks_BS)
    if "lse" in found:
        # As minus infinity says in either that a row pays nothing.
        rows = shift_BQS[..., :S]
        found["lse"] = torch.where(rows == float("-inf"), rows, rows * (-1 / LOG2E))
    if set(found) == {"lse"}:
        return found
    _stats(call, shift_BQS, found)
    return found


def _as_shift(lse_BQS: Tensor, asks_BS: Tensor | None) -> Tensor:
    """A known log-sum-exp as kernels take it: minus it, in units of log 2; -inf where nothing is paid."""
    nothing = lse_BQS == float("-inf")
    if asks_BS is not None:
        nothing = nothing | ~asks_BS[:, None]
    return torch.where(nothing, float("-inf"), lse_BQS.float() * -LOG2E)


def _rows(call: Call, rest: float) -> Tensor:
    """A number for each row, `[B, Q, S...]`, not written yet but for what fills the last block of queries."""
    B, Q, S, _ = call.queries_BQSD.shape
    rows = call.queries_BQSD.new_empty((B, Q, -(-S // WHOLE) * WHOLE), dtype=torch.float32)
    rows[..., S:] = rest
    return rows


def _shared(call: Call) -> dict[str, Any]:
    """Arguments of all kernels that walk keys."""
    queries, keys = call.queries_BQSD, call.keys_BHTD
    B, Q, S, D = queries.shape
    H, T = keys.shape[1:3]
    capped = call.soft_cap is not None
    return {
        "Q": queries,
        "K": keys,
        **_exists(call),
        **_strides("q", "bqsd", queries.stride()),
        **_strides("k", "bhtd", keys.stride()),
        "BH": B * H,
        "H": H,
        "G": Q // H,
        "S": S,
        "stride_row": -(-S // WHOLE) * WHOLE,
        "T": T,
        "first": call.first,
        "scale": call.scaling * LOG2E,
        "soft_cap": (call.soft_cap or 0.0) * LOG2E,
        "D": D,
        "BLOCK_D": backend.block_of(D),
        "HAS_CAP": capped,
        "PRECISION": backend.dot_precision(keys.dtype),
        "UPCAST": backend.upcast(keys.dtype),
    }


def _strides(letter: str, axes: str, strides: Sequence[int]) -> dict[str, int]:
    """By the names that kernels have for them."""
    return {f"stride_{letter}{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


def _exists(call: Call) -> dict[str, Any]:
    """The mask of held entries, padded to the end of the last tile of keys."""
    if call.exists_BHT is None:
        return {"EXISTS": None, "stride_eb": 0, "stride_eh": 0}
    B, heads, T = call.exists_BHT.shape
    exists = call.exists_BHT.new_zeros((B, heads, -(-T // WHOLE) * WHOLE), dtype=torch.uint8)
    exists[..., :T] = call.exists_BHT
    head_stride = exists.stride(1) if heads > 1 else 0
    return {"EXISTS": exists, "stride_eb": exists.stride(0), "stride_eh": head_stride}


def _tile_of(name: str, call: Call, num_queries: int, heads: int = 1) -> Tile:
    keys = call.keys_BHTD
    busy = call.soft_cap is not None
    if name != "lse":
        busy = busy or "entropy" in call.wanted or "last" in call.wanted
    block = backend.block_of(keys.shape[3])
    return tile(name, keys.dtype, block, backend.architecture(keys), num_queries, busy=busy, heads=heads)


def _options(cut: Tile) -> dict[str, int | None]:
    return {"BLOCK_M": cut.m, "BLOCK_N": cut.n, "maxnreg": cut.registers, **cut.options}


def _first_pass(call: Call, shift_BQS: Tensor) -> None:
    """The first pass."""
    keys = call.keys_BHTD
    B, Q, S, _ = call.queries_BQSD.shape
    H = keys.shape[1]
    rows = Q // H * S
    cut = _tile_of("lse", call, rows)
    asks_BS = None if call.asks_BS is None else call.asks_BS.view(torch.uint8)
    asks = {"ASKS": asks_BS, **_strides("a", "bs", (0, 0) if asks_BS is None else asks_BS.stride())}
    sinks = {"SINKS": call.sinks_Q, "stride_sinks": 0 if call.sinks_Q is None else call.sinks_Q.stride(0)}
    grid = (-(-rows // cut.m) * B * H,)
    kernel.lse_kernel[grid](**_shared(call), **sinks, **asks, SHIFT=shift_BQS, **_options(cut))


def _outputs(found: dict[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor | None]:
    return {name.upper(): found.get(name) for name in names}


def _stats(call: Call, shift_BQS: Tensor, found: dict[str, Tensor]) -> None:
    """The second pass."""
    B, Q, S, _ = call.queries_BQSD.shape
    H = call.keys_BHTD.shape[1]
    G, k0, k1 = Q // H, *call.keys
    heads = G if call.group else 1
    cut = _tile_of("stats", call, S, heads)
    programs = -(-(k1 - k0) // cut.n) * B * H * (G // heads)
    least_BQS = None
    if call.least_BQS is not None:
        least_BQS = _rows(call, float("inf"))
        least_BQS[..., :S] = call.least_BQS
        if call.asks_BS is not None:
            # A query that is not there accesses nothing.
            least_BQS[..., :S].masked_fill_(~call.asks_BS[:, None], float("inf"))
    kernel.stats_kernel[(programs,)](
        **_shared(call),
        **{"k0": k0, "k1": k1, "GROUP": call.group},
        SHIFT=shift_BQS,
        LEAST=least_BQS,
        BLANKS=call.asks_BS is not None,
        **_outputs(found, ("max", "sum", "scatter", "entropy", "last")),
        distance=call.distance,
        HEADS=heads,
        **_options(cut),
    )
