"""Measures of an eviction without a benchmark: coverage, likeness of kept sets, divergence.

They take, of one layer, the attention of some queries over all entries *with nothing evicted* (rows of
`retain.evidence.attention_probs`) and what a policy keeps of the prompt's entries; or logits; and give one
number per query, head, or pair. A keep mask is of the *prompt's* entries, the first T columns of the
attention. What came after them (the rest of the question, generated tokens) is kept by every policy, so it is
counted in no denominator of coverage.

Everywhere, `a_q[i]` is the attention of one query of head q to entry i, `S` the kept entries. All this is of
one layer whose queries are the full cache's: errors of lower layers do not add up here (they do in the
divergence of the logits).
"""

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retain.ranking import rank_entries

# A query that finds less than this of what it looked for is an outlier (DefensiveKV).
OUTLIER = 0.5


def coverage(
    probs_BQST: Float[Tensor, "B Q S seen"], keep_BHT: Bool[Tensor, "B H T"]
) -> Float[Tensor, "B H S"]:
    """Share of the attention to prompt entries that goes to kept ones.

    `cov[h] = sum_{i in S, i < T} I_h[i] / sum_{i < T} I_h[i]`, `I_h[i] = max_{q in group(h)} a_q[i]`. A query
    that pays the prompt nothing is covered: 1.

    Taming the Fragility of KV Cache Eviction in LLM Inference (DefensiveKV), arXiv 2510.13334. Whether recent
    tokens are in its denominator is not said: here only the prompt's entries are.

    Args:
        probs_BQST: attention of S queries over all entries seen, the prompt's first.
        keep_BHT: of the prompt's entries, True where kept.

    Returns:
        coverage in [0, 1].

    Raises:
        ValueError: shapes that do not belong together.

    Examples:
        >>> probs = torch.tensor([[[[0.6, 0.3, 0.1]]]])
        >>> coverage(probs, torch.tensor([[[True, False]]])).item()  # the third entry came after the prompt
        0.6666666865348816
    """
    Q, seen = probs_BQST.shape[1], probs_BQST.shape[-1]
    H, T = keep_BHT.shape[1:]
    if Q % H or seen < T:
        raise ValueError(
            f"attention of {Q} query heads over {seen} entries and a keep mask of {H} KV heads and {T} "
            "entries do not belong together: pass a mask of the layer's own KV heads over the prompt's "
            "entries, which are the first."
        )
    paid_BHST = probs_BQST[..., :T].unflatten(1, (H, -1)).amax(2)
    total_BHS = paid_BHST.sum(-1)
    lost_BHS = paid_BHST.masked_fill(keep_BHT[:, :, None], 0.0).sum(-1)
    # By what is lost, so that keeping everything is 1 exactly.
    return 1.0 - torch.where(total_BHS > 0, lost_BHS / total_BHS, 0.0).clamp(0.0, 1.0)


def coverage_numbers(coverages: Iterable[Sequence[Tensor]]) -> dict[str, float]:
    """The mean, the worst, and the outliers of coverage over documents, steps, layers and heads.

    With `c_t` the mean over all heads of all layers at step t: `mean` is that of all numbers of all
    documents; `worst_step = min_t c_t`; `worst` the least single number; `outliers` the share of single
    numbers below 0.5.

    DefensiveKV, arXiv 2510.13334, prints a mean, a worst case and a count of outliers, and does not say
    which of the two worst cases it means: both are given.

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
        "outliers": float((cell_N < OUTLIER).double().mean()),
    }


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
