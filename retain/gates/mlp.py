"""Linear and MLP gates: none or one hidden layer between the attention input and one number per KV head.

KVzap (arXiv 2601.07891) found the linear gate nearly as good as its default, an MLP (R2 .74 against .77 on
Llama-3.1-8B), at a fiftieth of the size; it regresses log KVzip+, we regress log future risk
(`retain/future.py`). The released KVzap has no input standardisation; ours is the base class's two buffers,
so that one learning rate fits models whose hidden states differ in scale by orders of magnitude.

Their `s` is the logarithm of KVzip+, attention times `||W_O v|| / ||h||`, which is no risk: of gates that
learned it, the artifact says `score_unit: rank`, and their threshold tau is one of `exp(tau)` on the score.
"""

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from retain.config import Count
from retain.gates.base import GateInputs, LogitGate

# `gelu` is the exact one (erf), as in the released KVzap and WG-KV gates.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}
Activation = Literal["gelu", "relu", "silu"]


class LinearGate(LogitGate):
    """`log_risk_h(i) = w_h . x_i + b_h`, with `x_i` the standardised attention input of entry `i`.

    KVzap-Linear (arXiv 2601.07891). Parameters: `E H + H`.
    """

    family = "linear"

    def __init__(self, *, E: int, H: int):
        super().__init__(E=E, H=H)
        self.out = nn.Linear(E, H)

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Log-risk of every entry, from `inputs.hidden_BTE`."""
        return self.out(self.standardise(inputs.hidden_BTE)).transpose(1, 2)


class MLPGate(LogitGate):
    """`log_risk(i) = W2 act(W1 x_i + b1) + b2`, with `x_i` the standardised attention input of entry `i`.

    KVzap-MLP (arXiv 2601.07891; GELU, hidden width E/8 there). Parameters: `E F + F + F H + H`.
    """

    family = "mlp"

    def __init__(self, *, E: int, H: int, F: Count = 64, activation: Activation = "gelu"):
        super().__init__(E=E, H=H)
        self.F, self.activation = F, activation
        self.act = ACTIVATIONS[activation]
        self.up = nn.Linear(E, F)
        self.out = nn.Linear(F, H)

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Log-risk of every entry, from `inputs.hidden_BTE`."""
        hidden_BTF = self.act(self.up(self.standardise(inputs.hidden_BTE)))
        return self.out(hidden_BTF).transpose(1, 2)
