"""Computes the terms of end-to-end training: distance of the gated from the full model, and cost of openness.

Nothing is ever as large as tokens x vocabulary or tokens x tokens: logits exist for a chunk of tokens at a
time and are made again for the gradient, and so are the terms of a sum over pairs of entries.
`retain.train.soft_stage` weighs the terms.

Divergences are named after the distribution that they average over: `kl_forward` is KL(full || gated), which
punishes the gated model where the full one is sure (TRIM-KV's `fwkl`); `kl_reverse` is KL(gated || full)
(IndexMem). DMS's released code says "forward KL" and computes the latter.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from retain.hf.model.decoder import base_model

VOCABULARY = ("kl_forward", "kl_reverse", "next_token")
# Where a token has no next one.
NO_TOKEN = -100
# Tokens whose logits exist at a time.
CHUNK = 256
# Numbers of one block of pairs of entries that exist at once.
BLOCK = 2**22
# Of each layer.
LogGates = Sequence[Float[Tensor, "B H T"]]
# Hidden states [N, E] -> logits [N, V].
Head = Callable[[Tensor], Tensor]
Valid = Bool[Tensor, "B T"]


@torch.no_grad()
def head_of(model: Any) -> Head:
    """Returns the head of a causal language model: hidden states behind the last norm -> logits `x = W h`, or
    `cap tanh(x / cap)` where its configuration says so (Gemma). It is compared with the model's logits on two
    tokens; ValueError: they differ: the architecture does something to its logits that is not known here."""
    config, projection = model.config.get_text_config(), model.get_output_embeddings()
    cap = getattr(config, "final_logit_softcapping", None)

    def head(hidden_NE: Tensor) -> Tensor:
        logits_NV = projection(hidden_NE)
        return logits_NV if cap is None else torch.tanh(logits_NV / cap) * cap

    input_ids = torch.arange(2, device=next(model.parameters()).device)[None] + min(2, config.vocab_size - 2)
    hidden_TE = base_model(model)(input_ids=input_ids, use_cache=False).last_hidden_state[0]
    wanted_TV = model(input_ids=input_ids, use_cache=False).logits[0].float()
    off = float((head(hidden_TE).float() - wanted_TV).abs().max())
    tolerance = 1e-4 if hidden_TE.dtype in (torch.float32, torch.float64) else 1e-2
    if not off <= tolerance * max(1.0, float(wanted_TV.abs().max())):
        raise ValueError(
            f"the logits of {type(model).__name__} are not what its output embeddings give (they differ by "
            f"{off:.3g}). Train these gates with stage `local`, or with soft.terms of `hidden` and a "
            "capacity alone."
        )
    return head


def vocabulary_terms(
    head: Head,
    gated_NE: Float[Tensor, "N E"],
    full_NE: Float[Tensor, "N E"],
    next_N: Int[Tensor, " N"],
    wanted: Collection[str],
    *,
    chunk: int = CHUNK,
) -> dict[str, Float[Tensor, " N"]]:
    """Terms over the vocabulary, one number a token.

    With `p = softmax(full logits)` and `q = softmax(gated logits)`,

        kl_forward = sum_v p_v (log p_v - log q_v)
        kl_reverse = sum_v q_v (log q_v - log p_v)
        next_token = -log q[next]

    Logits exist for `chunk` tokens at a time, and are made again for the gradient.

    Args:
        gated_NE: last hidden states of the gated model, with their graph.
        full_NE: of the full model.
        next_N: the token that follows, or -100 where none does (then `next_token` is 0).
    """
    names = [name for name in VOCABULARY if name in wanted]
    if not names:
        return {}

    def of_chunk(gated_ME: Tensor, full_ME: Tensor, next_M: Tensor) -> tuple[Tensor, ...]:
        gated_MV = head(gated_ME)
        gated_MV = gated_MV.to(torch.promote_types(gated_MV.dtype, torch.float32))
        found = {}
        if "next_token" in names:
            found["next_token"] = functional.cross_entropy(
                gated_MV, next_M, ignore_index=NO_TOKEN, reduction="none"
            )
        if len(names) > len(found):
            with torch.no_grad():
                log_p_MV = head(full_ME).to(gated_MV.dtype).log_softmax(-1)
            log_q_MV = gated_MV.log_softmax(-1)
            for name, (a_MV, b_MV) in {
                "kl_forward": (log_p_MV, log_q_MV),
                "kl_reverse": (log_q_MV, log_p_MV),
            }.items():
                if name in names:
                    found[name] = (a_MV.exp() * (a_MV - b_MV)).sum(-1)
        return tuple(found[name] for name in names)

    pieces = [
        checkpoint(of_chunk, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(gated_NE.split(chunk), full_NE.split(chunk), next_N.split(chunk), strict=True)
    ]
    return {name: torch.cat(piece) for name, piece in zip(names, zip(*pieces, strict=True), strict=True)}


def hidden_term(gated_NE: Float[Tensor, "N E"], full_NE: Float[Tensor, "N E"]) -> Float[Tensor, " N"]:
    """`mean_e (gated_e - full_e)^2` of the last hidden states (WG-KV, arXiv 2512.17452), in float32."""
    dtype = torch.promote_types(gated_NE.dtype, torch.float32)
    return (gated_NE.to(dtype) - full_NE.to(dtype)).square().mean(-1)


# How much is open.


class _Aging(torch.autograd.Function):
    """`sum_i valid_i exp([t - i >= protected] (t - i) d_i)` over `i <= t`, for chosen t, in blocks of them.

    The decay differs from entry to entry, so that no recurrence gives the sum at t from that at t - 1. A
    block of `BLOCK` numbers exists at a time, in the backward too, which makes it again.
    """

    @staticmethod
    def forward(ctx: Any, decay_BHT: Tensor, valid_BT: Tensor, rows_BR: Tensor, protected: int) -> Tensor:
        ctx.save_for_backward(decay_BHT, valid_BT, rows_BR)
        ctx.protected = protected
        parts = [
            torch.where(seen_BrT[:, None], (age_BrT[:, None] * decay_BHT[:, :, None]).exp(), 0.0).sum(-1)
            for _, seen_BrT, age_BrT in _blocks(decay_BHT, valid_BT, rows_BR, protected)
        ]
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, d_BHR: Tensor) -> tuple[Tensor, None, None, None]:
        decay_BHT, valid_BT, rows_BR = ctx.saved_tensors
        d_decay_BHT = torch.zeros_like(decay_BHT)
        for block, seen_BrT, age_BrT in _blocks(decay_BHT, valid_BT, rows_BR, ctx.protected):
            worth_BHrT = (age_BrT[:, None] * decay_BHT[:, :, None]).exp()
            worth_BHrT = torch.where(seen_BrT[:, None], worth_BHrT, 0.0)
            age_BrT = age_BrT.expand(len(decay_BHT), -1, -1)
            d_decay_BHT += torch.einsum("bhr,bhrt,brt->bht", d_BHR[..., block], worth_BHrT, age_BrT)
        return d_decay_BHT, None, None, None


def _blocks(decay_BHT: Tensor, valid_BT: Tensor, rows_BR: Tensor, protected: int) -> Any:
    """Slice of the rows, which entries they see, and the ages that count."""
    T = decay_BHT.shape[-1]
    size = max(1, BLOCK // max(1, decay_BHT.numel()))
    place_T = torch.arange(T, device=decay_BHT.device)
    for start in range(0, rows_BR.shape[1], size):
        block = slice(start, start + size)
        age_BrT = rows_BR[:, block, None] - place_T
        seen_BrT = (age_BrT >= 0) & valid_BT[:, None]
        aged_BrT = torch.where(age_BrT >= max(protected, 0), age_BrT, 0).clamp_min(0)
        yield block, seen_BrT, aged_BrT.to(decay_BHT.dtype)


def open_entries(
    log_gate_BHT: Float[Tensor, "B H T"],
    valid_BT: Valid,
    rows_BR: Int[Tensor, "#B R"],
    *,
    protected: int,
    ages: bool,
) -> Float[Tensor, "B H R"]:
    """Number of entries open to the query at entry t: `S_t = sum_{i <= t} w_ti`, with `w_ti = 1` where
    `t - i < protected`, and beyond `exp(phi_i)`, or with `ages` `exp((t - i) phi_i)`.

    Time and memory are linear in T for gates; for decays the time is R x T, and the memory that of T and of
    one block of `BLOCK` numbers.

    Args:
        log_gate_BHT: phi, at most 0; 0 on entries without a gate.
        valid_BT: False on padding, which is never open.
        rows_BR: the t that are asked about, as entry indices: of each sequence, or the same of all.
        protected: entries of the recent window.
        ages: whether phi is a decay per token of age.
    """
    log_gate_BHT = log_gate_BHT.to(torch.promote_types(log_gate_BHT.dtype, torch.float32))
    rows_BR, valid_BT = rows_BR.to(log_gate_BHT.device), valid_BT.to(log_gate_BHT.device)
    if ages:
        return _Aging.apply(log_gate_BHT, valid_BT, rows_BR, protected)
    # In float64, since long sums of small numbers lose the last ones; one zero in front: nothing yet.
    gate_BHT = functional.pad((log_gate_BHT.exp() * valid_BT[:, None]).double().cumsum(-1), (1, 0))
    seen_BT = functional.pad(valid_BT.double().cumsum(-1), (1, 0))
    rows_BR = rows_BR.expand(len(valid_BT), -1)
    before_BR = (rows_BR + 1 - max(protected, 0)).clamp_min(0)
    near_BR = seen_BT.gather(-1, rows_BR + 1) - seen_BT.gather(-1, before_BR)
    far_BHR = gate_BHT.gather(-1, before_BR[:, None].expand(-1, gate_BHT.shape[1], -1))
    return (far_BHR + near_BR[:, None]).to(log_gate_BHT.dtype)


def rows_of(valid_BT: Valid, count: int) -> Int[Tensor, "B R"]:
    """`count` entry indices of every sequence, spread evenly over its tokens, whatever it is padded to, the
    last among them; 0, or more than there are: all.

    A sequence with fewer rows than another has the entry before its first token in place of what is missing,
    which is padding, and so counts as nothing (`capacity_term`).
    """
    rows, first = [], [valid_BT.shape[1] - int(num_tokens) for num_tokens in valid_BT.sum(-1).tolist()]
    for start in first:
        n = valid_BT.shape[1] - start
        even = torch.linspace(n / count, n, count, dtype=torch.float64).round().long() - 1 if count else None
        rows.append(start + (torch.arange(n) if even is None or count >= n else even))
    longest = max(map(len, rows))
    padded = [
        functional.pad(rows_R, (longest - len(rows_R), 0), value=start - 1)
        for start, rows_R in zip(first, rows, strict=True)
    ]
    return torch.stack(padded).to(valid_BT.device)


def capacity_term(
    open_BXR: Float[Tensor, "B counted R"], seen_BR: Float[Tensor, "B R"], limit_BR: Float[Tensor, "B R"]
) -> Float[Tensor, " B"]:
    """`(1 / n) sum_t max(0, S_t - M_t) / t`, a hinge on how much is open (TRIM-KV, arXiv 2512.03324; its code
    divides by `t - M_t` instead), mean over X (heads, or one for all).

    Args:
        open_BXR: S_t, entries open, at rows R.
        seen_BR: t, tokens seen; 0 where the row is padding and does not count.
        limit_BR: M_t, the budget (M, or keep_ratio t).
    """
    counts_BR = seen_BR > 0
    excess_BXR = (open_BXR - limit_BR[:, None]).relu().masked_fill(~counts_BR[:, None], 0.0)
    each_BXR = excess_BXR / seen_BR.clamp_min(1)[:, None]
    return (each_BXR.sum(-1) / counts_BR.sum(-1).clamp_min(1)[:, None]).mean(-1)


def admitted_term(log_gates: LogGates, valid_BT: Valid, protected: int) -> Float[Tensor, " B"]:
    """`mean (off + (1 - off) (1 - (1 - g)^2))` over entries, heads and layers, with `off = min(1, W / (n -
    s))` the share of its life that entry s of n spends in the window W in any case (WG-KV, arXiv 2512.17452).
    """
    valid_BT = valid_BT.to(log_gates[0].device)
    place_BT = valid_BT.cumsum(-1) - 1
    left_BT = (valid_BT.sum(-1, keepdim=True) - place_BT).clamp_min(1)
    off_B1T = (protected / left_BT).clamp_max(1.0)[:, None]
    each = [
        off_B1T.to(phi_BHT.device)
        + (1 - off_B1T.to(phi_BHT.device)) * (1 - (1 - _openness(phi_BHT)).square())
        for phi_BHT in log_gates
    ]
    return _share(each, valid_BT)


def open_share(log_gates: LogGates, valid_BT: Valid) -> Float[Tensor, " B"]:
    """Mean openness `exp(phi)` over the tokens, heads and layers of each sequence."""
    return _share([_openness(phi_BHT) for phi_BHT in log_gates], valid_BT)


def _openness(log_gate_BHT: Tensor) -> Tensor:
    return log_gate_BHT.to(torch.promote_types(log_gate_BHT.dtype, torch.float32)).exp()


def _share(each: Sequence[Tensor], valid_BT: Tensor) -> Tensor:
    """Mean over a sequence's tokens, and over the heads of all layers."""
    home = each[0].device
    valid_BT = valid_BT.to(home)
    total_B = sum(x_BHT.to(home).masked_fill(~valid_BT[:, None], 0.0).sum((1, 2)) for x_BHT in each)
    heads = sum(x_BHT.shape[1] for x_BHT in each)
    assert isinstance(total_B, Tensor)
    return total_B / (valid_BT.sum(-1).clamp_min(1) * heads)
