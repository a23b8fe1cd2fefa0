"""Low-rank gate: an entry's small key competes with learned base keys for its own small queries.

Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction (arXiv 2601.17668). It predicts the
share of attention that an entry gets against the learned sinks. Base keys start as small noise; the released
trainer starts all of them at zero, where they get the same gradient forever and stay one key that counts
`sinks` times.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from retain.config import Count
from retain.gates.base import OPEN, GateInputs, HiddenGate


class LowRankGate(HiddenGate):
    """An entry's share, `mean_g 1 / (1 + sum_s exp(q_g . c_s / sqrt(r) - (q_g . k / sqrt(r) + b_g)))`.

    `q_g = RMSNorm(W_q x_i + b_q)` for each of the G query heads of a KV head, `k = RMSNorm(W_k x_i)` for the
    KV head, both of width `r = rank`; `c_s` are the KV head's learned base keys, `b_g` a bias. Map of names:
    our `sink_keys` are their `k_base`, our `bias` their `b`, our `rank` their `output_dim`.

    The released training adds `b` twice and the released inference once (arXiv 2601.17668's code; kvpress
    has the inference): here it is once, always. `log_gate` and `open_` are ours: the share itself, which lies
    between 0 and 1, is how far the entry is open. Parameters, with `r = rank`:
    `E Q r + Q r + E H r + 2 r + H sinks r + Q`.

    Args:
        rank: width of the small queries and keys.
        sinks: base keys per KV head.
    """

    family = "lowrank"
    unit = "mass"
    sizes = ("E", "H", "Q")

    def __init__(self, *, E: int, H: int, Q: int, rank: Count = 16, sinks: Count = 16):
        super().__init__(E=E, H=H)
        self.Q, self.rank, self.sinks = Q, rank, sinks
        self.queries = nn.Linear(E, Q * rank)
        self.keys = nn.Linear(E, H * rank, bias=False)
        self.query_norm = nn.RMSNorm(rank, eps=1e-6)
        self.key_norm = nn.RMSNorm(rank, eps=1e-6)
        self.sink_keys = nn.Parameter(torch.empty(H, sinks, rank).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(H, Q // H))

    @torch.no_grad()
    def start_at_(self, mean_H: Float[Tensor, " H"]) -> None:
        """The share is `mean_H` where small queries meet base keys and own key alike."""
        odds_H = torch.logit(mean_H.to(self.bias.dtype).clamp(1e-4, 1 - 1e-4))
        self.bias.copy_((odds_H + math.log(self.sinks))[:, None].expand_as(self.bias))

    @torch.no_grad()
    def open_(self) -> None:
        self.query_norm.weight.mul_(0.1)
        self.bias.fill_(OPEN + math.log(self.sinks))

    def log_gate(self, output_BHT: Float[Tensor, "B H T"]) -> Float[Tensor, "B H T"]:
        """The logarithm of the share."""
        return output_BHT.clamp_min(torch.finfo(output_BHT.dtype).tiny).log()

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Share of attention of every entry, from `inputs.hidden_BTE`."""
        x_BTE = self.standardise(inputs.hidden_BTE)
        B, T, _ = x_BTE.shape
        H, G, rank = self.H, self.Q // self.H, self.rank
        q_BTHGr = self.query_norm(self.queries(x_BTE).view(B, T, H, G, rank))
        k_BTHr = self.key_norm(self.keys(x_BTE).view(B, T, H, rank))
        key_BTHG = torch.einsum("bthgr,bthr->bthg", q_BTHGr, k_BTHr) / math.sqrt(rank) + self.bias
        base_BTHGs = torch.einsum("bthgr,hsr->bthgs", q_BTHGr, self.sink_keys) / math.sqrt(rank)
        # 1 / (1 + sum exp(x)) = sigmoid(-logsumexp(x)), which no large x overflows.
        share_BTHG = torch.sigmoid(key_BTHG - base_BTHGs.logsumexp(-1))
        return share_BTHG.mean(-1).transpose(1, 2)
