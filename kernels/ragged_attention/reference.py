"""Reference of attention over ragged rows, in plain PyTorch: the definition, and the path on a CPU.

There are two formulations. *A few queries* (decoding) see all pages of all rows at once, as one batch of
small products on a `[pages, PAGE, D]` view of the store: no key and no value is copied, no row waits for a
longer one, and the pages of a row are combined by their maxima and sums (split-K: `out = sum_p exp(m_p - m)
o_p / sum_p exp(m_p - m) s_p`). The number of operations does not depend on lengths, shapes change only when
the store is laid out anew, and the device is never waited for. *Many queries* take one row after another, in
chunks, so that products are large. Half precision is upcast, and codes are decoded, piece by piece, so that
no copy of a whole store is made.

The pages of a row are added up by `index_add_`: in their order on a CPU, by atomic additions on CUDA, unless
`torch.use_deterministic_algorithms` forbids them.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from retain.kernels.codes import Codes, decode
from retain.kernels.ragged_attention.pages import PAGE, Pages, paged

# Upper bound on the elements of each temporary held at once (the logits; queries and outputs page by page;
# half-precision or coded keys or values, upcast): 4 Mi, 16 MiB in float32. One page is taken at least; row by
# row one query, and one row's keys and values in half precision or codes, whatever their size.
MAX_LOGITS = 1 << 22
# Query positions times query heads of a KV head up to which all pages go as one batch: measured on a CPU, the
# two ways are equal at 8; elsewhere each row's launches weigh more. One query position always counts as few.
FEW, FEW_ELSEWHERE = 16, 256


class Call(NamedTuple):
    """Arguments of `ragged_attention`, which explains them."""

    queries_BQSD: Tensor
    keys_CD: Tensor | Codes
    values_CD: Tensor | Codes
    offsets_R1: Tensor
    seen_RS: Tensor
    sinks_Q: Tensor | None
    log_weight_C: Tensor | None
    pages: Pages
    scaling: float
    soft_cap: float | None


def ragged_attention(call: Call) -> tuple[Tensor, Tensor]:
    """The output, laid out as the kernel does it, a query's heads side by side; and log-sum-exps."""
    queries_BQSD, keys_CD, values_CD, seen_RS = call.queries_BQSD, call.keys_CD, call.values_CD, call.seen_RS
    soft_cap, sinks_Q, pages = call.soft_cap, call.sinks_Q, call.pages
    B, Q, S, D = queries_BQSD.shape
    R = seen_RS.shape[0]
    group, heads = B * Q // R, R // B
    dtype = torch.promote_types(queries_BQSD.dtype, torch.float32)
    queries_RMD = queries_BQSD.reshape(R, group * S, D).to(dtype) * call.scaling
    sinks_RM = None
    if sinks_Q is not None:
        sinks_Q = sinks_Q.to(dtype).clamp(min=torch.finfo(dtype).min)
        sinks_RM = sinks_Q.view(1, heads, group, 1).expand(B, -1, -1, S).reshape(R, group * S)
    sight = seen_RS, call.log_weight_C
    few = FEW if keys_CD.device.type == "cpu" else FEW_ELSEWHERE
    attend = _by_pages if S == 1 or group * S <= few else _by_rows
    out_RMD, lse_RM = attend(queries_RMD, keys_CD, values_CD, pages, sight, soft_cap, sinks_RM)
    out_BQSV = queries_BQSD.new_empty(B, S, Q, values_CD.shape[1]).transpose(1, 2)
    return out_BQSV.copy_(out_RMD.view(B, Q, S, -1)), lse_RM.view(B, Q, S)


def _read(store_CD: Tensor | Codes, held: slice, dtype: torch.dtype) -> Tensor:
    """These entries in the precision of the products; codes stand for float32 numbers."""
    return decode(store_CD.part(held), dtype) if isinstance(store_CD, Codes) else store_CD[held].to(dtype)


def _lse(top: Tensor, total: Tensor) -> Tensor:
    """The log-sum-exp of a softmax, `total` relative to `top`: the least number where nothing is seen."""
    return torch.where(top > torch.finfo(top.dtype).min, top + total.log(), float("-inf"))


def _by_pages(
    queries_RMD: Tensor,
    keys_CD: Tensor | Codes,
    values_CD: Tensor | Codes,
    pages: Pages,
    sight: tuple[Tensor, Tensor | None],
    soft_cap: float | None,
    sinks_RM: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A few queries, `M = G * S` a row: all pages in one batch, or in as few as `MAX_LOGITS` allows."""
    R, M, D = queries_RMD.shape
    seen_RS, log_weight_C = sight
    S, dtype = seen_RS.shape[1], queries_RMD.dtype
    same = all(isinstance(one, Tensor) and one.dtype == dtype for one in (keys_CD, values_CD))
    widest = max(D, values_CD.shape[-1])
    step = max(1, MAX_LOGITS // max(M * max(PAGE, widest), 0 if same else PAGE * widest))
    slot_P = torch.arange(PAGE, device=keys_CD.device)

    # The running softmax of each query: largest logit, sum and output relative to it. Where something is
    # seen, the largest logit itself adds 1 to the sum, so that a sum below 1 means that nothing was seen.
    if sinks_RM is None:
        top_RM = queries_RMD.new_full((R, M), torch.finfo(dtype).min)
        sum_RM = queries_RMD.new_zeros(R, M)
    else:
        top_RM, sum_RM = sinks_RM, torch.ones_like(sinks_RM)
    out_RMD = queries_RMD.new_zeros(R, M, values_CD.shape[-1])
    for start in range(0, pages.num_pages, step):
        some = slice(start, start + step)
        held = slice(PAGE * start, PAGE * min(start + step, pages.num_pages))
        row = pages.row_pages[some]
        queries = queries_RMD.index_select(0, row)
        # Keys times queries, not the other way: with few queries the product is nearly twice as fast, even
        # with the copy that puts a query's logits side by side.
        keys = paged(_read(keys_CD, held, dtype))
        logits = torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2).contiguous()
        del keys
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        if log_weight_C is not None:
            logits += paged(log_weight_C)[some, None].to(dtype)
        hidden = slot_P >= (seen_RS.index_select(0, row) - pages.first_pages[some, None])[..., None]
        logits.unflatten(1, (-1, S)).masked_fill_(hidden[:, None], float("-inf"))
        index = row[:, None].expand(-1, M)
        higher_RM = top_RM.scatter_reduce(0, index, logits.amax(-1), "amax")
        probs = logits.sub_(higher_RM.index_select(0, row)[..., None]).exp_()
        scale_RM = (top_RM - higher_RM).exp_()
        sum_RM = (sum_RM * scale_RM).index_add_(0, row, probs.sum(-1))
        if start:
            out_RMD *= scale_RM[..., None]
        out_RMD.index_add_(0, row, torch.bmm(probs, paged(_read(values_CD, held, dtype))))
        top_RM = higher_RM
    sum_RM = sum_RM.clamp(min=1.0)
    return out_RMD / sum_RM[..., None], _lse(top_RM, sum_RM)


def _by_rows(
    queries_RMD: Tensor,
    keys_CD: Tensor | Codes,
    values_CD: Tensor | Codes,
    pages: Pages,
    sight: tuple[Tensor, Tensor | None],
    soft_cap: float | None,
    sinks_RM: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Many queries: one row after another, some queries at a time."""
    R, M, D = queries_RMD.shape
    seen_RS, log_weight_C = sight
    S, dtype, device = seen_RS.shape[1], queries_RMD.dtype, keys_CD.device
    group = M // S
    offsets = list(accumulate((PAGE * count for count in pages.counts), initial=0))
    widest = max(D, values_CD.shape[-1], PAGE * max(pages.counts))
    step = min(S, max(1, MAX_LOGITS // (group * widest)))
    starts = range(0, S, step)
    # What the queries of a chunk see at most: later entries are not even multiplied. One wait for the device.
    seen_most = torch.stack([seen_RS[:, start : start + step].amax(-1) for start in starts], -1).tolist()
    out_RGSD = queries_RMD.new_zeros(R, group, S, values_CD.shape[-1])
    # Of a query that sees nothing: its sink alone.
    nothing_RM = queries_RMD.new_full((R, M), torch.finfo(dtype).min) if sinks_RM is None else sinks_RM
    lse_RGS = _lse(nothing_RM, torch.ones_like(nothing_RM)).view(R, group, S)
    queries_RGSD = queries_RMD.unflatten(1, (group, S))
    for row in range(R):
        most = max(seen_most[row])
        held = slice(offsets[row], offsets[row] + most)
        keys_TD, values_TD = (_read(store_CD, held, dtype) for store_CD in (keys_CD, values_CD))
        for start, T in zip(starts, seen_most[row], strict=True):
            if T == 0:
                continue
            some = slice(start, start + step)
            logits_GST = queries_RGSD[row, :, some] @ keys_TD[:T].T
            if soft_cap is not None:
                logits_GST = soft_cap * torch.tanh(logits_GST / soft_cap)
            if log_weight_C is not None:
                logits_GST = logits_GST + log_weight_C[held][:T].to(dtype)
            hidden_ST = torch.arange(T, device=device) >= seen_RS[row, some, None]
            logits_GST = logits_GST.masked_fill_(hidden_ST, float("-inf"))
            top_GS1 = logits_GST.amax(-1, keepdim=True).clamp_(min=torch.finfo(dtype).min)
            if sinks_RM is not None:
                sinks_GS1 = sinks_RM[row].view(group, S, 1)[:, some]
                top_GS1 = torch.maximum(top_GS1, sinks_GS1)
            probs_GST = logits_GST.sub_(top_GS1).exp_()
            sum_GS1 = probs_GST.sum(-1, keepdim=True)
            if sinks_RM is not None:
                sum_GS1 += (sinks_GS1 - top_GS1).exp_()
            sum_GS1.clamp_(min=1.0)
            out_RGSD[row, :, some] = (probs_GST @ values_TD[:T]) / sum_GS1
            lse_RGS[row, :, some] = _lse(top_GS1, sum_GS1)[..., 0]
    return out_RGSD.flatten(1, 2), lse_RGS.flatten(1, 2)


def merged(
    outs: Sequence[Float[Tensor, "B Q S V"]],
    lses: Sequence[Float[Tensor, "B Q S"]],
    sinks_Q: Float[Tensor, " Q"] | None = None,
) -> Float[Tensor, "B Q S V"]:
    """Attention over the entries of all stores, from its result over each of them.

    `out = sum_t exp(lse_t - lse) out_t` with `lse = log(exp(sink) + sum_t exp(lse_t))`, where `t` runs over
    stores, and no `exp(sink)` without sinks. A query that sees nothing in any store gives zeros.

    Args:
        outs: of each store, the output of `ragged_attention`, called without sinks.
        lses: of each store, the log-sum-exp that came with it.
        sinks_Q: one more logit per query head, counted once over all stores.

    Returns:
        the output, in the precision of the first; added up in float32 at least.

    Examples:
        >>> outs = [torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2)]
        >>> merged(outs, [torch.full((1, 1, 1), 0.5)] * 2).tolist()
        [[[[0.5, 0.5]]]]
    """
    dtype = torch.promote_types(outs[0].dtype, torch.float32)
    every_TBQS = torch.stack([lse_BQS.to(dtype) for lse_BQS in lses])
    lse_BQS = every_TBQS.logsumexp(0)
    if sinks_Q is not None:
        lse_BQS = torch.logaddexp(lse_BQS, sinks_Q.to(dtype)[:, None])
    # Where nothing is seen, -inf less -inf is nothing to go on with.
    share_TBQS = (every_TBQS - lse_BQS.clamp(min=torch.finfo(dtype).min)).exp_()
    out_BQSV = torch.zeros_like(outs[0], dtype=dtype)
    for out, share_BQS in zip(outs, share_TBQS, strict=True):
        out_BQSV.addcmul_(out.to(dtype), share_BQS[..., None])
    return out_BQSV.to(outs[0].dtype)
