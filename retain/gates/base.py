"""What a gate is: a small trained module that looks at one layer's entries and predicts the risk of evicting
each.

In: `GateInputs` of one attention layer. Out: one score per entry and KV head. The one decision taken here: a
gate says in `unit` what its number means, and `GateSet.score` turns it into a `Score` in units of risk,
so that fusion and selection never meet a logarithm. A `GateSet` holds one gate per attention layer, under
that layer's index in the model; layers that retain leaves alone (sliding window, linear attention) simply
have none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from retain.evidence import Evidence
from retain.scores.score import Score, masked_score

# A standard deviation below this is a dead input channel: it is centred, never blown up.
SMALLEST_SCALE = 1e-4


@dataclass(frozen=True)
class GateInputs:
    """What the gate of one layer looks at; a gate names in `inputs` the fields that it needs.

    Args:
        hidden_BTE: attention input, after the input layer norm.
    """

    hidden_BTE: Float[Tensor, "B T E"] | None = None


class Gate(nn.Module):
    """Interface of a family, and the numbers that calibration leaves in it.

    The input is standardised by two buffers, `(x - input_mean_E) / input_scale_E`, estimated on the first
    documents of a training run; they cost nothing at inference and take the place of a layer norm.

    Args:
        E: model width.
        H: KV heads of the layer.
    """

    family: ClassVar[str]
    inputs: ClassVar[frozenset[str]] = frozenset({"hidden"})
    unit: ClassVar[str] = "log_risk"

    input_mean_E: Tensor
    input_scale_E: Tensor
    risk_floor_H: Tensor

    def __init__(self, *, E: int, H: int):
        super().__init__()
        self.E, self.H = E, H
        self.register_buffer("input_mean_E", torch.zeros(E))
        self.register_buffer("input_scale_E", torch.ones(E))
        self.register_buffer("risk_floor_H", torch.zeros(H))

    def dims(self) -> dict[str, int]:
        """The keyword arguments that build this gate again."""
        return {"E": self.E, "H": self.H}

    def standardise(self, hidden_BTE: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """The input in the gate's own precision, centred and scaled by the calibration buffers."""
        return (hidden_BTE.to(self.input_mean_E.dtype) - self.input_mean_E) / self.input_scale_E

    def calibrate_(
        self,
        input_mean_E: Float[Tensor, " E"],
        input_scale_E: Float[Tensor, " E"],
        floor_H: Float[Tensor, " H"],
        mean_H: Float[Tensor, " H"],
    ) -> None:
        """Set the input statistics, remember the target's floor, and start the output at the mean target.

        Args:
            input_mean_E: mean attention input over valid entries.
            input_scale_E: its standard deviation.
            floor_H: what is added to the risk before the logarithm, per head.
            mean_H: mean of log(risk + floor), per head.
        """
        self.input_mean_E.copy_(input_mean_E)
        self.input_scale_E.copy_(input_scale_E.clamp_min(SMALLEST_SCALE))
        self.risk_floor_H.copy_(floor_H)
        self.start_at_(mean_H)

    def start_at_(self, mean_H: Float[Tensor, " H"]) -> None:
        """Set the output bias, so that training begins at the mean target."""
        raise NotImplementedError

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        raise NotImplementedError


class GateSet(nn.Module):
    """One gate per attention layer.

    Args:
        gates: layer index in the model -> the gate of that layer.
        metadata: what the artifact says about them: base fingerprint, target and loss recipe, ... (plain JSON
            values).
    """

    def __init__(self, gates: Mapping[int, Gate], metadata: Mapping[str, Any] | None = None):
        super().__init__()
        if not gates:
            raise ValueError("a gate set needs at least one layer: got an empty mapping {layer index: gate}.")
        self.gates = nn.ModuleDict({str(layer): gates[layer] for layer in sorted(gates)})
        self.metadata: dict[str, Any] = dict(metadata or {})

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a gate, ascending."""
        return tuple(int(name) for name in self.gates)

    @property
    def family(self) -> str:
        return self[self.layers[0]].family

    def __getitem__(self, layer_idx: int) -> Gate:
        if str(layer_idx) not in self.gates:
            raise ValueError(
                f"there is no gate for layer {layer_idx}: gates exist for layers {list(self.layers)}. "
                "Load gates that were trained on this model."
            )
        gate = self.gates[str(layer_idx)]
        assert isinstance(gate, Gate)
        return gate

    def forward(self, inputs: Mapping[int, GateInputs]) -> dict[int, Float[Tensor, "B H T"]]:
        """The gates' own outputs, in their own unit, for every layer given (one call, as DDP wants it)."""
        return {layer: self[layer](layer_inputs) for layer, layer_inputs in inputs.items()}

    @torch.no_grad()
    def score(self, evidence: Evidence) -> Score:
        """The learned score of one layer's entries, in units of risk. The gate moves to the layer's device.

        Args:
            evidence: the layer; needs `hidden_BTE` (attention input, `[B, T, E]`).

        Returns:
            `Score(values_BHT float32, "risk")`, -inf on padding.

        Raises:
            ValueError: if there is no gate for that layer, or its hidden states are missing or of another
                width.
        """
        gate = self[evidence.layer_idx]
        hidden_BTE = evidence.hidden_BTE
        if hidden_BTE is None:
            raise ValueError(
                f"the gate of layer {evidence.layer_idx} looks at the attention input, and this evidence "
                "holds no hidden "
                "states: record it with retain.attach(model) and a retain.Cache, or pass hidden_BTE."
            )
        if hidden_BTE.shape[-1] != gate.E:
            raise ValueError(
                f"the gate of layer {evidence.layer_idx} takes hidden states of width {gate.E}, got "
                f"{tuple(hidden_BTE.shape)}: load gates that were trained on this model."
            )
        if gate.input_mean_E.device != hidden_BTE.device:
            # A model may lie on several devices, and gates are loaded knowing of none: each follows its
            # layer, once. Outside inference mode, whose tensors could not be trained again.
            with torch.inference_mode(False):
                gate.to(hidden_BTE.device)
        risk_BHT = to_risk(gate(GateInputs(hidden_BTE=hidden_BTE)), gate.unit)
        return masked_score(risk_BHT, evidence.valid_BT, "risk", held_BHT=evidence.held_BHT)


def to_risk(output_BHT: Float[Tensor, "B H T"], unit: str) -> Float[Tensor, "B H T"]:
    """A gate's output as float32 risk, `exp(output)` for log-risk."""
    output_BHT = output_BHT.float()
    if unit == "log_risk":
        return output_BHT.exp()
    if unit == "risk":
        return output_BHT
    raise ValueError(f"a gate's unit must be 'log_risk' or 'risk' to be scored, got {unit!r}.")
