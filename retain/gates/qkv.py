"""Query-key-value gate: one MLP over a token's own queries, keys and values of all heads.

Locret: Accelerating Long-Context LLM Inference with Retaining Heads (arXiv 2410.01805).
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from retain.config import Count
from retain.gates.base import Gate, GateInputs
from retain.gates.mlp import ACTIVATIONS, Activation

# Where queries and keys are taken -> what the gate looks at then.
ROPE = {
    "before": frozenset({"queries_before", "keys_before", "values"}),
    "after": frozenset({"queries", "keys", "values"}),
}


class QKVGate(Gate):
    """`mass(i) = W2 act(W1 [Q_i; K_i; V_i])`, the heads of each side by side, head after head.

    Map of names: our `up` and `out` are their `fc1` and `fc2`, our mass their causal importance score, the
    largest attention that an entry gets from the answer. Two variants of what the paper writes as
    `[Q, K, V]`: `rope="before"` is the released code, which takes the projections as they come out, and
    `rope="after"` takes what the attention sees. In models with a query/key norm (Locret has none such) both
    come after that norm. `fc2` has H outputs, as in the released model file for Phi-3; the one for Llama
    writes 8, whatever the model. The released activation is the model's own `hidden_act`, SiLU in both
    released models. Parameters: `(Q + 2 H) D F + F H`, and `F + H` with `bias`.

    Args:
        rope: whether queries and keys are taken before or after RoPE.
        bias: whether the two matrices have a bias (Locret: no; then `start_at_` has nothing to set).
    """

    family = "qkv"
    inputs = ROPE["before"]
    unit = "mass"
    signed = True  # a regression without a floor
    sizes = ("E", "H", "Q", "D")

    def __init__(
        self,
        *,
        E: int,
        H: int,
        Q: int,
        D: int,
        F: Count = 1024,
        activation: Activation = "silu",
        rope: Literal["before", "after"] = "before",
        bias: bool = False,
    ):
        super().__init__(E=E, H=H)
        self.inputs = ROPE[rope]
        self.Q, self.D, self.F = Q, D, F
        self.activation, self.rope, self.bias = activation, rope, bias
        self.act = ACTIVATIONS[activation]
        self.up = nn.Linear((Q + 2 * H) * D, F, bias=bias)
        self.out = nn.Linear(F, H, bias=bias)

    @torch.no_grad()
    def start_at_(self, mean_H: Float[Tensor, " H"]) -> None:
        if self.bias:
            self.out.weight.mul_(0.1)
            self.out.bias.copy_(mean_H)

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Attention that every entry will get, from its queries, keys and values."""
        before = self.rope == "before"
        queries_BQTD = inputs.queries_before_BQTD if before else inputs.queries_BQTD
        keys_BHTD = inputs.keys_before_BHTD if before else inputs.keys_BHTD
        assert queries_BQTD is not None and keys_BHTD is not None and inputs.values_BHTD is not None
        parts = (queries_BQTD, keys_BHTD, inputs.values_BHTD)
        dtype = self.up.weight.dtype
        side_by_side = torch.cat([part.to(dtype).transpose(1, 2).flatten(2) for part in parts], dim=-1)
        return self.out(self.act(self.up(side_by_side))).transpose(1, 2)
