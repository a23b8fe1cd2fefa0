"""Cases of `decode_step`: named shapes, inputs, check and rivals."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from retain.kernels.codes import bytes_wide, encode
from retain.kernels.decode_step import decode_step, path_of, reference
from retain.kernels.measure import Claim, Cost, cast, wrong

GROUP = 32  # entries that share the scales of their keys


@dataclass(frozen=True)
class Case:
    """One shape.

    Args:
        batch, kv_heads, group_size, width: B, H, G and D.
        entries: held by a row on average; rows differ by `spread` at most.
        bits: of entries before the last 32 of each row; 0: none are codes.
        weighted, sunk, soft_cap, window: as the op has them.
    """

    batch: int = 2
    kv_heads: int = 2
    group_size: int = 3
    width: int = 64
    entries: int = 150
    spread: int = 40
    bits: int = 0
    weighted: bool = False
    sunk: bool = False
    soft_cap: float | None = None
    window: int | None = None

    @property
    def held_R(self) -> Tensor:
        """Entries of each row before the step."""
        draw = torch.Generator().manual_seed(0)
        rows = (self.batch * self.kv_heads,)
        return torch.randint(self.entries - self.spread, self.entries + self.spread + 1, rows, generator=draw)

    @property
    def coded_R(self) -> Tensor:
        """Of these, those held as codes."""
        return (self.held_R - GROUP).clamp_min(0) * (self.bits > 0)


CASES = {
    "plain": Case(),
    "one entry": Case(entries=0, spread=0),
    "G = 1": Case(group_size=1, width=128),
    "G = 8": Case(kv_heads=1, group_size=8, width=128),
    "D = 16": Case(width=16, soft_cap=5.0),
    "D = 256": Case(width=256, weighted=True),
    "window and sinks": Case(window=30, sunk=True),
    "many parts": Case(entries=3000, spread=900, kv_heads=1),
    **{
        f"{bits} bits": Case(bits=bits, weighted=bits == 4, window=90 if bits == 2 else None)
        for bits in (8, 4, 2)
    },
}
_LAYER = Case(batch=8, kv_heads=8, group_size=4, width=128, entries=30_000, spread=3_000)
SPEED = {
    "cpu": {"4K": replace(_LAYER, batch=1, entries=4096, spread=400)},
    "cuda": {
        "batch 8, 30K": _LAYER,
        "batch 1, 30K": replace(_LAYER, batch=1),
        "batch 16, 2K": replace(_LAYER, batch=16, entries=2048, spread=200),
        "batch 1, 128K": replace(_LAYER, batch=1, entries=2**17),
        "batch 8, 30K, 4 bits": replace(_LAYER, bits=4),
    },
}
CLAIMS = {
    "cpu": [],
    "cuda": [
        Claim("near the bandwidth of a copy", "copy", at_least=0.85, case="batch 8, 30K"),
        Claim("near it for one sequence too", "copy", at_least=0.6, case="batch 1, 30K"),
    ],
}


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of the op: the clock stands at 1, so that a call repeated writes the same places."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device, dtype=torch.float32).to(dtype)

    B, H, Q, D = case.batch, case.kv_heads, case.kv_heads * case.group_size, case.width
    base_R = case.held_R - case.coded_R
    room_R, last = (base_R + 1 + 63) // 64 * 64, int(case.held_R.max()) + 100
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), room_R.cumsum(0)])
    P = int(offsets[-1])
    given: dict[str, Any] = {
        "queries": normal(B, 1, Q, D).transpose(1, 2),
        **{name: normal(B, 1, H, D).transpose(1, 2) for name in ("new_keys", "new_values")},
        **{name: normal(P, D) for name in ("keys", "values")},
        "positions": _positions(offsets, base_R, last).to(device),
        "offsets": offsets.to(device),
        "base": base_R.to(device, torch.int32),
        "clock": torch.ones(1, dtype=torch.int64, device=device),
        "last": torch.full((B,), last, device=device),
        "log_weight": normal(P).float() if case.weighted else None,
        "sinks": normal(Q) if case.sunk else None,
        "scaling": D**-0.5,
        "soft_cap": case.soft_cap,
        "window": case.window,
    }
    rooms = [room_R.tolist()]
    if case.bits:
        given["packed"], given["bits"], given["span"] = _packed(case, last, normal, device), case.bits, 32
        rooms = [given["packed"][6].diff().tolist(), *rooms]
    if path_of(given["keys"], given["values"]) == "triton":
        from retain.kernels.decode_step.launch import tables

        (table,) = tables([rooms], case.group_size, D, torch.device(device), lambda size: size)
        given["work"] = table.tensors()
    return given


def _positions(offsets: Tensor, held_R: Tensor, last: int) -> Tensor:
    """Ascending positions of each row's entries, up to the last."""
    positions = torch.zeros(int(offsets[-1]), dtype=torch.int32)
    for start, count in zip(offsets.tolist(), held_R.tolist(), strict=False):
        positions[start : start + count] = torch.arange(last - count + 1, last + 1)
    return positions


def _packed(case: Case, last: int, normal: Callable[..., Tensor], device: torch.device | str) -> list[Tensor]:
    """The first entries of each row, as the op takes codes."""
    rooms_R = (case.coded_R + 63) // 64 * 64
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), rooms_R.cumsum(0)])
    P = int(offsets[-1])
    groups = torch.arange(P, device=device) // GROUP
    keys, values = (normal(P, case.width).float() for _ in range(2))
    of_keys, of_values = encode(keys, case.bits, 1, groups), encode(values, case.bits, 32)
    positions = _positions(offsets, case.coded_R, last - GROUP).to(device)
    columns = [of_keys.codes_CW, of_values.codes_CW, positions, of_values.scales_G2N]
    assert of_keys.groups_C is not None
    columns += [
        of_keys.groups_C,
        of_keys.scales_G2N,
        offsets.to(device),
        case.coded_R.to(device, torch.int32),
    ]
    return [*columns, normal(P).float()] if case.weighted else columns


def run(case: Case, kwargs: dict[str, Any]) -> Tensor:
    """The op."""
    given = list(kwargs.values())[:12]
    return decode_step(*given, **{name: kwargs[name] for name in list(kwargs)[12:]})


def cost(case: Case, dtype: torch.dtype) -> Cost:
    """Each entry is read once."""
    entries, coded = int(case.held_R.sum()) + case.batch * case.kv_heads, int(case.coded_R.sum())
    each = 2 * case.width * dtype.itemsize + 4 * case.weighted
    scales = 4 * -(-case.width // 32) + 4 + 4 * case.width / GROUP + 4 * case.weighted
    code = 2 * bytes_wide(case.width, case.bits) + scales
    flops = 4.0 * entries * case.group_size * case.width
    return Cost(flops, (entries - coded) * float(each) + coded * code)


def rivals(case: Case, kwargs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Dense attention over rows of the mean length, which appends nothing."""
    shape = (case.batch, case.kv_heads, case.entries + 1, case.width)
    keys, values = (torch.randn_like(kwargs["queries"][:, :1].expand(shape)) for _ in range(2))
    return {"dense": lambda: scaled_dot_product_attention(kwargs["queries"], keys, values, enable_gqa=True)}


def check(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> str | None:
    """Compares the op with plain PyTorch in float64, by the error of plain PyTorch in its precision."""
    kwargs = inputs(case, dtype, device, seed)

    def plain(given: dict[str, Any]) -> Tensor:
        given = {**given, "soft_cap": case.soft_cap or 0.0, "window": case.window or 0}
        more = {name: given[name] for name in ("packed", "bits", "span") if name in given}
        return reference.decode_step(*list(given.values())[:15], **more)

    wanted = plain({**cast(kwargs, torch.float64), "log_weight": kwargs["log_weight"]})
    return wrong(run(case, kwargs), wanted, plain(kwargs), ops=2)
