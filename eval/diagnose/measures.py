"""Measures of an eviction without a benchmark: coverage, output perturbation, likeness of kept sets.

They take, of one layer, the attention of some queries over all entries *with nothing evicted* (rows of
`retain.evidence.attention_probs`), its values and output projection, and what a policy keeps of the prompt's
entries; or logits; or tokens; and give one number per query, head, or pair. A keep mask is of the *prompt's*
entries, the first T columns of the attention. What came after them (the rest of the question, generated
tokens) is kept by every policy, so it is read, and counted in no denominator of coverage.

Everywhere, `a_q[i]` is the attention of one query of head q to entry i, `S` the kept entries, all later ones
included, `e = sum_{i not in S} a_q[i]` the attention that was evicted, and `s` what is left, `1 - e` (with
attention sinks, more than the sum over S: a sink is not evicted). The cache that kept S pays `a_q[i] / s` to
its entries. All this is of one layer whose queries are the full cache's: errors of lower layers do not add up
here (they do in the divergence of the logits). Arguments everywhere:

    probs_BQST          attention of S queries over all entries seen, the prompt's first
    keep_BHT            of the prompt's entries, True where kept
    values_BHTD         of all entries seen
    output_weight_QDE   W_O viewed per query head
    norm_BQT            `retain.scores.value_norm.value_norms`
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from retain.budget.largest_remainder import ratio_of
from retain.ranking import rank_entries
from retain.registry import lookup

# Over the query heads of a group.
AGGREGATES: dict[str, Callable[..., Tensor]] = {"max": torch.amax, "mean": torch.mean}
# A query that finds less than this of what it looked for is an outlier (DefensiveKV).
OUTLIER = 0.5
# A bound of which at least this much was lost is tight.
TIGHT = 0.5
# Share of what a head keeps that CriticalKV's first stage selects: its alpha.
FIRST_SHARE = 0.5
# A row of attention that sums to so much less than one lost it to rounding, not to a sink.
ROUNDING = 1e-5
QUANTILES = {"q01": 0.01, "q05": 0.05, "q10": 0.10}


def coverage(
    probs_BQST: Float[Tensor, "B Q S seen"],
    keep_BHT: Bool[Tensor, "B H T"],
    *,
    aggregate: str = "max",
    norm_BQT: Float[Tensor, "B Q T"] | None = None,
) -> Float[Tensor, "B H S"]:
    """Share of the attention to prompt entries that goes to kept ones.

    `cov[h] = sum_{i in S, i < T} I_h[i] / sum_{i < T} I_h[i]`, `I_h[i] = agg_{q in group(h)} a_q[i] n_q[i]`,
    `n_q[i] = ||v_i W_O^q||_1` if norms are given, else 1. A query that pays the prompt nothing is covered: 1.

    Taming the Fragility of KV Cache Eviction in LLM Inference (DefensiveKV), arXiv 2510.13334. Whether recent
    tokens are in its denominator is not said: here only the prompt's entries are.

    Args:
        aggregate: of `AGGREGATES`: over the query heads of a KV head.
        norm_BQT: of the prompt's entries, for value-weighted coverage.

    Returns:
        coverage in [0, 1].

    Raises:
        ValueError: an unknown aggregate, or shapes that do not belong together.

    Examples:
        >>> probs = torch.tensor([[[[0.6, 0.3, 0.1]]]])
        >>> coverage(probs, torch.tensor([[[True, False]]])).item()  # the third entry came after the prompt
        0.6666666865348816
    """
    over_group = lookup(aggregate, AGGREGATES, what="aggregate over query heads")
    _check(probs_BQST, keep_BHT)
    H, T = keep_BHT.shape[1:]
    paid_BQST = probs_BQST[..., :T]
    if norm_BQT is not None:
        paid_BQST = paid_BQST * norm_BQT[:, :, None]
    paid_BHST = over_group(paid_BQST.unflatten(1, (H, -1)), 2)
    total_BHS = paid_BHST.sum(-1)
    lost_BHS = paid_BHST.masked_fill(keep_BHT[:, :, None], 0.0).sum(-1)
    # By what is lost, so that keeping everything is 1 exactly.
    return 1.0 - torch.where(total_BHS > 0, lost_BHS / total_BHS, 0.0).clamp(0.0, 1.0)


def coverage_numbers(coverages: Iterable[Sequence[Tensor]]) -> dict[str, float]:
    """The mean, the worst, and the outliers of coverage over documents, steps, layers and heads.

    With `c_t` the mean over all heads of all layers at step t: `mean` is that of all numbers of all
    documents; `worst_step = min_t c_t`; `worst` the least single number; `outlier_steps` the share of steps
    with `c_t < 0.5`, `outliers` the share of single numbers below it; `q01`, `q05`, `q10` quantiles of single
    numbers (linear interpolation).

    DefensiveKV, arXiv 2510.13334, prints a mean, a worst case and a count of outliers, and does not say
    which of the two of either it means: both are given.

    Args:
        coverages: for each document, for each layer, one number per head and step `[H, S]`.

    Raises:
        ValueError: there is nothing to summarise.
    """
    steps, cells = [], []
    for layers in coverages:
        heads_HS = torch.cat([layer.double() for layer in layers])
        steps.append(heads_HS.mean(0))
        cells.append(heads_HS.flatten())
    if not cells or not sum(own.numel() for own in cells):
        raise ValueError("coverage has no steps to summarise: pass at least one document with one step.")
    step_S, cell_N = torch.cat(steps), torch.cat(cells)
    return {
        "mean": float(cell_N.mean()),
        "worst_step": float(step_S.min()),
        "worst": float(cell_N.min()),
        "outlier_steps": float((step_S < OUTLIER).double().mean()),
        "outliers": float((cell_N < OUTLIER).double().mean()),
        # numpy's, since `torch.quantile` refuses more than 2 ** 24 numbers.
        **{name: float(np.quantile(cell_N.numpy(), share)) for name, share in QUANTILES.items()},
    }


def head_perturbation(
    probs_BQST: Float[Tensor, "B Q S seen"],
    values_BHTD: Float[Tensor, "B H seen D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    keep_BHT: Bool[Tensor, "B H T"],
) -> Float[Tensor, "B Q S"]:
    """How far eviction moves what one query head adds to the residual stream.

    `L_q = || sum_i a_q[i] v_i W_O^q - sum_{i in S} (a_q[i] / s) v_i W_O^q ||_1`. Where nothing is left to
    read (`s = 0`), the second output is 0.

    Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective (CriticalKV), arXiv
    2502.03805, Eq. of L. It has no groups: a head is a query head.
    """
    moved_BQSD = _moved(probs_BQST, values_BHTD, keep_BHT)
    moved_BQSE = torch.einsum("bqsd,qde->bqse", moved_BQSD, output_weight_QDE.to(moved_BQSD.dtype))
    return moved_BQSE.abs().sum(-1)


def head_perturbation_bound(
    probs_BQST: Float[Tensor, "B Q S seen"],
    norm_BQT: Float[Tensor, "B Q seen"],
    keep_BHT: Bool[Tensor, "B H T"],
) -> Float[Tensor, "B Q S"]:
    """Bound of `head_perturbation` for any directions of the values.

    `theta_q = C - (2 - 1/s) sum_{i in S} a_q[i] N_q[i]`, with `C = sum_i a_q[i] N_q[i]` and
    `N_q[i] = ||v_i W_O^q||_1`; `C` where `s = 0`. It holds for any s; that ranking by `a N` minimises it
    needs `s > 0.5`. Equal to L where all projected values lie on one line, the kept ones on the
    one side of zero and the evicted ones on the other.

    CriticalKV, arXiv 2502.03805, theorem of the bound.
    """
    lost_BQST, kept_BQST, factor_BQS1 = _parts(probs_BQST, keep_BHT)
    # C - sum_S + (1/s - 1) sum_S, so that keeping everything is 0 exactly.
    lost_BQS = (lost_BQST * norm_BQT[:, :, None]).sum(-1)
    return lost_BQS + factor_BQS1[..., 0] * (kept_BQST * norm_BQT[:, :, None]).sum(-1)


def head_perturbation_relaxed_bound(
    probs_BQST: Float[Tensor, "B Q S seen"],
    norm_BQT: Float[Tensor, "B Q seen"],
    keep_BHT: Bool[Tensor, "B H T"],
    *,
    share: float = FIRST_SHARE,
) -> Float[Tensor, "B Q S"]:
    """Bound of `head_perturbation` that ranking by `a N` minimises once a first stage is chosen.

    `theta'_q = C - (2 - 1/sigma) sum_{i in S} a_q[i] N_q[i]`, with `C` and `N` of `head_perturbation_bound`
    and `sigma <= s` the attention to what stays without the second stage: to the first stage, to all later
    entries and to a sink. The first stage is the `floor(share |S_T|)` entries of `S_T`, the kept entries of
    the prompt, that the query pays most. `C` where `s = 0`, infinite where only `sigma` is 0.

    `1/sigma >= 1/s`, so `theta' >= theta >= L`. Equal to theta where the second stage is paid nothing (or
    `share` is 1); above 0 where everything is kept, unlike theta. Where `sigma > 0.5` the second stage that
    minimises it takes the largest `a_q N_q`.

    CriticalKV, arXiv 2502.03805: the bound of its second stage, `sigma` being what its first has collected.
    Derived here from the theorem of the bound; the paper's own statement of it was not read (unverified), and
    its first stage ranks by observed attention, where this one ranks by the query's own.

    Args:
        share: CriticalKV's alpha, in [0, 1].
    """
    lost_BQST, kept_BQST, factor_BQS1 = _parts(probs_BQST, keep_BHT)
    T = keep_BHT.shape[-1]
    group = probs_BQST.shape[1] // keep_BHT.shape[1]
    part, whole = ratio_of(share)
    first_BQ11 = (keep_BHT.sum(-1) * part // whole).repeat_interleave(group, dim=1)[..., None, None]
    ordered_BQST = kept_BQST[..., :T].sort(-1, descending=True).values
    is_first_BQST = torch.arange(T, device=keep_BHT.device) < first_BQ11
    second_BQS1 = ordered_BQST.masked_fill(is_first_BQST, 0.0).sum(-1, keepdim=True)
    first_BQS1 = ordered_BQST.masked_fill(~is_first_BQST, 0.0).sum(-1, keepdim=True)
    first_BQS1 = first_BQS1 + kept_BQST[..., T:].sum(-1, keepdim=True)
    sink_BQS1 = _sink(lost_BQST, kept_BQST)
    # 1/sigma - 1, which is 1/s - 1 where the second stage is paid nothing.
    more_BQS1 = (lost_BQST.sum(-1, keepdim=True) + second_BQS1) / (first_BQS1 + sink_BQS1)
    factor_BQS = torch.where(second_BQS1 > 0, more_BQS1, factor_BQS1)[..., 0]
    lost_BQS = (lost_BQST * norm_BQT[:, :, None]).sum(-1)
    held_BQS = (kept_BQST * norm_BQT[:, :, None]).sum(-1)
    # An infinite factor of nothing is nothing.
    return lost_BQS + torch.where(held_BQS > 0, factor_BQS * held_BQS, 0.0)


def share_tight(
    loss_LQ: Float[Tensor, "*heads"], bound_LQ: Float[Tensor, "*heads"], tight: float = TIGHT
) -> float | None:
    """Share of heads in which a bound is tight: the loss is at least `tight` times the bound.

    `#{heads: mean L >= tight mean theta} / #{heads: mean theta > 0}`, of means over samples; a head that
    cannot lose anything is left out. None if all are.

    Examples:
        >>> share_tight(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2.0, 3.0, 0.0]))
        0.5
    """
    can_lose = bound_LQ > 0
    if not can_lose.any():
        return None
    return float((loss_LQ >= tight * bound_LQ)[can_lose].double().mean())


def boundary_mass(
    probs_BQST: Float[Tensor, "B Q S seen"], boundary_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, "B Q S"]:
    """Share of the attention to prompt entries that goes to a boundary of the prompt.

    `m_q = sum_{i in P} a_q[i] / sum_{i < T} a_q[i]`, with P the boundary (the first or the last entries): the
    `coverage` of a policy that keeps the boundary alone, head by head. A query that pays the prompt nothing
    has 1. Against `|P| / T` it says whether a model reads the ends of a prompt more than its middle.
    """
    return coverage(probs_BQST, boundary_BT[:, None].expand(-1, probs_BQST.shape[1], -1))


def layer_output_loss(
    probs_BQST: Float[Tensor, "B Q S seen"],
    values_BHTD: Float[Tensor, "B H seen D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    keep_BHT: Bool[Tensor, "B H T"],
    *,
    p: int = 1,
) -> Float[Tensor, "B S"]:
    """How far eviction moves a layer's attention output.

    `||y - y^||_p`, `y = sum_q sum_i a_q[i] v_i W_O^q`, and `y^` the same with `a_q[i] / s_q` over the kept
    entries of each head (0 for a head with `s_q = 0`). A bias of W_O cancels.

    LAVa: Layer-wise KV Cache Eviction with Dynamic Budget Allocation, arXiv 2509.09754. Its table of losses
    does not state the norm's order: `p` is 1, for which it has a bound, or 2.

    Raises:
        ValueError: another order, or shapes that do not belong together.
    """
    if p not in (1, 2):
        raise ValueError(f"the layer output loss is taken in the norm p=1 or p=2; got p={p}.")
    moved_BQSD = _moved(probs_BQST, values_BHTD, keep_BHT)
    moved_BSE = torch.einsum("bqsd,qde->bse", moved_BQSD, output_weight_QDE.to(moved_BQSD.dtype))
    return torch.linalg.vector_norm(moved_BSE, p, dim=-1)


def layer_output_bound(
    probs_BQST: Float[Tensor, "B Q S seen"],
    values_BHTD: Float[Tensor, "B H seen D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    keep_BHT: Bool[Tensor, "B H T"],
) -> Float[Tensor, "B S"]:
    """LAVa's bound on the layer output loss for p = 1.

    `2 C sum_q Vbar_{h(q)} e_q`, with `e_q = sum_{i not in S} a_q[i]`, `Vbar_h = max_k ||v_h[k]||_1` over all
    entries seen, and `C = max_{q, d} sum_e |W_O^q[d, e]|` (the 1-norm of W_O^T). Equal to the loss where one
    head's kept values are its evicted ones with the sign turned, and all of one size.

    LAVa, arXiv 2509.09754. The paper has no groups: with them, the largest value is the KV head's.
    """
    lost_BQST, _, _ = _parts(probs_BQST, keep_BHT)
    group = probs_BQST.shape[1] // values_BHTD.shape[1]
    size_BHT = torch.linalg.vector_norm(values_BHTD, 1, dim=-1, dtype=lost_BQST.dtype)
    largest_BQ = size_BHT.amax(-1).repeat_interleave(group, dim=1)
    weight = output_weight_QDE.abs().sum(-1, dtype=lost_BQST.dtype).max()
    return 2 * weight * (lost_BQST.sum(-1) * largest_BQ[..., None]).sum(1)


def share_below(new_LQ: Float[Tensor, "*heads"], base_LQ: Float[Tensor, "*heads"]) -> float:
    """Share of heads whose mean perturbation is lower under one policy than under another.

    `#{heads: mean L(new) < mean L(base)} / #heads`: CriticalKV's head-wise reduction (arXiv 2502.03805: 92 %
    for Llama-3.1-8B at the first decoded token), of means over samples of `head_perturbation`. An equal head
    is not below.

    Examples:
        >>> share_below(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]))
        0.5
    """
    return float((new_LQ < base_LQ).double().mean())


def jaccard(one_BHT: Bool[Tensor, "B H T"], other_BHT: Bool[Tensor, "B H T"]) -> Float[Tensor, "B H"]:
    """Likeness of two kept sets, head by head: `|S and S'| / |S or S'|`; 1 where both are empty."""
    return _share((one_BHT & other_BHT).sum(-1), (one_BHT | other_BHT).sum(-1))


def oracle_overlap(keep_BHT: Bool[Tensor, "B H T"], risk_BHT: Float[Tensor, "B H T"]) -> Float[Tensor, "B H"]:
    """Share of a kept set that the oracle would keep too, with as many entries in the same head.

    `|S and top_k(r)| / k`, `k = |S|`, `r` the true future risk (`retain.future`, as the oracle has it); of
    equal risks the later position first, as everywhere; 1 where nothing is kept. The risk is -inf where there
    is no entry.
    """
    count_BH = keep_BHT.sum(-1)
    best_BHT = rank_entries(risk_BHT) < count_BH[..., None]
    return _share((keep_BHT & best_BHT).sum(-1), count_BH)


def _share(part_BH: Tensor, whole_BH: Tensor) -> Tensor:
    return torch.where(whole_BH > 0, part_BH.double() / whole_BH.clamp_min(1), 1.0)


def divergence(
    logits_SV: Float[Tensor, "*steps V"], other_SV: Float[Tensor, "*steps V"]
) -> Float[Tensor, "*steps"]:
    """Kullback-Leibler divergence of two next-token distributions, in nats.

    `KL(p || p') = sum_v p[v] (log p[v] - log p'[v])`, `p = softmax(logits)`, computed in float64; never below
    0. For KL(full || evicted) the full cache's logits stand first.
    """
    log_p, log_other = (x.double().log_softmax(-1) for x in (logits_SV, other_SV))
    # A token of probability 0 (a logit of -inf) adds nothing.
    terms = torch.where(log_p > -math.inf, log_p.exp() * (log_p - log_other), 0.0)
    return terms.sum(-1).clamp_min(0.0)


def agreement(
    logits_SV: Float[Tensor, "*steps V"], other_SV: Float[Tensor, "*steps V"]
) -> Bool[Tensor, "*steps"]:
    """Whether both distributions have the same most likely token (of equals, the first)."""
    return logits_SV.argmax(-1) == other_SV.argmax(-1)


def token_loss(
    logits_SV: Float[Tensor, "*steps V"], tokens_S: Int[Tensor, "*steps"]
) -> Float[Tensor, "*steps"]:
    """Negative log-probability of each token, in nats and float64."""
    return -logits_SV.double().log_softmax(-1).gather(-1, tokens_S[..., None].long())[..., 0]


def perplexity_ratio(full_S: Float[Tensor, " full"], evicted_S: Float[Tensor, " evicted"]) -> float:
    """Perplexity with the evicted cache over that with the full one, on the same tokens: 1 is no harm.

    `exp(mean_t nll'[t] - mean_t nll[t])`, of `token_loss` over all tokens of all documents.

    Raises:
        ValueError: different numbers of tokens, or none.
    """
    if len(full_S) != len(evicted_S) or not len(full_S):
        raise ValueError(
            f"a perplexity ratio is of the same tokens twice; got {len(full_S)} and {len(evicted_S)}: pass "
            "at least one, and equally many."
        )
    return math.exp(float(evicted_S.double().mean() - full_S.double().mean()))


def repetition_rate(outputs: Iterable[Sequence[int]], *, n: int = 4) -> float | None:
    """Share of n-grams that stood in the same output before.

    `sum_o (number of n-grams of o - number of different ones) / sum_o number of n-grams of o`; None if no
    output has n tokens. Loops show here: a text of one word has a rate near 1. *Protection Is (Nearly) All
    You Need* (arXiv 2605.18053) reports a 4-gram repetition rate and does not define it; this is ours.

    Args:
        outputs: generated tokens, one sequence an output, end token apart.
        n: length of an n-gram.

    Raises:
        ValueError: n below 1.

    Examples:
        >>> repetition_rate([[1, 2, 1, 2, 1]], n=2)  # 12, 21, 12, 21
        0.5
    """
    if n < 1:
        raise ValueError(f"an n-gram has at least one token; got n={n}.")
    total = different = 0
    for tokens in outputs:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total, different = total + len(grams), different + len(set(grams))
    return None if not total else (total - different) / total


def _check(probs_BQST: Tensor, keep_BHT: Tensor) -> None:
    Q, seen = probs_BQST.shape[1], probs_BQST.shape[-1]
    H, T = keep_BHT.shape[1:]
    if Q % H or seen < T:
        raise ValueError(
            f"attention of {Q} query heads over {seen} entries and a keep mask of {H} KV heads and {T} "
            "entries do not belong together: pass a mask of the layer's own KV heads over the prompt's "
            "entries, which are the first."
        )


def _parts(probs_BQST: Tensor, keep_BHT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to evicted entries, to kept ones, and `1/s - 1 = e/s`, 0 where nothing is left."""
    _check(probs_BQST, keep_BHT)
    group, later = probs_BQST.shape[1] // keep_BHT.shape[1], probs_BQST.shape[-1] - keep_BHT.shape[-1]
    keep_BQ1T = pad(keep_BHT.repeat_interleave(group, dim=1), (0, later), value=True)[:, :, None]
    kept_BQST, lost_BQST = probs_BQST.masked_fill(~keep_BQ1T, 0.0), probs_BQST.masked_fill(keep_BQ1T, 0.0)
    lost_BQS1, held_BQS1 = lost_BQST.sum(-1, keepdim=True), kept_BQST.sum(-1, keepdim=True)
    left_BQS1 = held_BQS1 + _sink(lost_BQST, kept_BQST)
    return lost_BQST, kept_BQST, torch.where(held_BQS1 > 0, lost_BQS1 / left_BQS1, 0.0)


def _sink(lost_BQST: Tensor, kept_BQST: Tensor) -> Tensor:
    """What the softmax gave to no entry went to a sink, which stays."""
    sink_BQS1 = 1.0 - kept_BQST.sum(-1, keepdim=True) - lost_BQST.sum(-1, keepdim=True)
    return torch.where(sink_BQS1 > ROUNDING, sink_BQS1, 0.0)


def _moved(probs_BQST: Tensor, values_BHTD: Tensor, keep_BHT: Tensor) -> Tensor:
    """Head output before less head output after, before W_O: `o_lost - (1/s - 1) o_kept`, which is 0 exactly
    where nothing was evicted, and never the difference of two large numbers."""
    lost_BQST, kept_BQST, factor_BQS1 = _parts(probs_BQST, keep_BHT)
    H = values_BHTD.shape[1]
    values_BHTD = values_BHTD.to(probs_BQST.dtype)

    def read(paid_BQST: Tensor) -> Tensor:
        paid_BHxT = paid_BQST.unflatten(1, (H, -1)).flatten(2, 3)
        return (paid_BHxT @ values_BHTD).view(*paid_BQST.shape[:3], -1)

    return read(lost_BQST) - factor_BQS1 * read(kept_BQST)
