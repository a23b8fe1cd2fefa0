"""Linear gate: one matrix from the attention input to one number per KV head.

KVzap (arXiv 2601.07891) found it nearly as good as an MLP (R2 .74 against .77 on Llama-3.1-8B) at a fiftieth
of the size; it regresses log KVzip+ with it, we regress log future risk (see `retain/future.py`).
"""

from jaxtyping import Float
from torch import Tensor, nn

from retain.gates.base import GateInputs, LogitGate


class LinearGate(LogitGate):
    """`log_risk_h(i) = w_h . x_i + b_h`, with `x_i` the standardised attention input of entry `i`.

    KVzap-Linear (arXiv 2601.07891): their `s` is the logarithm of KVzip+, attention times
    `||W_O v|| / ||h||`, which is no risk: of gates that learned it, the artifact says `score_unit: rank`, and
    their threshold tau is one of `exp(tau)` on the score. Parameters: `E H + H`.

    Args:
        E: model width.
        H: KV heads of the layer.
    """

    family = "linear"

    def __init__(self, *, E: int, H: int):
        super().__init__(E=E, H=H)
        self.out = nn.Linear(E, H)

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Log-risk of every entry, from `inputs.hidden_BTE`."""
        assert inputs.hidden_BTE is not None
        return self.out(self.standardise(inputs.hidden_BTE)).transpose(1, 2)
