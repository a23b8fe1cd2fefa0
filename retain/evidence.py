"""Defines `Evidence` and `Score`: the tensors of one attention layer that scorers may read, and their result.

A score is one number an entry, higher = keep, with its unit: fusing unlike numbers is an error.

The fields of `Evidence` are views of what the layer's attention used: queries and keys after their norm and
RoPE, values, the attention input, padding. `attention_probs` is the plain float32 definition of the attention
weights that all scores share. Nothing here imports transformers.

Causality goes by *entry index*, not by position id: query `s` of `S` sits at entry index `T - S + s`, so
padding and gaps in the positions do not change what a query sees. After an eviction the entries are the
columns of `retain.attention.dense_view`, and `held_BHT` says which head holds which. Layers with a sliding
window never evict, so a query here sees all entries up to its own.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.shapes import axis_of


@dataclass(frozen=True)
class RunningStatistics:
    """Statistics of all queries so far about each entry that is still held (made by
    `retain.attention.received`).

    Args:
        mass_BHT: float32, attention received so far, summed over queries, averaged over the group.
        last_access_BHT: int64, place in its sequence of the last query that accessed the entry
            (`retain.scores.lru` and `retain.scores.lazy_eviction` say what an access is).
        longest_gap_BHT: int64, most tokens of its sequence from one access to the next; None where no score
            asks.
    """

    mass_BHT: Float[Tensor, "B H T"]
    last_access_BHT: Int[Tensor, "B H T"]
    longest_gap_BHT: Int[Tensor, "B H T"] | None = None

    def select_batch(self, idx: Int[Tensor, " N"] | slice) -> "RunningStatistics":
        """Select some of the sequences."""
        chosen: Any = (None if each is None else each[idx] for each in vars(self).values())
        return RunningStatistics(*chosen)


@dataclass(frozen=True)
class Evidence:
    """Tensors of an attention layer at an eviction.

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
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; None for no cap.
        sinks_Q: one extra logit per query head that takes part in the softmax and belongs to no entry
            (gpt-oss).
        rotary: the rotary embedding of queries and keys; None if unknown.
        running: statistics of all queries so far, held ones included; None if not kept (scores then compute
            them from the queries, if all are held).
        held_BHT: which head holds which entry; other keys and values are ignored. None: every head holds
            every valid entry. A query counts even if its own entry is not held.
        place_BT: int64, number of the sequence's own tokens before each entry, evicted ones included; None:
            nothing was evicted, and the valid entries are counted.
        queried_BS: False where a sequence has fewer than S queries. None: one query for each valid entry of
            the last S.
        learned_BHT: the gate's number of each entry, made when it was written (`GateSet.learned`: its
            score, or the log of its decay); None without a gate.
        log_weight_BHT: float32, added to the logits of each entry, after a cap: the logarithm of what it
            counts, where merges have made it stand for several; None: nothing is added.
        value_norm_BQT: `||v_i W_O^q||_1` of each entry, cached; None: computed on demand.
        stream_BTE: as `hidden_BTE`, before the layer norm: the residual stream; None if not requested.
        lookahead_BQSD: queries of a gate's lookahead tokens, which follow all entries and are not cached.
        lookahead_keys_BHSD: keys of the lookahead tokens.
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
    soft_cap: float | None = None
    sinks_Q: Float[Tensor, " Q"] | None = None
    rotary: Rotary | None = None
    running: RunningStatistics | None = None
    held_BHT: Bool[Tensor, "B H T"] | None = None
    place_BT: Int[Tensor, "B T"] | None = None
    queried_BS: Bool[Tensor, "B S"] | None = None
    learned_BHT: Float32[Tensor, "B H T"] | None = None
    log_weight_BHT: Float32[Tensor, "B H T"] | None = None
    value_norm_BQT: Float[Tensor, "B Q T"] | None = None
    stream_BTE: Float[Tensor, "B T E"] | None = None
    lookahead_BQSD: Float[Tensor, "B Q lookahead D"] | None = None
    lookahead_keys_BHSD: Float[Tensor, "B H lookahead D"] | None = None

    @property
    def num_seen(self) -> int:
        """T: entries shown, padding included; all that was seen, where nothing was evicted."""
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

    @property
    def exists_BHT(self) -> Bool[Tensor, "B H T"]:
        """Which head holds which entry, without padding (a view if every head holds all)."""
        if self.held_BHT is None:
            return self.valid_BT[:, None].expand(-1, self.num_heads, -1)
        return self.valid_BT[:, None] & self.held_BHT

    @property
    def places_BT(self) -> Int[Tensor, "B T"]:
        """Number of the sequence's own tokens before each entry; undefined on padding."""
        return self.valid_BT.cumsum(-1) - 1 if self.place_BT is None else self.place_BT

    @property
    def asks_BS(self) -> Bool[Tensor, "B S"]:
        """Which of the held queries are real; the others are padding."""
        valid_BS = self.valid_BT[:, self.num_seen - self.num_queries :]
        return valid_BS if self.queried_BS is None else valid_BS & self.queried_BS

    def select_batch(self, idx: Int[Tensor, " N"] | slice) -> "Evidence":
        """Select some of the sequences (a slice gives views, an index tensor gives copies)."""
        chosen: dict[str, Any] = {}
        for name, tensor in vars(self).items():
            if tensor is not None and axis_of(name, "B") == 0:
                chosen[name] = tensor[idx]
        running = None if self.running is None else self.running.select_batch(idx)
        return replace(self, **chosen, running=running)


def visible(evidence: Evidence, start: int, stop: int) -> Bool[Tensor, "B heads s T"]:
    """Mask of the entries that queries `start..stop` see: not later, held by the head.

    Padded queries see nothing. `heads` is 1 if all heads see the same.

    Args:
        stop: one past the last query.
    """
    T, S = evidence.num_seen, evidence.num_queries
    entry_T = torch.arange(T, device=evidence.valid_BT.device)
    here = slice(T - S + start, T - S + stop)
    seen_BsT = (entry_T <= entry_T[here, None]) & evidence.asks_BS[:, start:stop, None]
    held_BHT = evidence.valid_BT[:, None] if evidence.held_BHT is None else evidence.exists_BHT
    return seen_BsT[:, None] & held_BHT[:, :, None]


def attention_probs(evidence: Evidence, start: int, stop: int) -> Float[Tensor, "B Q s T"]:
    """Attention weights of queries `start..stop`, in float32 (float64 if the evidence is float64).

    `a_qs = softmax_i(cap(scaling * q_s . k_i) + log_weight_i)` over the entries that are `visible`. The row
    of a padded query, and of one that sees nothing, is zeros.

    Args:
        stop: one past the last query.

    Returns:
        weights `[B, Q, stop - start, T]`, of which each row of a real query that sees an entry sums to one
            (less, with sinks).

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
    logits = queries @ evidence.keys_BHTD.to(dtype).transpose(-1, -2) * evidence.scaling
    if evidence.soft_cap is not None:
        logits = torch.tanh(logits / evidence.soft_cap) * evidence.soft_cap
    if evidence.log_weight_BHT is not None:
        logits = logits + evidence.log_weight_BHT[:, :, None]
    seen_BHsT = visible(evidence, start, stop)
    logits = logits.view(B, H, -1, s, T).masked_fill(~seen_BHsT[:, :, None], float("-inf"))
    if evidence.sinks_Q is not None:
        sink = evidence.sinks_Q.to(dtype).view(1, H, -1, 1, 1).expand(B, -1, -1, s, 1)
        logits = torch.cat([logits, sink], dim=-1)
    # The row of a query that sees nothing is all -inf, and its softmax NaN.
    probs = torch.softmax(logits, dim=-1)[..., :T].masked_fill(~seen_BHsT[:, :, None], 0.0)
    return probs.flatten(1, 2)


UNITS = ("risk", "mass", "rank")


@dataclass(frozen=True)
class Score:
    """Scores of one layer's entries.

    Args:
        values_BHT: float32, higher = keep, -inf on entries that do not exist (padding, or not held by the
            head) and on no other.
        unit: `risk` (value-weighted attention, `a * ||v W_O||_1`; also a maximum or mean of it over queries
            and heads, and with attention granted to every entry before the norm; not with another norm or a
            divisor), `mass` (attention alone, or a share of it) or `rank` (only the order inside a head is
            meaningful; heads may still compete by the numbers as they are, as in released presses).
        first_BHT: score of the first of two stages (`retain.attention.two_stage`), float32; None: one stage.
        window: number of last entries that are the observation window of the score.
        layer_weight_B: float64, weight of this layer in a budget that layers share (CAKE); None without.
        draw_BHT: keys of a drawn share of a budget (`retain.budget.joint`), float32; None
            without.
    """

    values_BHT: Float[Tensor, "B H T"]
    unit: str
    first_BHT: Float[Tensor, "B H T"] | None = None
    window: int = 0
    layer_weight_B: Float64[Tensor, " B"] | None = None
    draw_BHT: Float[Tensor, "B H T"] | None = None

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"a score's unit is one of {', '.join(UNITS)}; got {self.unit!r}.")
        if self.values_BHT.dtype != torch.float32 or self.values_BHT.dim() != 3:
            shape = list(self.values_BHT.shape)
            raise ValueError(
                f"a score is float32 [B, H, T]; got {self.values_BHT.dtype} {shape}: build it with "
                f"scores.masked_score."
            )


def masked_score(
    values_BHT: Float[Tensor, "B H T"],
    exists: Bool[Tensor, "B T"] | Bool[Tensor, "B H T"],
    unit: str,
    *,
    first_BHT: Float[Tensor, "B H T"] | None = None,
    window: int = 0,
    layer_weight_B: Float64[Tensor, " B"] | None = None,
) -> Score:
    """Make a `Score` from raw numbers: float32, and -inf where a head holds no entry.

    Args:
        values_BHT: scores, any float type, finite where an entry exists.
        exists: which head holds which entry (`Evidence.exists_BHT`), or `[B, T]`, the same for all heads.
        unit: what the numbers are.
        first_BHT: score of a first stage, any float type, finite where an entry exists.
        window: observation window that the numbers were made with.
        layer_weight_B: weight of this layer in a shared budget.
    """
    missing_BHT = ~(exists[:, None] if exists.dim() == 2 else exists)
    if first_BHT is not None:
        first_BHT = first_BHT.float().masked_fill(missing_BHT, float("-inf"))
    values_BHT = values_BHT.float().masked_fill(missing_BHT, float("-inf"))
    return Score(values_BHT, unit, first_BHT, window, layer_weight_B)


@dataclass(frozen=True, eq=False)
class Stock:
    """Entries that can still be chosen, if not every token of the evidence: at a second eviction, or while an
    announced prompt is still being read.

    Args:
        held_BL: entries that each sequence's layers hold, over all heads.
        lengths_B: tokens that a ratio is a ratio of: seen by each sequence, padding apart, or announced.
        intact_BT: tokens seen, padding included, that every head of every layer still holds: only these can
            be protected.
    """

    held_BL: tuple[tuple[int, ...], ...]
    lengths_B: tuple[int, ...]
    intact_BT: Bool[Tensor, "B T"]
