"""From what a gate says to how far its entries are open: soft, hard, or relative to what came before.

In: a gate's output over a batch, in its own unit. Out: log-gates, as `retain.hf.soft` adds them to the
logits. The one decision taken here: a hard decision passes its gradient in openness, not in its logarithm. A
closed entry is open by a millionth, and the straight-through gradient is that of the openness itself, which
is as large for closed entries as for open ones; in the logarithm it would be a millionth of it, and what is
closed would stay closed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.gates import Gate, GateSet
from retain.hf.soft import own_form
from retain.train.losses import keyed_generator

# Openness of what a hard decision closes: a million of them weigh as much as one open entry.
CLOSED = 1e-6
# A log-gate nearer to 0 than this is taken to be this far from it: beyond, float32 knows no logit.
SUREST = 1e-7
# Stands where padding is among scores that are compared with each other; finite, so that no NaN comes of it.
NOWHERE = -1e4


@dataclass(frozen=True)
class Moment:
    """What is gated now.

    Args:
        valid_BT: False on padding.
        keys: of the documents.
        step: of the training.
        noisy: whether hard decisions are drawn (training), or taken (looking).
    """

    valid_BT: Bool[Tensor, "B T"]
    keys: tuple[int, ...]
    step: int
    noisy: bool


class Opening:
    """`to_log_gate` of an end-to-end stage: called by `SoftGated`, once a layer, and again where a layer is
    computed again for the gradient (then it gives the same).

    Args:
        gates: whose outputs come.
        hard: `none`, `straight_through` or `gumbel`.
        temperature: of `gumbel`.
        anchor: entries in units of which gates are relative; 0: they are not.
        seed: of the noise.
    """

    def __init__(
        self,
        gates: GateSet,
        *,
        hard: Literal["none", "straight_through", "gumbel"] = "none",
        temperature: float = 0.1,
        anchor: int = 0,
        seed: int = 0,
    ):
        self.layer_of = {id(gates[layer]): layer for layer in gates.layers}
        self.hard, self.temperature, self.anchor, self.seed = hard, temperature, anchor, seed
        self.moment: Moment | None = None

    def __call__(self, output_BHT: Float[Tensor, "B H T"], gate: Gate) -> Float[Tensor, "B H T"]:
        assert self.moment is not None, "nobody said what is gated"
        moment = self.moment
        if self.anchor:
            log_gate_BHT = relative(output_BHT, gate, moment.valid_BT, self.anchor)
        else:
            log_gate_BHT = own_form(output_BHT, gate)
        if self.hard == "none":
            return log_gate_BHT
        noise_BHT = None
        if self.hard == "gumbel" and moment.noisy:
            noise_BHT = logistic_noise(
                [(self.seed, moment.step, key, self.layer_of[id(gate)]) for key in moment.keys],
                log_gate_BHT,
                moment.valid_BT,
            )
        temperature = self.temperature if self.hard == "gumbel" else 1.0
        return decided(log_gate_BHT, noise_BHT, temperature)


def decided(
    log_gate_BHT: Float[Tensor, "B H T"], noise_BHT: Float[Tensor, "B H T"] | None, temperature: float
) -> Float[Tensor, "B H T"]:
    """Open or closed, with the gradient of a soft gate: `log m`, `m = [z > 0]` (at least `CLOSED`) and
    `dm = d sigmoid(z)`, where `z = (logit(g) + noise) / temperature`.

    DMS (arXiv 2506.05345) decides so, with temperature .1 and the noise of a Gumbel-sigmoid.

    Args:
        log_gate_BHT: `log g`.
        noise_BHT: logistic noise; None: none.
        temperature: of the soft gate whose gradient is taken.
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
    """`log u - log(1 - u)` on each document's own tokens, a function of its key alone: the same whatever it
    is padded to.

    Args:
        keys: one a document.
        like_BHT: gives shape, precision and device.
        valid_BT: False on padding (on the left).
    """
    noise_BHT = torch.zeros(like_BHT.shape, dtype=torch.float32)
    for row, (key, count) in enumerate(zip(keys, valid_BT.sum(-1).tolist(), strict=True)):
        draw = torch.rand(like_BHT.shape[1], count, generator=keyed_generator(key))
        draw = draw.clamp(1e-6, 1 - 1e-6)
        noise_BHT[row, :, like_BHT.shape[2] - count :] = draw.log() - torch.log1p(-draw)
    return noise_BHT.to(like_BHT)


def relative(
    output_BHT: Float[Tensor, "B H T"], gate: Gate, valid_BT: Bool[Tensor, "B T"], anchor: int
) -> Float[Tensor, "B H T"]:
    """`phi_i = min(0, s_i - log sum_{k <= i} exp(s_k) + log anchor)`: a gate that says how an entry compares
    with all before it, of which no more than about `anchor` at a time are open.

    A constant added to all scores of a head changes nothing here, so that the gates cannot all close alike.
    After IndexMem (arXiv 2605.25475: `s_j - logsumexp(history) + ln 256`), whose code is not public; that the
    history ends at the entry itself, so that one number an entry suffices, is ours.

    Args:
        output_BHT: of the gate; a mass or risk is taken by its logarithm.
        gate: for its unit.
        valid_BT: False on padding.
        anchor: entries; 256 in the paper.

    Raises:
        ValueError: a gate that says a decay.
    """
    if gate.ages:
        raise ValueError(
            f"soft.anchor={anchor} makes gates relative to each other, and those of family {gate.family!r} "
            "say a decay: set soft.anchor=0."
        )
    score_BHT = output_BHT.to(torch.promote_types(output_BHT.dtype, torch.float32))
    if gate.unit in ("risk", "mass"):
        score_BHT = score_BHT.clamp_min(CLOSED).log()
    valid_B1T = valid_BT.to(score_BHT.device)[:, None]
    score_BHT = score_BHT.masked_fill(~valid_B1T, NOWHERE)
    phi_BHT = score_BHT - torch.logcumsumexp(score_BHT, dim=-1) + math.log(anchor)
    return phi_BHT.clamp_max(0.0).masked_fill(~valid_B1T, 0.0)
