"""Launches the kernels of attention statistics.

Work is cut by a table (`tile`), without tuning at run time, so that the same call is computed in the same
way every time. Nothing waits for the device: properties that the host cannot know (whether padding exists,
where places have gaps) are masked on it.
"""

from typing import Any

import torch
from torch import Tensor

from retain.kernels import backend
from retain.kernels.attention_stats import kernel
from retain.kernels.attention_stats.reference import Call
from retain.kernels.backend import LOG2E
from retain.kernels.build import Tile

# So many queries, or keys, are a whole number of tiles.
WHOLE = 128


def tile(
    kernel: str, dtype: torch.dtype, block: int, arch: int, num_queries: int, *, busy: bool = False
) -> Tile:
    """The tile of a kernel: queries (in the first pass rows: a query and a query head) by keys.

    Args:
        kernel: `lse` or `stats`.
        dtype: of queries and keys.
        block: the head width, as a power of two.
        arch: whose table: 90 for Hopper, 80 for all others (`backend.architecture`).
        num_queries: S, in the first pass rows of a KV head, G * S.
        busy: whether much more than a maximum is made of a probability: then registers are short.
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
    if block > 128:
        rows = 128 if kernel == "lse" else 64
        return Tile(rows, 192 - rows, 8, 2) if large else Tile(64, 64, 8, 1)
    if large:
        return Tile(128, 128, 8, 2, 128)
    return Tile(128, 64, 8, 3) if kernel == "lse" else Tile(64, 128, 8, 3)


@torch.no_grad()
def attention_stats(call: Call) -> dict[str, Tensor]:
    """Each wanted statistic, as the reference's."""
    keys, wanted = call.keys_BHTD, [name for name in call.wanted if name != "lse"]
    (B, Q, S, _), H = call.queries_BQSD.shape, keys.shape[1]
    types = {name: torch.int64 if name == "last" else torch.float32 for name in wanted}
    found = {name: keys.new_empty((B, Q, call.entries), dtype=dtype) for name, dtype in types.items()}
    with torch.cuda.device_of(keys):
        shift_BQS = _rows(call, float("-inf"))
        if call.lse_BQS is None:
            _first_pass(call, shift_BQS)
        else:
            nothing = call.lse_BQS == float("-inf")
            if call.asks_BS is not None:
                nothing = nothing | ~call.asks_BS[:, None]
            shift_BQS[..., :S] = torch.where(nothing, float("-inf"), call.lse_BQS.float() * -LOG2E)
        if wanted:
            _second_pass(call, shift_BQS, found)
    if call.group:
        by_group = {name: one.unflatten(1, (H, -1)) for name, one in found.items()}
        found = {
            name: one.amax(2) if name in ("max", "last") else one.sum(2) for name, one in by_group.items()
        }
    if "lse" in call.wanted:
        # As minus infinity says in either that a row pays nothing.
        rows = shift_BQS[..., :S]
        found["lse"] = torch.where(rows == float("-inf"), rows, rows * (-1 / LOG2E))
    return found


def _rows(call: Call, rest: float) -> Tensor:
    """A number for each row, `[B, Q, S...]`, not written yet but for what fills the last block of queries: of
    minus its log-sum-exp, in units of log 2, -inf where nothing is paid."""
    B, Q, S, _ = call.queries_BQSD.shape
    rows = call.queries_BQSD.new_empty((B, Q, -(-S // WHOLE) * WHOLE), dtype=torch.float32)
    rows[..., S:] = rest
    return rows


def _shared(call: Call, cut: Tile) -> dict[str, Any]:
    """Arguments of both kernels."""
    queries, keys = call.queries_BQSD, call.keys_BHTD
    B, Q, S, D = queries.shape
    H, T = keys.shape[1:3]
    exists = None
    if call.exists_BHT is not None:  # padded to the end of the last tile of keys
        heads = call.exists_BHT.shape[1]
        exists = call.exists_BHT.new_zeros((B, heads, -(-T // WHOLE) * WHOLE), dtype=torch.uint8)
        exists[..., :T] = call.exists_BHT
        exists = exists.expand(-1, H, -1)  # one head may stand for all
    return {
        "Q": queries,
        "K": keys,
        "EXISTS": exists,
        **_strides("q", "bqsd", queries),
        **_strides("k", "bhtd", keys),
        **_strides("e", "bh", exists),
        **{"BH": B * H, "H": H, "G": Q // H, "S": S, "T": T, "first": call.first},
        "stride_row": -(-S // WHOLE) * WHOLE,
        "scale": call.scaling * LOG2E,
        "soft_cap": (call.soft_cap or 0.0) * LOG2E,
        "D": D,
        "BLOCK_D": backend.block_of(D),
        "HAS_CAP": call.soft_cap is not None,
        "PRECISION": backend.dot_precision(keys.dtype),
        "UPCAST": backend.upcast(keys.dtype),
        **{"BLOCK_M": cut.m, "BLOCK_N": cut.n, "maxnreg": cut.registers},
        **cut.options,
    }


def _strides(letter: str, axes: str, tensor: Tensor | None) -> dict[str, int]:
    """By the names that kernels have for them."""
    strides = [0] * len(axes) if tensor is None else tensor.stride()
    return {f"stride_{letter}{axis}": stride for axis, stride in zip(axes, strides, strict=False)}


def _tile_of(name: str, call: Call, num_queries: int) -> Tile:
    keys, busy = call.keys_BHTD, call.soft_cap is not None
    if name != "lse":
        busy = busy or "entropy" in call.wanted or "last" in call.wanted
    block = backend.block_of(keys.shape[3])
    return tile(name, keys.dtype, block, backend.architecture(keys), num_queries, busy=busy)


def _first_pass(call: Call, shift_BQS: Tensor) -> None:
    """Writes minus the log-sum-exp of each row."""
    (B, Q, S, _), H = call.queries_BQSD.shape, call.keys_BHTD.shape[1]
    rows = Q // H * S
    cut = _tile_of("lse", call, rows)
    asks = None if call.asks_BS is None else call.asks_BS.view(torch.uint8)
    kernel.lse_kernel[(-(-rows // cut.m) * B * H,)](
        **_shared(call, cut),
        **{"SINKS": call.sinks_Q, "stride_sinks": 0 if call.sinks_Q is None else call.sinks_Q.stride(0)},
        **{"ASKS": asks, "SHIFT": shift_BQS, **_strides("a", "bs", asks)},
    )


def _second_pass(call: Call, shift_BQS: Tensor, found: dict[str, Tensor]) -> None:
    """Writes statistics, of each query head."""
    B, Q, S, _ = call.queries_BQSD.shape
    cut = _tile_of("stats", call, S)
    least_BQS = None
    if call.least_BQS is not None:
        least_BQS = _rows(call, float("inf"))
        least_BQS[..., :S] = call.least_BQS
        if call.asks_BS is not None:
            # A query that is not there accesses nothing.
            least_BQS[..., :S].masked_fill_(~call.asks_BS[:, None], float("inf"))
    kernel.stats_kernel[(-(-call.entries // cut.n) * B * Q,)](
        **_shared(call, cut),
        **{"SHIFT": shift_BQS, "LEAST": least_BQS, "BLANKS": call.asks_BS is not None},
        **{name.upper(): found.get(name) for name in ("max", "sum", "scatter", "entropy", "last")},
        **{"entries": call.entries, "distance": call.distance},
    )
