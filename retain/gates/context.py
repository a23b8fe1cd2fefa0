"""Context gate: flags each entry for each KV head by a small attention over the context.

In-context KV-Cache Eviction for LLMs via Attention-Gate (arXiv 2410.12876). The small attention is causal, so
that an entry's flag is the same in training over the whole document and in a prefill of any
beginning of it. It scores the whole prompt at once at the prefill: attention inputs of earlier tokens are not
kept, so prompts in chunks and later evictions are refused (`contextual`).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from retain.config import Count
from retain.gates.base import OPEN, GateInputs, LogitGate

# A padded entry's logit in the small attention; its exponential is zero in every precision.
AWAY = -1e4
# Head widths that the memory-efficient attention kernels take are multiples of this, in every precision.
ALIGNED = 8


class ContextGate(LogitGate):
    """`flag(i) = W_O [softmax_j(q_i^a . k_j^a / sqrt(width)) v_j^a]_a + b`, over small heads `a`.

    `q, k, v = W_q x, W_k x, W_v x` of the standardised attention inputs. Map of names: this is their
    `Attention-Gate`, the small attention their `MHA'`, the sigmoid of the flag's logit what they compare
    with a threshold. They write that the gate accepts the global context; released code was not at hand, and
    here an entry sees itself and earlier ones. No positions enter.
    Parameters, with `W = heads width`: `3 E W + W H + H`. Memory is linear in T (no T x T mask is made).

    Args:
        heads: heads of the small attention.
        width: width of each.
        opens_at: output bias that `open_` sets.
    """

    family = "context"
    unit = "rank"
    contextual = True

    def __init__(
        self,
        *,
        E: int,
        H: int,
        heads: Count = 4,
        width: Count = 32,
        opens_at: float = OPEN,
    ):
        super().__init__(E=E, H=H)
        self.heads, self.width, self.opens_at = heads, width, opens_at
        self.queries = nn.Linear(E, heads * width, bias=False)
        self.keys = nn.Linear(E, heads * width, bias=False)
        self.values = nn.Linear(E, heads * width, bias=False)
        self.out = nn.Linear(heads * width, H)

    @torch.no_grad()
    def open_(self) -> None:
        self.out.weight.mul_(0.1)
        self.out.bias.fill_(self.opens_at)

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Logit of every entry's flag, from all of `inputs.hidden_BTE`."""
        x_BTE = self.standardise(inputs.hidden_BTE)
        split = (-1, (self.heads, self.width))
        queries, keys, values = (
            projection(x_BTE).unflatten(*split).transpose(1, 2)
            for projection in (self.queries, self.keys, self.values)
        )
        scale = self.width**-0.5
        queries, keys, values = _aligned(queries, keys, values, _padding(inputs.valid_BT), scale)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
        return self.out(seen[..., : self.width].transpose(1, 2).flatten(2)).transpose(1, 2)


def _padding(valid_BT: Bool[Tensor, "B T"] | None) -> Bool[Tensor, "B T"] | None:
    """The padding mask, or None if nothing is padded. The check is free on a CPU; on a GPU it would wait for
    the device, once a layer, to spare the small attention one dimension."""
    if valid_BT is None or (valid_BT.device.type == "cpu" and bool(valid_BT.all())):
        return None
    return valid_BT


def _aligned(
    queries: Float[Tensor, "B heads T width"],
    keys: Float[Tensor, "B heads T width"],
    values: Float[Tensor, "B heads T width"],
    valid_BT: Bool[Tensor, "B T"] | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pad heads to a width that fast kernels take; with padding, one more dimension masks padded entries (a
    mask would be T x T, this is T). All other added dimensions are zero.

    `q' . k' = q . k` to a real entry, and `q . k + AWAY` (before the softmax) to a padded one.
    """
    width = queries.shape[-1]
    used = width if valid_BT is None else width + 1
    if valid_BT is not None:
        away_B1T1 = (~valid_BT)[:, None, :, None].to(keys.dtype) * (AWAY / scale)
        queries = torch.cat([queries, torch.ones_like(queries[..., :1])], dim=-1)
        keys = torch.cat([keys, away_B1T1.expand_as(queries[..., :1])], dim=-1)
    aligned = -(-used // ALIGNED) * ALIGNED
    queries, keys = (functional.pad(side, (0, aligned - used)) for side in (queries, keys))
    return queries, keys, functional.pad(values, (0, aligned - width))
