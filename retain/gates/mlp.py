"""MLP gate: one hidden layer between the attention input and one number per KV head.

KVzap's default (arXiv 2601.07891; GELU, hidden width E/8 there). The released KVzap has no input
standardisation; ours is the base class's two buffers, so that one learning rate fits models whose hidden
states differ in scale by orders of magnitude.
"""

from jaxtyping import Float
from torch import Tensor, nn

from retain.gates.activation import activation_of, width_of
from retain.gates.base import GateInputs, LogitGate


class MLPGate(LogitGate):
    """`log_risk(i) = W2 act(W1 x_i + b1) + b2`, with `x_i` the standardised attention input of entry `i`.

    KVzap-MLP (arXiv 2601.07891): their `s` is the logarithm of KVzip+, attention times
    `||W_O v|| / ||h||`, which is no risk: of gates that learned it, the artifact says `score_unit: rank`, and
    their threshold tau is one of `exp(tau)` on the score. Parameters: `E F + F + F H + H`.

    Args:
        E: model width.
        H: KV heads of the layer.
        F: width of the hidden layer.
        activation: of `retain.gates.activation`.
    """

    family = "mlp"

    def __init__(self, *, E: int, H: int, F: int = 64, activation: str = "gelu"):
        super().__init__(E=E, H=H)
        self.F = width_of(F, "an MLP gate")
        self.activation = activation
        self.act = activation_of(activation)
        self.up = nn.Linear(E, F)
        self.out = nn.Linear(F, H)

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Log-risk of every entry, from `inputs.hidden_BTE`."""
        assert inputs.hidden_BTE is not None
        hidden_BTF = self.act(self.up(self.standardise(inputs.hidden_BTE)))
        return self.out(hidden_BTF).transpose(1, 2)
