"""Launches the kernels of attention statistics, and lists their builds.

Nothing waits for the device: properties that the host cannot know (whether padding exists, where places have
gaps) are masked on it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retain.kernels import backend
from retain.kernels.attention_stats import kernel
from retain.kernels.attention_stats.reference import Call, empty_outputs
from retain.kernels.attention_stats.tiles import WHOLE, tile
from retain.kernels.backend import LOG2E, TYPES
from retain.kernels.build import ARCHS, Build, Tile


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
        own = shift_BQS[..., :S]
        found["lse"] = torch.where(own == float("-inf"), own, own * (-1 / LOG2E))
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
    windowed = 0
    if call.window is not None:
        windowed = int(kernel.BY_ENTRY if call.place_BT is None else kernel.BY_PLACE)
    capped = call.soft_cap is not None
    return {
        "Q": queries,
        "K": keys,
        **_exists(call),
        **_field("PLACE", "p", call.place_BT if windowed else None, (B, T)),
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
        "window": call.window or 0,
        "D": D,
        "BLOCK_D": backend.block_of(D),
        "WINDOW": windowed,
        "HAS_CAP": capped,
        "PRECISION": backend.dot_precision(keys.dtype),
        "UPCAST": backend.upcast(keys.dtype),
    }


def _field(name: str, letter: str, tensor: Tensor | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """A tensor and its strides, by the names that kernels have for them; an axis of one stands for all."""
    axes = {"a": "bs", "p": "bt"}[letter]
    if tensor is None:
        return {name: None, **_strides(letter, axes, [0] * len(axes))}
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    return {name: tensor, **_strides(letter, axes, tensor.expand(shape).stride())}


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
    own_row = exists.stride(1) if heads > 1 else 0
    return {"EXISTS": exists, "stride_eb": exists.stride(0), "stride_eh": own_row}


def _tile_of(name: str, call: Call, num_queries: int, heads: int = 1) -> Tile:
    keys = call.keys_BHTD
    places = call.window is not None and call.place_BT is not None
    busy = places or call.soft_cap is not None
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
    asks = _field("ASKS", "a", call.asks_BS, (B, S))
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


def builds() -> list[Build]:
    """Every kernel with every tile that can be chosen, and what is switched on and off in it."""
    plain: dict[str, Any] = {}
    grouped = {"HEADS": 4, "GROUP": True}
    every = {"EXISTS": "*u8", "ASKS": "*u8", "PLACE": "*i64", "SINKS": "*fp32",
             "LEAST": "*fp32", "BLANKS": True, "HAS_CAP": True,
             "WINDOW": int(kernel.BY_PLACE),
             "wanted": ("MAX", "SUM", "SCATTER", "ENTROPY", "LAST")}  # fmt: skip
    masked = {"EXISTS": "*u8", "ASKS": "*u8", "BLANKS": True, "WINDOW": int(kernel.BY_ENTRY)}
    sums = {"EXISTS": "*u8", "wanted": ("MAX", "SUM"), "GROUP": True, "HEADS": 4}
    many, few = 4096, 32
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    calls: list[tuple[str, torch.dtype, int, int, str, dict[str, Any]]] = []
    for name in ("lse", "stats"):
        calls += [(name, bf16, width, many, "", plain) for width in (64, 128, 256)]
        calls += [(name, bf16, width, few, "grouped", grouped) for width in (64, 128, 256)]
        calls += [(name, bf16, width, many, "every", every) for width in (128, 256)]
        calls += [(name, bf16, 128, many, "masked", masked)]
        calls += [(name, fp16, 80, many, "", plain)]
        calls += [(name, fp32, width, number, "", plain) for width in (128, 256) for number in (few, many)]
    calls += [("stats", bf16, 128, many, "sums", sums), ("stats", bf16, 128, few, "sums", sums)]
    return [build for call in calls for build in _builds_of(*call)]


_KERNELS = {"lse": kernel.lse_kernel, "stats": kernel.stats_kernel}
# Arguments as contiguous tensors have them: strides of 1, and those of whole vectors.
_ONES = ("stride_qd", "stride_kd", "stride_as", "stride_pt", "stride_sinks")
_WHOLE_VECTORS = (
    *("stride_qb", "stride_qq", "stride_qs", "stride_kb", "stride_kh", "stride_kt"),
    *("stride_row", "stride_eb", "stride_eh"),
)


def _builds_of(
    name: str, dtype: torch.dtype, D: int, num_queries: int, switched: str, switches: dict[str, Any]
) -> list[Build]:
    """One kernel as it is launched for these shapes: a build for each tile, of all that take it."""
    block, kind, wide = backend.block_of(D), TYPES[dtype], dtype != torch.float32
    busy, heads = bool(switches.get("HAS_CAP")), switches.get("HEADS", 1)
    tiles = {arch: tile(name, dtype, block, arch, num_queries, busy=busy, heads=heads) for arch in ARCHS}
    types = {"Q": f"*{kind}", "K": f"*{kind}", "SHIFT": "*fp32"}
    types |= {key: value for key, value in switches.items() if str(value).startswith("*")}
    types |= dict.fromkeys(switches.get("wanted", ("MAX",)), "*fp32")
    types |= {"LAST": "*i64"} if "LAST" in types else {}
    types |= {"scale": "fp32", "soft_cap": "fp32"}
    of = _KERNELS[name]
    sizes = ("BH", "H", "G", "S", "T")
    pointers = dict.fromkeys(one for one in of.arg_names if one.isupper() and one not in (*sizes, *types))
    label = f"{name} {kind} D={D} S={num_queries} {switched}".strip()
    found = []
    for cut in dict.fromkeys(tiles.values()):
        constants: dict[str, Any] = {
            "D": D, "BLOCK_D": block, "BLOCK_M": cut.m, "BLOCK_N": cut.n, "WINDOW": 0,
            "HAS_CAP": False, "GROUP": False, "UPCAST": False,
            "BLANKS": False, "HEADS": 1, "PRECISION": backend.dot_precision(dtype),
        }  # fmt: skip
        switched_on = {key: value for key, value in switches.items() if key in constants}
        constants = {**pointers, **dict.fromkeys(_ONES, 1), **constants, **switched_on}
        wgmma = wide and (cut.m if name == "lse" else cut.n) >= 64
        archs = [arch for arch in ARCHS if tiles[arch] == cut]
        found.append(Build(label, of, types, constants, cut, _WHOLE_VECTORS, wgmma, archs))
    return found
