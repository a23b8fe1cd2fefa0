"""Cases of a decoding step: rows of `ragged_attention.cases`, whose last entry is the token that comes.

The place of that token is free before the step: its key there is NaN, as in every free place.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from retain.kernels.decode_step import decode_step, path_of
from retain.kernels.measure import Claim
from retain.kernels.ragged_attention import cases as ragged
from retain.kernels.ragged_attention.cases import ALL, unequal

ROUNDING, GRAPHED = (2, None), True


@dataclass(frozen=True)
class Case(ragged.Case):
    """A step; `window` as the op has it."""

    window: int | None = None


CASES = {
    "plain": Case(2, 2, 3, 1, 64, (150, 130, 8, 64)),
    "one entry": Case(2, 1, 2, 1, 64, (1, 1)),
    "all options": Case(2, 2, 2, 1, 64, (70, 130, 8, 64), window=40, **ALL),
    "G = 1": Case(1, 2, 1, 1, 128, (100, 33)),
    "G = 8": Case(1, 1, 8, 1, 128, (65,), sinks=True),
    "D = 24, another width of values": Case(2, 2, 3, 1, 24, (150, 1, 8, 64), value_width=16, soft_cap=5.0),
    "D = 256": Case(1, 2, 2, 1, 256, (40, 7), weighted=True),
    "many parts": Case(1, 2, 3, 1, 64, (3000, 1900), window=2000),
    "8 bits": Case(2, 2, 2, 1, 64, (150, 1, 70, 64), bits=8),
    "4 bits, D = 24": Case(2, 2, 2, 1, 24, (150, 1, 70, 64), bits=4, span=16, value_width=24),
    "2 bits, all options": Case(2, 2, 2, 1, 64, (150, 1, 70, 64), bits=2, **ALL),
}
_LAYER = Case(8, 8, 4, 1, 128, unequal(64, 30_000, 1.2))
SPEED = {
    "cpu": {"4K": Case(1, 8, 4, 1, 128, unequal(8, 4096, 1.2))},
    "cuda": {
        "batch 8, 30K": _LAYER,
        "batch 1, 30K": replace(_LAYER, batch=1, lengths=_LAYER.lengths[:8]),
        "batch 16, 2K": replace(_LAYER, batch=16, lengths=unequal(128, 2048, 1.2)),
        "batch 1, 128K": replace(_LAYER, batch=1, lengths=unequal(8, 2**17, 1.2)),
        "batch 8, 30K, 4 bits": replace(_LAYER, bits=4),
    },
}
# Of issue 45.
CLAIMS = [Claim("batch 8, 30K", "copy", 0.85), Claim("batch 1, 30K", "copy", 0.6)]
_HALF = torch.bfloat16
# Calls that are compiled ahead of time: every width with its tile, and every switch of the code.
BUILDS: list[tuple[torch.dtype, Case]] = [
    *((_HALF, Case(1, 1, 4, 1, D, (100,))) for D in (16, 32, 64, 128, 256)),
    *((torch.float32, Case(1, 1, 4, 1, D, (100,))) for D in (64, 128)),
    (torch.float16, Case(1, 1, 8, 1, 128, (100,))),
    *((_HALF, Case(1, 1, 1, 1, 128, (100,), **{name: how})) for name, how in {**ALL, "window": 40}.items()),
    *((_HALF, Case(1, 1, 4, 1, 128, (100,), bits=bits)) for bits in (8, 4, 2)),
    (_HALF, Case(1, 1, 4, 1, 128, (100,), bits=4, **ALL)),
]


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of `decode_step`: the clock stands at 1, so that a call repeated writes the same
    places. Codes stand for half as many entries before those of each row."""
    given = ragged.inputs(replace(case, bits=0), dtype, device, seed)
    lengths_R = given["seen_RS"][:, 0].int()  # a query sees all that its row holds
    draw, tokens = torch.Generator(device).manual_seed(seed), max(case.lengths) + 3
    # Free places hold positions of the far future.
    positions_P = torch.full_like(given["keys_CD"][:, 0], 2**31 - 1, dtype=torch.int32)
    for start, length in zip(given["offsets_R1"].tolist(), case.lengths, strict=False):
        held = torch.randperm(tokens, generator=draw, device=device)[:length].sort().values
        positions_P[start : start + length] = held.int()
    at_R = given["offsets_R1"][:-1] + lengths_R - 1
    new_BH1D, new_BH1V = (
        given[name][at_R].view(case.batch, 1, case.kv_heads, -1).transpose(1, 2)
        for name in ("keys_CD", "values_CD")
    )
    given["keys_CD"][at_R] = float("nan")
    weight_C = given["log_weight_C"]
    if weight_C is not None:  # an entry that comes counts once
        weight_C[at_R] = 0.0
    step: dict[str, Any] = {
        **{"queries_BQ1D": given["queries_BQSD"], "keys_BH1D": new_BH1D, "values_BH1V": new_BH1V},
        **{"keys_PD": given["keys_CD"], "values_PV": given["values_CD"], "positions_P": positions_P},
        **{"offsets_R1": given["offsets_R1"], "base_R": lengths_R - 1},
        "clock_1": torch.ones(1, dtype=torch.int64, device=device),
        "last_B": torch.full((case.batch,), tokens - 2, device=device),
        **{"log_weight_P": weight_C, "sinks_Q": given["sinks_Q"]},
        **{"scaling": given["scaling"], "soft_cap": case.soft_cap, "window": case.window},
    }
    rooms = [given["offsets_R1"].diff().tolist()]
    if case.bits:
        coded = ragged.inputs(
            replace(case, lengths=tuple(n // 2 for n in case.lengths)), dtype, device, seed + 1
        )
        keys, values = coded["keys_CD"], coded["values_CD"]
        columns = [keys.codes_CW, values.codes_CW, values.scales_G2N, keys.groups_C]
        columns += [keys.scales_G2N, coded["offsets_R1"], coded["seen_RS"][:, 0].int()]
        step["packed"] = [*columns, coded["log_weight_C"]] if case.weighted else columns
        step |= {"bits": case.bits, "span": case.span}
        rooms.insert(0, coded["offsets_R1"].diff().tolist())
    if path_of(step["keys_PD"], step["values_PV"]) == "triton":
        from retain.kernels.decode_step.launch import tables

        (step["work"],) = tables(
            [rooms], case.group, case.values_wide, torch.device(device), lambda size: size
        )
    return step


def run(case: Case, kwargs: dict[str, Any]) -> Tensor:
    """The op."""
    return decode_step(**kwargs)


def least_bytes(case: Case, dtype: torch.dtype) -> float:
    """Each entry is read once."""
    size, numbers = dtype.itemsize, replace(case, bits=0)
    coded = sum(n // 2 for n in case.lengths) if case.bits else 0
    return sum(case.lengths) * ragged.entry_bytes(numbers, size) + coded * ragged.entry_bytes(case, size)


def rivals(case: Case, kwargs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Dense attention over rows of the mean length, which appends nothing."""
    numbers = replace(case, bits=0)
    return ragged.rivals(numbers, {"queries_BQSD": kwargs["queries_BQ1D"]})
