"""Turns a gate's output into log-gates: soft, hard, or relative to earlier entries.

`retain.hf.training.soft_attention` adds them to the logits. A hard decision passes its gradient in openness,
not in its logarithm: a closed entry is open by a millionth, the straight-through gradient of the openness is
as large for closed entries as for open ones, and in the logarithm closed entries would stay closed.
"""

import math
from collections.abc import Mapping, Sequence
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
# Stands where padding is among scores that are compared with each other; finite, so that no NaN comes of it.
NOWHERE = -1e4


@dataclass(frozen=True)
class SoftThresholdStep:
    """The batch that is gated at one step: False on padding, the documents' keys, and whether hard decisions
    are drawn (`noisy`: training) or taken (looking)."""

    valid_BT: Bool[Tensor, "B T"]
    keys: tuple[int, ...]
    step: int
    noisy: bool


class SoftThreshold:
    """`to_log_gate` of an end-to-end stage: called by `SoftGated`, once a layer, and again where a layer is
    computed again for the gradient (then it gives the same). Decisions are soft or `hard`
    (`straight_through`, `gumbel`); `anchor`: entries in units of which gates are relative, 0: they are not.
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
        self.current: SoftThresholdStep | None = None

    def __call__(self, output_BHT: Float[Tensor, "B H T"], gate: Gate) -> Float[Tensor, "B H T"]:
        assert self.current is not None, "set `current` first"
        current = self.current
        if self.anchor:
            log_gate_BHT = relative(output_BHT, gate, current.valid_BT, self.anchor)
        else:
            log_gate_BHT = published_log_gate(output_BHT, gate)
        if self.hard == "none":
            return log_gate_BHT
        noise_BHT = None
        if self.hard == "gumbel" and current.noisy:
            noise_BHT = logistic_noise(
                [(self.seed, current.step, key, self.layer_of[id(gate)]) for key in current.keys],
                log_gate_BHT,
                current.valid_BT,
            )
        temperature = self.temperature if self.hard == "gumbel" else 1.0
        return decided(log_gate_BHT, noise_BHT, temperature)


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
    """`log u - log(1 - u)` on each document's own tokens, a function of its key alone: the same whatever it
    is padded to (on the left: `valid_BT` is False there)."""
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
    with all before it, of which no more than about `anchor` at a time (256 in the paper) are open. A mass or
    risk is taken by its logarithm.

    A constant added to all scores of a head changes nothing here, so that the gates cannot all close alike.
    After IndexMem (arXiv 2605.25475: `s_j - logsumexp(history) + ln 256`), whose code is not public; that the
    history ends at the entry itself, so that one number an entry suffices, is ours.

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


def regressed(gates: GateSet, stage: str | None) -> bool:
    """True for initial gates that learned a risk: their output says nothing of how far they are open.

    `stage` is that of the artifact's metadata; None (imported gates): a log-risk was regressed, and all else
    is what its paper says.
    """
    return stage == "local" or (stage is None and gates[gates.layers[0]].unit == "log_risk")


def check_shift(gates: GateSet, anchor: int) -> None:
    """Raises ValueError for gates that must be shifted to a budget and cannot be: their output is no log-risk
    with a bias of its own, and they are not relative."""
    gate = gates[gates.layers[0]]
    if not anchor and _bias_of(gate) is None:
        raise ValueError(
            f"`initial` holds gates of family {gates.family!r} of a layer-local stage, whose output "
            f"({gate.unit}) cannot be shifted to where the budget cuts: they would begin with any number of "
            "entries open. Make gates relative (soft.anchor=256), begin with fresh ones (initial=null), or "
            "with gates that say a log-risk (linear, mlp)."
        )


@torch.no_grad()
def shift_(gates: GateSet, scores: Mapping[int, Float[Tensor, "H N"]], share: float, *, pooled: bool) -> None:
    """Subtracts from every output bias the score above which `share` of the entries lie, so that gates (that
    pass `check_shift` without an anchor) are half open there: `s <- s - quantile_{1 - share}(s)`; `pooled`:
    one quantile for all heads and layers, which share a budget, and not one for each head."""
    known = {layer: score_HN.double().cpu() for layer, score_HN in scores.items()}
    common = torch.cat([score_HN.flatten() for score_HN in known.values()]) if pooled else None
    for layer, score_HN in known.items():
        bias = _bias_of(gates[layer])
        assert bias is not None
        cut_H = _quantile(score_HN if common is None else common.expand(len(score_HN), -1), 1 - share)
        bias.sub_(cut_H.to(bias))


def _quantile(score_HN: Tensor, share: float) -> Tensor:
    """The nearest of the sorted numbers: `torch.quantile` takes no more than 16 million."""
    place = min(score_HN.shape[-1] - 1, int(share * score_HN.shape[-1]))
    return score_HN.kthvalue(place + 1, dim=-1).values


def _bias_of(gate: Gate) -> Tensor | None:
    """The bias `[H]` of a log-risk, whose logistic function is its openness; None: there is none."""
    bias = getattr(getattr(gate, "out", None), "bias", None)
    if gate.unit != "log_risk" or gate.ages or not isinstance(bias, Tensor) or bias.shape != (gate.H,):
        return None
    return bias
