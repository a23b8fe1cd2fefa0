"""Turns a gate's output into log-gates, soft or hard.

`retain.hf.training.soft_attention` adds them to the logits. A hard decision passes its gradient in openness,
not in its logarithm: a closed entry is open by a millionth, the straight-through gradient of the openness is
as large for closed entries as for open ones, and in the logarithm closed entries would stay closed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.gates import Gate, GateSet
from retain.hf.training.soft_attention import published_log_gate
from retain.train.objectives.case import keyed_generator

# Openness of what a hard decision closes: a million of them weigh as much as one open entry.
CLOSED = 1e-6
# A log-gate nearer to 0 than this is taken to be this far from it: beyond, float32 knows no logit.
SUREST = 1e-7


@dataclass(frozen=True)
class SoftThreshold:
    """`to_log_gate` of a batch: called by `SoftGated` once a layer, and again where a layer is computed again
    for the gradient (then it gives the same).

    Args:
        gates: of all layers.
        hard: decisions are soft (`none`), or hard: `straight_through`, or `gumbel`, which divides by the
            temperature.
        valid_BT: False on padding.
        keys: seeds of the noise of `gumbel`, of each document; None: nothing is drawn.
    """

    gates: GateSet
    hard: Literal["none", "straight_through", "gumbel"]
    temperature: float
    valid_BT: Bool[Tensor, "B T"]
    keys: Sequence[tuple[int, ...]] | None

    def __call__(self, output_BHT: Float[Tensor, "B H T"], gate: Gate) -> Float[Tensor, "B H T"]:
        log_gate_BHT = published_log_gate(output_BHT, gate)
        if self.hard == "none":
            return log_gate_BHT
        if self.hard == "straight_through" or self.keys is None:
            return decided(log_gate_BHT, None, 1.0 if self.hard == "straight_through" else self.temperature)
        layer = next(layer for layer in self.gates.layers if self.gates[layer] is gate)
        noise_BHT = logistic_noise([(*key, layer) for key in self.keys], log_gate_BHT, self.valid_BT)
        return decided(log_gate_BHT, noise_BHT, self.temperature)


def decided(
    log_gate_BHT: Float[Tensor, "B H T"], noise_BHT: Float[Tensor, "B H T"] | None, temperature: float
) -> Float[Tensor, "B H T"]:
    """Open or closed, with the gradient of a soft gate: `log m`, `m = [z > 0]` (at least `CLOSED`) and
    `dm = d sigmoid(z)`, where `z = (logit(g) + noise) / temperature`; `log_gate_BHT` is `log g`.

    DMS (arXiv 2506.05345) decides so, with temperature .1 and the noise of a Gumbel-sigmoid.
    """
    known_BHT = log_gate_BHT.clamp_max(-SUREST)
    logit_BHT = known_BHT - (-torch.expm1(known_BHT)).log()
    if noise_BHT is not None:
        logit_BHT = logit_BHT + noise_BHT
    soft_BHT = torch.sigmoid(logit_BHT / temperature)
    hard_BHT = (logit_BHT > 0).to(soft_BHT.dtype).clamp_min(CLOSED)
    return (hard_BHT + (soft_BHT - soft_BHT.detach())).log()


def logistic_noise(
    keys: Sequence[tuple[int, ...]], like_BHT: Float[Tensor, "B H T"], valid_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, "B H T"]:
    """`log u - log(1 - u)` on each document's tokens, a function of its key alone: the same whatever it is
    padded to (on the left: `valid_BT` is False there)."""
    noise_BHT = torch.zeros(like_BHT.shape, dtype=torch.float32)
    for row, (key, count) in enumerate(zip(keys, valid_BT.sum(-1).tolist(), strict=True)):
        draw = torch.rand(like_BHT.shape[1], count, generator=keyed_generator(key))
        draw = draw.clamp(1e-6, 1 - 1e-6)
        noise_BHT[row, :, like_BHT.shape[2] - count :] = draw.log() - torch.log1p(-draw)
    return noise_BHT.to(like_BHT)
