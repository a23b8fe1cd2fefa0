"""Measures how far a layer's attention output moves when entries fade: a layer-local loss without a target.

The keep-mask enters the attention as a logarithm added to the logits, so that what is left is renormalised as
it is after an eviction, and no row of attention is held.

The loss is LAVa's (arXiv 2509.09754) and CriticalKV's (arXiv 2502.03805), who minimise it by hand-made
scores.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from retain.attention.chunked import truncate
from retain.evidence import Evidence
from retain.kernels.gated_attention import gated_attention
from retain.train.objectives.case import Case, boundary_of, keyed_generator

# Set behind the key of a document, so that these draws are not those of its pairs.
QUERIES = 0x0BEE
# Halvings of the interval in which a threshold lies: to 1e-15 of it.
BISECTIONS = 50


def layer_output_loss(case: Case) -> Float[Tensor, ""]:
    """Returns the share of the layer's output that is lost (`relative_change`), mean over `keep_ratios` and
    over the document and its branches.

    The soft keep-mask is `m_hi = sigmoid((s_hi - threshold_h) / temperature)` on reached entries and 1 on all
    others; the threshold is that of `budget_threshold`, so that as much is kept whatever the gate says, and a
    number added to all scores of a head changes nothing. Queries of the document see entries nearer than
    `horizon` as they are; those of a branch see all of the document's through the mask.

    The document and the branches are taken one after another, and of each only its loss and the gradient that
    it sends to the gate's output are kept: memory is that of one of them, however many there are. So the
    gradient is right once; there is no second derivative. ValueError: the case has no view.
    """
    if case.view is None:
        raise ValueError(
            "the loss term `layer_output` looks at the layer itself: pass view= (of "
            "retain.train.teacher.walk)."
        )
    temperature = case.settings.temperature
    known_BHT = case.output_BHT.masked_fill(~case.reached_BHT, 0.0)
    trained = torch.is_grad_enabled() and known_BHT.requires_grad
    masks = []  # of each budget: the logarithm of the keep-mask, a leaf that parts look at, what they sent
    for threshold_BH1 in budget_threshold(
        known_BHT, case.reached_BHT, case.settings.keep_ratios, temperature
    ):
        log_keep_BHT = functional.logsigmoid((known_BHT - threshold_BH1) / temperature)
        log_keep_BHT = log_keep_BHT.masked_fill(~case.reached_BHT, 0.0)
        leaf_BHT = log_keep_BHT.detach().requires_grad_(trained)
        masks.append((log_keep_BHT, leaf_BHT, torch.zeros_like(leaf_BHT)))
    total, count = torch.zeros_like(known_BHT[0, 0, :0].sum()), 0
    for evidence, horizon in _parts(case):
        with torch.no_grad():
            whole_BSE = layer_output(evidence, None, horizon)
        for _, leaf_BHT, gradient_BHT in masks:
            loss = relative_change(evidence, leaf_BHT, horizon, whole_BSE)
            if trained:
                gradient_BHT += torch.autograd.grad(loss, leaf_BHT)[0]
            total, count = total + loss.detach(), count + 1
        del evidence
    # The graph behind the value holds only the gradients that the parts have sent; they add 0.
    for log_keep_BHT, leaf_BHT, gradient_BHT in masks:
        total = total + ((log_keep_BHT - leaf_BHT.detach()) * gradient_BHT).sum()
    return total / max(1, count)


def budget_threshold(
    output_BHT: Float[Tensor, "B H T"],
    reached_BHT: Bool[Tensor, "B H T"],
    ratios: Sequence[float],
    temperature: float,
) -> Float[Tensor, "K B H 1"]:
    """The threshold `t` of each of K budgets, under which a soft keep-mask keeps what a head may: `sum_i
    sigmoid((s_i - t) / tau) = k` over its reached entries, `k` of `boundary_of` (one half of a single entry).

    Its gradient is that of the equation: with `m_i` the mask, `dt / ds_i = m_i (1 - m_i) / sum_k m_k (1 -
    m_k)`. A threshold that stood still instead would reward a head for raising all of its scores, and one
    that knew only the order would let a head that says the same of all keep a half.

    Args:
        output_BHT: s, finite everywhere.
        reached_BHT: entries that compete; a head without any gets 0.
        ratios: the budgets, as shares of them.
        temperature: tau.
    """
    known_BHT, count_BH1 = output_BHT.detach().double(), reached_BHT.sum(-1, keepdim=True)
    k_KBH1 = torch.stack([boundary_of(count_BH1, ratio) for ratio in ratios]).double()
    k_KBH1 = torch.where(count_BH1 > 1, k_KBH1, 0.5 * count_BH1)
    # With all at the lowest score, none of the budgets lies further than log(2 n) from it; so above.
    reach_BH1 = temperature * (2.0 * count_BH1 + 1).log()
    low_BH1 = known_BHT.masked_fill(~reached_BHT, float("inf")).amin(-1, keepdim=True) - reach_BH1
    high_BH1 = known_BHT.masked_fill(~reached_BHT, float("-inf")).amax(-1, keepdim=True) + reach_BH1
    some_BH1 = count_BH1 > 0
    low_KBH1, high_KBH1 = (
        torch.where(some_BH1, edge_BH1, 0.0).expand_as(k_KBH1) for edge_BH1 in (low_BH1, high_BH1)
    )
    for _ in range(BISECTIONS):
        middle_KBH1 = 0.5 * (low_KBH1 + high_KBH1)
        mask_KBHT = torch.sigmoid((known_BHT - middle_KBH1) / temperature).masked_fill(~reached_BHT, 0.0)
        above_KBH1 = mask_KBHT.sum(-1, keepdim=True) > k_KBH1
        low_KBH1 = torch.where(above_KBH1, middle_KBH1, low_KBH1)
        high_KBH1 = torch.where(above_KBH1, high_KBH1, middle_KBH1)
    threshold_KBH1 = 0.5 * (low_KBH1 + high_KBH1)
    # As a softmax, which has no 0 / 0 where every entry is sure: m (1 - m) in logarithms.
    x_KBHT = (known_BHT - threshold_KBH1) / temperature
    log_slope_KBHT = functional.logsigmoid(x_KBHT) + functional.logsigmoid(-x_KBHT)
    lowest = torch.finfo(log_slope_KBHT.dtype).min
    weight_KBHT = log_slope_KBHT.masked_fill(~reached_BHT, lowest).softmax(-1) * some_BH1
    sent_KBHT = weight_KBHT.to(output_BHT.dtype) * (output_BHT - output_BHT.detach())
    return threshold_KBH1.to(output_BHT.dtype) + sent_KBHT.sum(-1, keepdim=True)


def _parts(case: Case) -> Iterator[tuple[Evidence, int]]:
    """The document with its queries, and each branch, made when it is asked for; with the distance from which
    entries are masked."""
    if part := _stretch(case.view.document, case.horizon, case, 0):
        yield part
    for number, (_, evidence) in enumerate(case.view.branches, start=1):
        if part := _stretch(evidence, 0, case, number):
            del evidence
            yield part
        del part


def _stretch(evidence: Evidence, horizon: int, case: Case, number: int) -> tuple[Evidence, int] | None:
    """The same layer up to some keyed query, with that query and the ones before it only: `output_queries` of
    them, none of them so early that it sees no masked entry."""
    T, S = evidence.num_seen, evidence.num_queries
    first = max(0, horizon - (T - S))  # the query at entry `horizon` is the first that sees a masked entry
    if first >= S:
        return None
    count = min(case.settings.output_queries or S, S - first)
    draw = float(torch.rand((), generator=keyed_generator((*case.key, QUERIES, number))))
    start = first + int(draw * (S - first - count + 1))
    part = truncate(evidence, T - S + start + count)
    queried_BS = None if part.queried_BS is None else part.queried_BS[:, start:]
    return replace(part, queries_BQSD=part.queries_BQSD[:, :, start:], queried_BS=queried_BS), horizon


def layer_output(
    evidence: Evidence, log_keep_BHT: Float[Tensor, "B H T"] | None, horizon: int
) -> Float[Tensor, "B S E"]:
    """The output that attention adds to the residual stream at the held queries, biases left out:
    `y_j = sum_q (sum_i a'_qji v_i) W_O^q`, with `a'` the softmax over logits to which the logarithm of the
    keep-mask of all entries (None: nothing is masked) is added at distances of `horizon` or more."""
    dtype = torch.promote_types(evidence.values_BHTD.dtype, torch.float32)
    out_BQSD = gated_attention(
        evidence.queries_BQSD.to(dtype),
        evidence.keys_BHTD.to(dtype),
        evidence.values_BHTD.to(dtype),
        log_keep_BHT,
        scaling=evidence.scaling,
        protected=horizon,
        pads_B=(~evidence.valid_BT).sum(-1),
        soft_cap=evidence.soft_cap,
        sinks_Q=evidence.sinks_Q,
    )
    return torch.einsum("bqsd,qde->bse", out_BQSD, evidence.output_weight_QDE.to(dtype))


def relative_change(
    evidence: Evidence,
    log_keep_BHT: Float[Tensor, "B H entries"],
    horizon: int,
    whole_BSE: Float[Tensor, "B S E"],
) -> Float[Tensor, ""]:
    """`mean_j ||y_j - y'_j||_2 / mean_j ||y_j||_2` over the held queries j that are there.

    Entries behind those of the mask, and nearer than `horizon`, are not masked; `whole_BSE` is y
    (`layer_output` without a mask).
    """
    # Cut where the evidence ends, filled with 0 (kept) where it goes on.
    T, asks_BS = evidence.num_seen, evidence.asks_BS.to(whole_BSE.device)
    log_keep_BHT = functional.pad(log_keep_BHT[..., :T].contiguous(), (0, max(0, T - log_keep_BHT.shape[-1])))

    def mean_norm(output_BSE: Tensor) -> Tensor:
        norm_BS = torch.linalg.vector_norm(output_BSE, dim=-1)
        return norm_BS.masked_fill(~asks_BS, 0.0).sum() / asks_BS.sum().clamp_min(1)

    change = mean_norm(whole_BSE - layer_output(evidence, log_keep_BHT, horizon))
    scale = mean_norm(whole_BSE)
    return change / scale.clamp_min(torch.finfo(scale.dtype).tiny)
