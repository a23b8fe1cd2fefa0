"""Defines a decoding step over static rows in plain PyTorch, row by row."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
    *work: Tensor | None,
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
        if window:
            start += int((positions_P[start:stop] <= new_B[b] - window).sum())
        heads = slice(h * (Q // H), (h + 1) * (Q // H))
        logits_GN = queries_BQ1D[b, heads, 0].to(kind) @ keys_PD[start:stop].to(kind).T * scaling
        if soft_cap:
            logits_GN = soft_cap * torch.tanh(logits_GN / soft_cap)
        if log_weight_P is not None:
            logits_GN = logits_GN + log_weight_P[start:stop]
        if sinks_Q is not None:
            logits_GN = torch.cat([logits_GN, sinks_Q[heads, None].to(kind)], dim=1)
        weights_GN = logits_GN.softmax(-1)[:, : stop - start]
        out_BQV[b, heads] = (weights_GN @ values_PV[start:stop].to(kind)).to(out_BQV.dtype)
    return out_BQV[:, None]
