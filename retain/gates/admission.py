"""Gates that decide when an entry is written: WG-KV's admission and DMS's delayed eviction.

Inputs are an entry's own key (WG-KV), or the residual stream or the attention input (DMS). Soft attention
adds `log_gate` to an entry's logits once it has left the protected window. Both score in `rank`: their
numbers say whether an entry stays, by a threshold, and not how much attention it will get.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from retain.config import Positive, ProperShare, Whole
from retain.gates.base import OPEN, Gate, GateInputs
from retain.gates.mlp import ACTIVATIONS, Activation

# The score of an entry about which nothing has been decided yet: its `log_gate` is 0 in every precision, and
# no threshold or budget takes it before others.
UNDECIDED = 1e4


class AdmissionGate(Gate):
    """`log g_h(i) = log max(sigmoid(z_h(i)), floor)`, of an MLP `z` over the entry's own key.

    `z_h(i) = w2_h . act(W1_h [norm(k_i before RoPE); norm(k_i after RoPE)] + b1_h) + b2_h`.

    WG-KV: KV Admission (arXiv 2512.17452). Every KV head has its own MLP (their grouped convolutions of
    kernel size 1); the two RMSNorms, of keys before and after RoPE, are the layer's. The output is `log g`,
    so their rule `g > 0.1` is `output > log 0.1`; the logarithm is what soft attention adds. Map of names:
    `norm_before`, `norm_after` are their `pre_key_norm`, `post_key_norm`; `up_*` their `conv1`, `out_*` their
    `conv2`; `expand` their `g_expand`, `floor` their `g_epsilon`. `open_` is ours: theirs starts where the
    default initialisation of a convolution puts it, about half open (`opens_at=0`). Parameters, with
    `F = round(expand D)`: `2 D + H (2 D F + F) + H (F + 1)`.

    Args:
        expand: hidden width of each head's MLP, in head widths (released: 4 for Llama, 1.5 for Qwen3).
        floor: smallest `g`.
        opens_at: output bias that `open_` sets.
    """

    family = "admission"
    inputs = frozenset({"keys", "keys_before"})
    unit = "rank"
    sizes = ("E", "H", "D")

    def __init__(
        self,
        *,
        E: int,
        H: int,
        D: int,
        expand: Positive = 4.0,
        activation: Activation = "gelu",
        floor: ProperShare = 1e-3,
        opens_at: float = OPEN,
    ):
        super().__init__(E=E, H=H)
        F = max(1, round(expand * D))
        self.D, self.F, self.expand = D, F, expand
        self.activation, self.floor, self.opens_at = activation, floor, opens_at
        self.act = ACTIVATIONS[activation]
        self.norm_before = nn.RMSNorm(D, eps=1e-6)
        self.norm_after = nn.RMSNorm(D, eps=1e-6)
        # As a convolution starts: uniform within one over the root of what each output sums over.
        inner, outer = (2 * D) ** -0.5, F**-0.5
        self.up_weight = nn.Parameter(torch.empty(H, F, 2 * D).uniform_(-inner, inner))
        self.up_bias = nn.Parameter(torch.empty(H, F).uniform_(-inner, inner))
        self.out_weight = nn.Parameter(torch.empty(H, F).uniform_(-outer, outer))
        self.out_bias = nn.Parameter(torch.empty(H).uniform_(-outer, outer))

    @torch.no_grad()
    def open_(self) -> None:
        self.out_bias.fill_(self.opens_at)

    def log_gate(self, output_BHT: Float[Tensor, "B H T"]) -> Float[Tensor, "B H T"]:
        """The output itself."""
        return output_BHT

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """`log g` of every entry, from its key before and after RoPE."""
        assert inputs.keys_before_BHTD is not None and inputs.keys_BHTD is not None
        dtype = self.up_weight.dtype
        before = self.norm_before(inputs.keys_before_BHTD.to(dtype))
        after = self.norm_after(inputs.keys_BHTD.to(dtype))
        both = torch.cat([before, after], dim=-1)
        hidden_BHTF = self.act(both @ self.up_weight.transpose(1, 2) + self.up_bias[:, None])
        logit_BHT = torch.einsum("bhtf,hf->bht", hidden_BHTF, self.out_weight) + self.out_bias[:, None]
        return functional.logsigmoid(logit_BHT).clamp_min(math.log(self.floor))


class DMSGate(Gate):
    """`score_h(i) = offset - scale z_h(d)`, with a logit `z` of the entry `d(i)` that decides.

    DMS: Inference-Time Hyper-Scaling with KV Cache Compression (arXiv 2506.05345). Their decision logit is
    minus our score: they evict where it is above 0, after the protected window has passed. `scale` and
    `offset` are their `dms_alpha_scale` and `dms_initial_alpha_offset`.

    Two logits were released, which `query_width` tells apart:

    - 0: `z_h(d) = w_h . RMSNorm(x_d)`, with `x_d` the residual stream: an adapter of a frozen model
      (`dms_separate_alpha: true` in the released training code). Parameters: `E + E H`, and `H` with `bias`.
    - D: `z_h(d) = RMSNorm(W_h x_d)[D - 1]`, with `x_d` the attention input, after the layer norm: the last
      neuron, before RoPE, of the first query head of the KV head's group; the norm is the model's query norm
      (`nvidia/Qwen3-8B-DMS-8x`, whose attention then sets the neuron to zero). Parameters: `D + E H D`, and
      `H D` with `bias`.

    The deciding entry `d(i)` is a choice of variant:

    - `next`, the released one: `d(i) = i + 1`. Their training attention shifts the decision logits by one and
      pads the newest with 0.0, which keeps it. Here the newest entry (and one before padding) has the score
      `UNDECIDED`, 1e4: kept under every threshold and budget, and open in soft attention, which is causal
      only with a protected window of at least 1. The number of an entry depends on the entry after it, so the
      gate is `contextual`: evictions while decoding and prompts in chunks are refused.
    - `own`, `d(i) = i`, is ours and the default: the number of an entry is known when the entry comes, so
      that these gates work while decoding and in chunks. Gates trained in one variant do not fit the other;
      weights that NVIDIA released want `next`.

    Args:
        scale: factor on the projection: one learning rate fits it and the model's own scale.
        offset: score before training; high is open.
        eps: of the norm.
        bias: whether the projection has a bias (theirs has one where the model's attention has).
        decides: the entry whose hidden state decides.
        query_width: width of the query head whose last neuron is the logit; 0: a projection of its own.
    """

    family = "dms"
    inputs = frozenset({"stream"})
    unit = "rank"

    def __init__(
        self,
        *,
        E: int,
        H: int,
        scale: float = 100.0,
        offset: float = 5.0,
        eps: float = 1e-6,
        bias: bool = False,
        decides: Literal["own", "next"] = "own",
        query_width: Whole = 0,
    ):
        super().__init__(E=E, H=H)
        self.decides, self.contextual = decides, decides == "next"
        self.scale, self.offset, self.eps, self.bias = scale, offset, eps, bias
        self.query_width = query_width
        self.inputs = frozenset({"hidden" if query_width else "stream"})
        self.norm = nn.RMSNorm(query_width or E, eps=eps)
        self.out = nn.Linear(E, H * (query_width or 1), bias=bias)

    @torch.no_grad()
    def open_(self) -> None:
        """Set the rows of the logit to zero: every score is then the offset."""
        for parameter in self.out.parameters():
            parameter.unflatten(0, (self.H, -1))[:, -1].zero_()

    def log_gate(self, output_BHT: Float[Tensor, "B H T"]) -> Float[Tensor, "B H T"]:
        """`logsigmoid` of the score, which is minus their decision logit."""
        return functional.logsigmoid(output_BHT)

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Minus the decision logit of every entry, from `inputs.stream_BTE` (`hidden_BTE` for a neuron)."""
        x_BTE = inputs.hidden_BTE if self.query_width else inputs.stream_BTE
        assert x_BTE is not None
        x_BTE = x_BTE.to(self.norm.weight.dtype)
        if self.query_width:
            logit_BTH = self.norm(self.out(x_BTE).unflatten(-1, (self.H, -1)))[..., -1]
        else:
            logit_BTH = self.out(self.norm(x_BTE))
        score_BHT = self.offset - self.scale * logit_BTH.transpose(1, 2)
        if self.decides == "own":
            return score_BHT
        after_BHT = functional.pad(score_BHT[..., 1:], (0, 1), value=UNDECIDED)
        if inputs.valid_BT is None:
            return after_BHT
        decided_B1T = functional.pad(inputs.valid_BT[:, 1:], (0, 1), value=False)[:, None]
        return after_BHT.masked_fill(~decided_B1T, UNDECIDED)
