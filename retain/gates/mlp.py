"""The MLP gate: one hidden layer between the attention input and one number per KV head.

KVzap's default (arXiv 2601.07891; GELU, hidden width E/8 there). The released KVzap has no input
standardisation; ours is the base class's two buffers, which make one learning rate fit models whose hidden
states differ in scale by orders.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from retain.gates.base import Gate, GateInputs


class MLPGate(Gate):
    """`log_risk(i) = W2 gelu(W1 x_i + b1) + b2`, with `x_i` the standardised attention input of entry `i`.

    Args:
        E: model width.
        H: KV heads of the layer.
        F: width of the hidden layer.
    """

    family = "mlp"

    def __init__(self, *, E: int, H: int, F: int = 64):
        super().__init__(E=E, H=H)
        if F < 1:
            raise ValueError(f"an MLP gate needs a hidden width of at least 1, got F={F}.")
        self.F = F
        self.up = nn.Linear(E, F)
        self.out = nn.Linear(F, H)

    def dims(self) -> dict[str, int]:
        return {**super().dims(), "F": self.F}

    @torch.no_grad()
    def start_at_(self, mean_H: Float[Tensor, " H"]) -> None:
        self.out.weight.mul_(0.1)
        self.out.bias.copy_(mean_H)

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Log-risk of every entry, from `inputs.hidden_BTE`."""
        assert inputs.hidden_BTE is not None
        hidden_BTF = nn.functional.gelu(self.up(self.standardise(inputs.hidden_BTE)))
        return self.out(hidden_BTF).transpose(1, 2)
