"""Defines a decoding step over static rows: the token is written, and ragged attention reads the rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retain.kernels.codes import Codes
from retain.kernels.ragged_attention.pages import PAGE, Pages
from retain.kernels.ragged_attention.reference import Call, merged, ragged_attention


def decode_step(
    queries_BQ1D: Tensor, keys_BH1D: Tensor, values_BH1V: Tensor, keys_PD: Tensor, values_PV: Tensor,
    positions_P: Tensor, offsets_R1: Tensor, base_R: Tensor, clock_1: Tensor, last_B: Tensor,
    log_weight_P: Tensor | None, sinks_Q: Tensor | None, scaling: float, soft_cap: float, window: int,
    items: Tensor | None = None, count: Tensor | None = None, parts: Tensor | None = None,
    arrived: Tensor | None = None, packed: Sequence[Tensor] = (), bits: int = 0, span: int = 1,
) -> Tensor:  # fmt: skip
    """`retain.kernels.decode_step.decode_step`, whose arguments these are; 0 is no cap and no window."""
    lengths_R, starts_R = base_R.to(torch.int64) + clock_1, offsets_R1[:-1]
    for row, (room, length) in enumerate(zip(offsets_R1.diff().tolist(), lengths_R.tolist(), strict=True)):
        if not 0 < length <= room:
            raise ValueError(f"row {row} has a room of {room} entries for {length}.")
    at_R, now_B1 = starts_R + lengths_R - 1, (last_B + clock_1)[:, None]
    keys_PD[at_R] = keys_BH1D.flatten(0, 2)
    values_PV[at_R] = values_BH1V.flatten(0, 2)
    positions_P[at_R] = now_B1.expand(-1, keys_BH1D.shape[1]).flatten().to(positions_P.dtype)
    # In float32 at least, so that parts of rows are rounded once.
    queries = queries_BQ1D.to(torch.promote_types(queries_BQ1D.dtype, torch.float32))

    def attend(
        keys: Any, values: Any, offsets: Tensor, held: Tensor, weight: Tensor | None, sinks: Tensor | None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Output and log-sum-exp over the rows of a store, whose rooms are made to begin at 0."""
        first, last = int(offsets[0]), int(offsets[-1])
        part = slice(first, last)
        keys, values = (one.part(part) if isinstance(one, Codes) else one[part] for one in (keys, values))
        weight = None if weight is None else weight[part]
        if positions is not None:  # entries outside of the window weigh nothing
            oldest_R1 = (now_B1 - window).expand(-1, keys_BH1D.shape[1]).flatten()
            hidden_C = positions[part] <= oldest_R1.repeat_interleave(offsets.diff())
            weight = torch.where(hidden_C, float("-inf"), 0.0 if weight is None else weight)
        call = Call(
            *(queries, keys, values, offsets - first, held.to(torch.int64)[:, None], sinks),
            log_weight_C=weight,
            pages=Pages.of([room // PAGE for room in offsets.diff().tolist()], offsets.device),
            scaling=scaling,
            soft_cap=soft_cap or None,
        )
        return ragged_attention(call)

    pool = (keys_PD, values_PV, offsets_R1, lengths_R, log_weight_P)
    if not packed:
        out_BQ1V, _ = attend(*pool, sinks_Q, positions_P if window else None)
    else:
        assert not window, "no layer has both"
        key_codes, value_codes, value_scales, groups, key_scales, offsets, held, *weight = packed
        keys = Codes(key_codes, key_scales, groups, bits, 1, keys_PD.shape[1])
        values = Codes(value_codes, value_scales, None, bits, span, values_PV.shape[1])
        coded = (keys, values, offsets, held, weight[0] if weight else None)
        outs, lses = zip(attend(*coded, None), attend(*pool, None), strict=True)
        out_BQ1V = merged(outs, lses, sinks_Q)
    return out_BQ1V.transpose(1, 2).to(queries_BQ1D.dtype)
