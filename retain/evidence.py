"""What one attention layer shows at one moment: the only thing that scores, gates and targets may look at.

In: the tensors that the layer's attention really used (after the query/key norm and after RoPE), the
attention input, and where the padding is. Out: an `Evidence`, whose fields are views and never copies, and
`attention_probs`, the plain float32 definition of the attention weights that every score shares. Nothing here
knows transformers.

The one decision taken here: causality is by *entry index*, not by position id. Query `s` of `S` sits at entry
index `T - S + s`, whatever its RoPE position is, so padding and gaps in the positions cannot change who sees
whom.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retain.rotary import Rotary


@dataclass(frozen=True)
class Running:
    """What a cache that saw every query knows of each entry that it still holds.

    Args:
        mass_BHT: float32, attention received so far, summed over queries, averaged over the group.
        last_access_BHT: int64, entry index of the last query that accessed the entry (`retain.scores.lru`
            says what an access is).
    """

    mass_BHT: Float[Tensor, "B H T"]
    last_access_BHT: Int[Tensor, "B H T"]

    def select_batch(self, idx: Int[Tensor, " N"] | slice) -> "Running":
        """The same for some of the sequences."""
        return Running(self.mass_BHT[idx], self.last_access_BHT[idx])


@dataclass(frozen=True)
class Evidence:
    """One attention layer, at one moment.

    Args:
        layer_idx: index of the layer in the model.
        queries_BQSD: the last S queries, after norm and RoPE. At prefill S == T.
        keys_BHTD: all keys seen, after norm and RoPE.
        values_BHTD: all values seen.
        output_weight_QDE: the output projection viewed per query head, without bias: the contribution of
            query head `q` to the residual stream is `out_q @ output_weight_QDE[q]`.
        scaling: factor on the logits before the softmax (usually D ** -0.5).
        positions_BT: int64 RoPE position of each entry.
        valid_BT: False on padding. Only left padding exists here.
        hidden_BTE: attention input, after the input layer norm; None when the caller had none.
        token_ids_BT: int64 token ids; None when the caller passed embeddings.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; None for no cap.
        window: a query sees only the last `window` entries, itself included; None for all.
        sinks_Q: one extra logit per query head that takes part in the softmax and pays for nothing (gpt-oss).
        rotary: the rotary embedding that queries and keys went through; None when the caller did not say.
        running: statistics of all queries so far, per entry; None when they were not kept (what needs them
            makes them from the queries, if all are held).
    """

    layer_idx: int
    queries_BQSD: Float[Tensor, "B Q S D"]
    keys_BHTD: Float[Tensor, "B H T D"]
    values_BHTD: Float[Tensor, "B H T D"]
    output_weight_QDE: Float[Tensor, "Q D E"]
    scaling: float
    positions_BT: Int[Tensor, "B T"]
    valid_BT: Bool[Tensor, "B T"]
    hidden_BTE: Float[Tensor, "B T E"] | None = None
    token_ids_BT: Int[Tensor, "B T"] | None = None
    soft_cap: float | None = None
    window: int | None = None
    sinks_Q: Float[Tensor, " Q"] | None = None
    rotary: Rotary | None = None
    running: Running | None = None

    @property
    def num_seen(self) -> int:
        """T: entries seen, padding included."""
        return self.keys_BHTD.shape[2]

    @property
    def num_queries(self) -> int:
        """S: queries held; they are the last S of the T entries."""
        return self.queries_BQSD.shape[2]

    @property
    def num_heads(self) -> int:
        """H: key-value heads."""
        return self.keys_BHTD.shape[1]

    @property
    def group(self) -> int:
        """G = Q / H: query heads that share one key-value head."""
        return self.queries_BQSD.shape[1] // self.keys_BHTD.shape[1]

    def select_batch(self, idx: Int[Tensor, " N"] | slice) -> "Evidence":
        """The same layer for some of the sequences (a slice gives views, an index tensor gives copies)."""
        hidden, tokens = self.hidden_BTE, self.token_ids_BT
        return replace(
            self,
            queries_BQSD=self.queries_BQSD[idx],
            keys_BHTD=self.keys_BHTD[idx],
            values_BHTD=self.values_BHTD[idx],
            positions_BT=self.positions_BT[idx],
            valid_BT=self.valid_BT[idx],
            hidden_BTE=None if hidden is None else hidden[idx],
            token_ids_BT=None if tokens is None else tokens[idx],
            running=None if self.running is None else self.running.select_batch(idx),
        )


def attention_probs(evidence: Evidence, start: int, stop: int) -> Float[Tensor, "B Q s T"]:
    """Attention weights of queries `start..stop`, in float32 (float64 if the evidence is float64).

    `a_qs = softmax_i(cap(scaling * q_s . k_i))` over the valid entries `i <= T - S + s` (and inside the
    window). A padded query sees nothing valid: its row is zeros.

    Args:
        evidence: the layer.
        start: first query, an index into the S held queries.
        stop: one past the last query.

    Returns:
        weights `[B, Q, stop - start, T]`, of which each row of a real query sums to one (less, with sinks).

    Raises:
        ValueError: if the range is not inside the held queries.
    """
    S, T = evidence.num_queries, evidence.num_seen
    if not 0 <= start < stop <= S:
        raise ValueError(
            f"queries {start}..{stop} are not inside the {S} queries held: pass 0 <= start < stop <= {S}."
        )
    dtype = torch.promote_types(evidence.keys_BHTD.dtype, torch.float32)
    B, Q, _, D = evidence.queries_BQSD.shape
    H, s = evidence.num_heads, stop - start
    queries = evidence.queries_BQSD[:, :, start:stop].reshape(B, H, evidence.group * s, D).to(dtype)
    # From here on in place where no gradient forbids it: nothing else here is as large as the logits.
    logits = (queries @ evidence.keys_BHTD.to(dtype).transpose(-1, -2)).view(B, Q, s, T)
    logits.mul_(evidence.scaling)
    if evidence.soft_cap is not None:
        logits = torch.tanh(logits.div_(evidence.soft_cap)) * evidence.soft_cap
    device = logits.device
    # Up to the first query's own entry, causality hides nothing.
    first = T - S + start + 1
    own_s1 = torch.arange(first - 1, T - S + stop, device=device)[:, None]
    later_sT = torch.arange(first, T, device=device) > own_s1
    logits[..., first:].masked_fill_(later_sT, float("-inf"))
    if evidence.window is not None:
        logits.masked_fill_(torch.arange(T, device=device) <= own_s1 - evidence.window, float("-inf"))
    padded = not bool(evidence.valid_BT.all())
    if padded:
        logits.masked_fill_(~evidence.valid_BT[:, None, None], float("-inf"))
    if evidence.sinks_Q is None:
        probs = torch.softmax(logits, dim=-1)
    else:
        sink = evidence.sinks_Q.to(dtype).view(1, Q, 1, 1).expand(B, Q, s, 1)
        probs = torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :T]
    if not padded:
        return probs
    # A query that sees nothing (padding) has an all -inf row, whose softmax is NaN.
    return probs.masked_fill(logits.amax(-1, keepdim=True) == float("-inf"), 0.0)
