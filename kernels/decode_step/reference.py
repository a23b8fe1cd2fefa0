"""Defines a decoding step over static rows in plain PyTorch, row by row."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.kernels.codes import Codes, decode


def decode_step(
    queries_BQ1D: Float[Tensor, "B Q 1 D"],
    keys_BH1D: Float[Tensor, "B H 1 D"],
    values_BH1V: Float[Tensor, "B H 1 V"],
    keys_PD: Float[Tensor, "P D"],
    values_PV: Float[Tensor, "P V"],
    positions_P: Int[Tensor, " P"],
    offsets_R1: Int[Tensor, " R1"],
    base_R: Int[Tensor, " R"],
    clock_1: Int[Tensor, " 1"],
    last_B: Int[Tensor, " B"],
    log_weight_P: Float[Tensor, " P"] | None,
    sinks_Q: Float[Tensor, " Q"] | None,
    scaling: float,
    soft_cap: float,
    window: int,
    items: Tensor | None = None,
    count: Tensor | None = None,
    parts: Tensor | None = None,
    arrived: Tensor | None = None,
    packed: Sequence[Tensor] = (),
    bits: int = 0,
    span: int = 1,
) -> Float[Tensor, "B 1 Q V"]:
    """`retain.kernels.decode_step.decode_step`, where the arguments stand."""
    B, Q, _, _ = queries_BQ1D.shape
    H = keys_BH1D.shape[1]
    kind = torch.promote_types(queries_BQ1D.dtype, torch.float32)
    out_BQV = queries_BQ1D.new_empty(B, Q, values_PV.shape[1])
    starts, lengths_R = offsets_R1.tolist(), base_R.to(torch.int64) + clock_1
    new_B = (last_B + clock_1).tolist()
    for row, length in enumerate(lengths_R.tolist()):
        b, h = divmod(row, H)
        start, stop = starts[row], starts[row] + length
        if not start < stop <= starts[row + 1]:
            raise ValueError(f"row {row} has a room of {starts[row + 1] - start} entries for {length}.")
        keys_PD[stop - 1] = keys_BH1D[b, h, 0]
        values_PV[stop - 1] = values_BH1V[b, h, 0]
        positions_P[stop - 1] = new_B[b]
        keys, values = keys_PD[start:stop].to(kind), values_PV[start:stop].to(kind)
        positions_N = positions_P[start:stop]
        weight_N = None if log_weight_P is None else log_weight_P[start:stop]
        if packed:
            first = decoded(packed, row, keys.shape[1], values.shape[1], bits, span)
            keys, values = torch.cat([first[0].to(kind), keys]), torch.cat([first[1].to(kind), values])
            positions_N = torch.cat([first[2], positions_N])
            weight_N = None if weight_N is None else torch.cat([*first[3:], weight_N])
        heads = slice(h * (Q // H), (h + 1) * (Q // H))
        logits_GN = queries_BQ1D[b, heads, 0].to(kind) @ keys.T * scaling
        if soft_cap:
            logits_GN = soft_cap * torch.tanh(logits_GN / soft_cap)
        if weight_N is not None:
            logits_GN = logits_GN + weight_N
        if window:
            logits_GN = logits_GN.masked_fill(positions_N <= new_B[b] - window, float("-inf"))
        if sinks_Q is not None:
            logits_GN = torch.cat([logits_GN, sinks_Q[heads, None].to(kind)], dim=1)
        weights_GN = logits_GN.softmax(-1)[:, : len(keys)]
        out_BQV[b, heads] = (weights_GN @ values).to(out_BQV.dtype)
    return out_BQV[:, None]


def decoded(packed: Sequence[Tensor], row: int, D: int, V: int, bits: int, span: int) -> list[Tensor]:
    """Keys, values and positions of a row's codes; and what is added to logits, if anything is."""
    keys, values, positions, value_scales, groups, key_scales, offsets, held, *weight = packed
    own = slice(int(offsets[row]), int(offsets[row] + held[row]))
    coded = (
        Codes(keys, key_scales, groups, bits, 1, D),
        Codes(values, value_scales, None, bits, span, V),
    )
    numbers = (decode(codes.part(own), torch.float32) for codes in coded)
    return [*numbers, positions[own], *(weight_P[own] for weight_P in weight)]
