"""What one layer's output loses when entries fade: the layer-local loss that needs no target.

In: the evidence of a layer, and what its gate said. Out: how far the layer's attention output moves under a
soft keep-mask, with a gradient to the gate. The one decision taken here: the mask goes into the attention as
a logarithm added to the logits, so that what is left is renormalised as it is after an eviction, and no row
of attention is held; or, as a bound, the loss is made linear in the mask, with one coefficient an entry.

The loss is LAVa's (arXiv 2509.09754) and CriticalKV's (arXiv 2502.03805), who minimise it by hand-made
scores.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from retain.attention_chunks import truncate
from retain.evidence import Evidence
from retain.kernels.gated_attention import gated_attention
from retain.paid import paid
from retain.scores.value_norm import value_norms
from retain.train.losses import Case, keyed_generator, threshold_of

# Set behind the key of a document, so that these draws are not those of its pairs.
QUERIES = 0x0BEE


def layer_output_loss(case: Case) -> Float[Tensor, ""]:
    """How much of the layer's output is lost, mean over `keep_ratios` and over the document and its branches.

    With the soft keep-mask `m_hi = sigmoid((s_hi - threshold_h) / temperature)` on reached entries (1 on all
    others; the threshold is that of `threshold_of`), `exact` is `relative_change` and `bound` is
    `sum_hi c_hi (1 - m_hi) / sum_hi c_hi` with the coefficients of `bound_coefficients`. Queries of the
    document see entries nearer than `horizon` as they are; those of a branch see all of the document's
    through the mask.

    Args:
        case: with a view.

    Raises:
        ValueError: there is no view.
    """
    if case.view is None:
        raise ValueError(
            "the loss term `layer_output` looks at the layer itself: pass view= (of "
            "retain.train.teacher.walk)."
        )
    settings, zero = case.settings, (case.output_BHT * 0.0).nan_to_num().sum()
    parts = [
        part
        for number, (evidence, horizon) in enumerate(_walks(case))
        if (part := _stretch(evidence, horizon, settings.output_queries, (*case.key, QUERIES, number)))
    ]
    if not parts:
        return zero
    losses = []
    known_BHT = case.output_BHT.masked_fill(~case.reached_BHT, 0.0)
    for ratio in settings.keep_ratios:
        threshold_BH1 = threshold_of(case.output_BHT, case.reached_BHT, ratio)
        logit_BHT = (known_BHT - threshold_BH1) / settings.temperature
        log_keep_BHT = functional.logsigmoid(logit_BHT).masked_fill(~case.reached_BHT, 0.0)
        for evidence, horizon in parts:
            if settings.layer_output == "exact":
                order = 1 if settings.output_norm == "l1" else 2
                losses.append(relative_change(evidence, log_keep_BHT, horizon, order))
            else:
                bound_BHT = bound_coefficients(evidence, horizon, log_keep_BHT.shape[-1])
                lost = (bound_BHT * -torch.expm1(log_keep_BHT)[..., : bound_BHT.shape[-1]]).sum()
                losses.append(lost / bound_BHT.sum().clamp_min(torch.finfo(bound_BHT.dtype).tiny))
    return zero + torch.stack(losses).mean()


def _walks(case: Case) -> list[tuple[Evidence, int]]:
    """The document with its own queries, and each branch; with the distance from which entries are masked."""
    assert case.view is not None
    return [(case.view.document, case.horizon), *((evidence, 0) for _, evidence in case.view.branches)]


def _stretch(
    evidence: Evidence, horizon: int, count: int, key: tuple[int, ...]
) -> tuple[Evidence, int] | None:
    """The same layer up to some keyed query, with that query and the ones before it only: `count` of them
    (0: all), none of them so early that it sees no masked entry."""
    T, S = evidence.num_seen, evidence.num_queries
    first = max(0, horizon - (T - S))  # the query at entry `horizon` is the first that sees a masked entry
    if first >= S:
        return None
    count = min(count or S, S - first)
    draw = float(torch.rand((), generator=keyed_generator(key)))
    start = first + int(draw * (S - first - count + 1))
    part = truncate(evidence, T - S + start + count)
    queried_BS = None if part.queried_BS is None else part.queried_BS[:, start:]
    return replace(part, queries_BQSD=part.queries_BQSD[:, :, start:], queried_BS=queried_BS), horizon


def layer_output(
    evidence: Evidence, log_keep_BHT: Float[Tensor, "B H T"] | None, horizon: int
) -> Float[Tensor, "B S E"]:
    """What the layer's attention adds to the residual stream at the held queries, biases left out:
    `y_j = sum_q (sum_i a'_qji v_i) W_O^q`, with `a'` the softmax over logits to which the logarithm of the
    mask is added at distances of `horizon` or more.

    Args:
        evidence: the layer.
        log_keep_BHT: logarithm of the keep-mask, of all its entries; None: nothing is masked.
        horizon: nearer entries are not masked.
    """
    dtype = torch.promote_types(evidence.values_BHTD.dtype, torch.float32)
    out_BQSD = gated_attention(
        evidence.queries_BQSD.to(dtype),
        evidence.keys_BHTD.to(dtype),
        evidence.values_BHTD.to(dtype),
        log_keep_BHT,
        scaling=evidence.scaling,
        protected=horizon,
        window=evidence.window,
        exists_BT=evidence.valid_BT,
        soft_cap=evidence.soft_cap,
        sinks_Q=evidence.sinks_Q,
    )
    return torch.einsum("bqsd,qde->bse", out_BQSD, evidence.output_weight_QDE.to(dtype))


def relative_change(
    evidence: Evidence, log_keep_BHT: Float[Tensor, "B H entries"], horizon: int, order: int
) -> Float[Tensor, ""]:
    """`mean_j ||y_j - y'_j||_p / mean_j ||y_j||_p` over the held queries j.

    Args:
        evidence: the layer; its entries behind those of the mask are not masked.
        log_keep_BHT: logarithm of the keep-mask, of its first entries.
        horizon: nearer entries are not masked.
        order: p.
    """
    log_keep_BHT = _as_wide(log_keep_BHT, evidence.num_seen)
    with torch.no_grad():
        whole_BSE = layer_output(evidence, None, horizon)
        scale = torch.linalg.vector_norm(whole_BSE, order, dim=-1).mean()
    masked_BSE = layer_output(evidence, log_keep_BHT, horizon)
    change = torch.linalg.vector_norm(whole_BSE - masked_BSE, order, dim=-1).mean()
    return change / scale.clamp_min(torch.finfo(scale.dtype).tiny)


def _as_wide(log_keep_BHT: Tensor, T: int) -> Tensor:
    """Cut where the evidence ends, filled with 0 (kept) where it goes on."""
    if log_keep_BHT.shape[-1] >= T:
        return log_keep_BHT[..., :T].contiguous()
    return functional.pad(log_keep_BHT, (0, T - log_keep_BHT.shape[-1]))


@torch.no_grad()
def bound_coefficients(evidence: Evidence, horizon: int, entries: int) -> Float[Tensor, "B H entries"]:
    """Coefficients of a bound on the change that is linear in the mask:
    `mean_j ||y_j - y'_j||_1 <= sum_hi c_hi (1 - m_hi)`.

    `c_hi = mean_j sum_{q in group(h)} a_qji (||v_i W_O^q||_1 + max_k ||v_k W_O^q||_1)`, over the queries j at
    distance `horizon` or more from i. For with `s = sum_i a_i m_i` (and a sink's share), a head's output
    moves by `sum_i a_i (1 - m_i) v_i - (1 - s) o'`, `1 - s = sum_i a_i (1 - m_i)`, and `o'` is no longer than
    the longest value. The same holds of the 2-norm, which is no larger.

    Args:
        evidence: the layer.
        horizon: nearer entries are not masked.
        entries: how many of the first entries may be masked.

    Returns:
        the coefficients, of the entries that the evidence has.
    """
    entries = min(entries, evidence.num_seen)
    (sum_BQT,) = paid(evidence, "sum", entries=entries, distance=horizon)
    norm_BQT = value_norms(evidence).masked_fill(~evidence.valid_BT[:, None], 0.0)
    weight_BQT = norm_BQT[..., :entries] + norm_BQT.amax(-1, keepdim=True)
    each_BQT = sum_BQT * weight_BQT / evidence.num_queries
    return each_BQT.unflatten(1, (evidence.num_heads, -1)).sum(2)
