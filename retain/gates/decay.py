"""Decaying retention: gates whose score falls with every later token.

From the attention input, per entry and head, the logarithm of a decay `beta`, at most 0; after `n` further
tokens the entry weighs `beta ** n`. The gate outputs `log beta` once; `GateSet.score` and the soft attention
multiply it by the distance (added to the logit, as in the released FlexAttention kernel; the released eager
reference multiplies the logit, which is another function).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from retain.config import Count
from retain.gates.base import Gate, GateInputs, HiddenGate
from retain.gates.mlp import ACTIVATIONS, Activation


class DecayGate(HiddenGate):
    """`log beta(i) = logsigmoid(W2 act(W1 x_i + b1) + b2)`; the score after `n` tokens is `n log beta`.

    TRIM-KV: Cache What Lasts (arXiv 2512.03324), the gate `rg` of the release. Map of names: `up` is their
    `linear1`, the weight of `out` their `linear2` and its bias their `bias`. Parameters:
    `E F + F + F H + H`.

    Args:
        activation: theirs is the model's own.
        opens_at: output bias that `open_` sets (18 in the paper and the released gates; the code's default is
            10): `beta = sigmoid(18)` forgets nothing. Nor does it learn much with AdamW as it comes:
            every gradient carries the factor `1 - beta = sigmoid(-18) = 1.5e-8`, times the distances and over
            the layers and heads of which the loss is a mean, and the usual `eps` of 1e-8 swamps it. Set a
            small one (`training.eps`, about 1e-15), or open lower (8 to 10).
    """

    family = "decay"
    unit = "rank"
    ages = True

    def __init__(
        self, *, E: int, H: int, F: Count = 512, activation: Activation = "silu", opens_at: float = 18.0
    ):
        super().__init__(E=E, H=H)
        self.F, self.activation, self.opens_at = F, activation, opens_at
        self.act = ACTIVATIONS[activation]
        self.up = nn.Linear(E, F)
        self.out = nn.Linear(F, H)

    @torch.no_grad()
    def open_(self) -> None:
        """Weights as the release starts them (normal, .02, biases zero), and the bias at `opens_at`."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=0.02)
                module.bias.zero_()
        self.out.bias.fill_(self.opens_at)

    def log_gate(self, output_BHT: Float[Tensor, "B H T"]) -> Float[Tensor, "B H T"]:
        """The output itself, per token of distance."""
        return output_BHT

    def hidden(self, x_BTE: Float[Tensor, "B T E"]) -> Float[Tensor, "B T F"]:
        """Input of the last projection."""
        return self.act(self.up(x_BTE))

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Logarithm of every entry's decay, from `inputs.hidden_BTE`."""
        hidden_BTF = self.hidden(self.standardise(inputs.hidden_BTE))
        # A projection that layers share lies on one device, whatever devices the layers are on.
        weight, bias = (tensor.to(hidden_BTF.device) for tensor in (self.out.weight, self.out.bias))
        return functional.logsigmoid(functional.linear(hidden_BTF, weight, bias)).transpose(1, 2)


class SharedDecayGate(DecayGate):
    """`log beta(i) = logsigmoid(W3 act(W2 act(W1 x_i + b1) + b2) + b3)`, with `W3, b3` of all layers one.

    DBTrimKV: Make Each Token Count (arXiv 2605.09649), the gate `rg10` of the release. All layers and heads
    compete for one budget there, so the scores must be comparable across layers, and the shared projection is
    what calibrates them. Map of names: `up`, `middle` and `out` are their `linear1`, `linear2`, and `linear3`
    with `bias`. The released weights are stored per layer, not visibly shared: `tied=False` is that variant.
    Parameters: `L (E F + F + F F + F) + F H + H` over L layers (untied: `F H + H` per layer).

    Args:
        F: width of the two hidden layers.
        activation: theirs is the model's own.
        opens_at: output bias that `open_` sets (18 in the released gates, which needs a small `training.eps`:
            see `DecayGate`).
        tied: whether all layers share the last projection and its bias.
    """

    family = "decay_shared"

    def __init__(
        self,
        *,
        E: int,
        H: int,
        F: Count = 512,
        activation: Activation = "silu",
        opens_at: float = 18.0,
        tied: bool = True,
    ):
        super().__init__(E=E, H=H, F=F, activation=activation, opens_at=opens_at)
        self.tied = tied
        self.middle = nn.Linear(F, F)

    @classmethod
    def tie_(cls, gates: Sequence[Gate]) -> None:
        """Share the first layer's last projection among all layers.

        Raises:
            ValueError: their projections have different sizes.
        """
        alike = [gate for gate in gates if isinstance(gate, SharedDecayGate) and gate.tied]
        if len(shapes := {(gate.F, gate.H) for gate in alike}) > 1:
            raise ValueError(
                "layers can share their last projection only where all have the same hidden width and KV "
                f"heads: got (F, H) {sorted(shapes)}. Set `tied: false` for a projection per layer."
            )
        for gate in alike[1:]:
            gate.out = alike[0].out

    def hidden(self, x_BTE: Float[Tensor, "B T E"]) -> Float[Tensor, "B T F"]:
        return self.act(self.middle(super().hidden(x_BTE)))
