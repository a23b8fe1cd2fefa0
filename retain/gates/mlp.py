"""Linear and MLP gates: none or one hidden layer between the attention input and one number per KV head.

KVzap (arXiv 2601.07891) found the linear gate nearly as good as its default, an MLP (R2 .74 against .77 on
Llama-3.1-8B), at a fiftieth of the size; it regresses log KVzip+, we regress log future risk
(`retain/future.py`). The released KVzap has no input standardisation; ours is the base class's two buffers,
so that one learning rate fits models whose hidden states differ in scale by orders of magnitude.

Their `s` is the logarithm of KVzip+, attention times `||W_O v|| / ||h||`, which is no risk: of gates that
learned it, the artifact says `score_unit: rank`, and their threshold tau is one of `exp(tau)` on the score.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from retain.gates.base import GateInputs, LogitGate
from retain.process.registry import lookup

# `gelu` is the exact one (erf), as in the released KVzap and WG-KV gates.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": functional.gelu, "relu": functional.relu, "silu": functional.silu}
)


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Look an activation of `ACTIVATIONS` up; an unknown name is a ValueError that lists them."""
    return lookup(name, ACTIVATIONS, what="activation")


def width_of(F: int, family: str) -> int:
    """Return the hidden width of a gate; a ValueError if it is below 1."""
    if F < 1:
        raise ValueError(f"{family} needs a hidden width of at least 1, got F={F}.")
    return F


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

    Args:
        activation: of `ACTIVATIONS`.
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
        hidden_BTF = self.act(self.up(self.standardise(inputs.hidden_BTE)))
        return self.out(hidden_BTF).transpose(1, 2)
