"""Refits what stays by queries of the prompt: log weights, so that queries pay it what they paid all entries,
and values, so that what they get of it is what they got of all.

Attention Matching (arXiv 2602.16284). It is here to be compared with: it wants the queries of the whole
prompt at one eviction, and solves two least-squares problems a head, one head after another.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from retain.config import Count, Range, check_fields
from retain.evidence import Evidence
from retain.process.extras import require

# Least weight that an entry is fitted: its logarithm is a number.
LEAST_WEIGHT = 1e-6


@dataclass(frozen=True)
class Refit:
    """Settings.

    Args:
        ridge: of the values' least squares, over the mean of the diagonal of their Gram matrix: how much they
            are held to what they were.
        weights: whether log weights are fitted too; else values alone.
        queries: of the prompt, that are asked, for each KV head: those of all its query heads, at as many
            tokens, spread evenly. Each is asked about all entries, later ones too.
    """

    ridge: Annotated[float, Range(above=0)] = 0.1
    weights: bool = True
    queries: Count = 1024

    @property
    def beside_bytes(self) -> int:
        """Bytes that attention reads beside each entry."""
        return torch.float32.itemsize if self.weights else 0

    def __post_init__(self) -> None:
        check_fields(self, "refit")


class Refitted(NamedTuple):
    """What kept entries become, row after row, in order of time.

    Attributes:
        values_NV: in the precision of the values.
        log_weight_N: added to their logits; None: nothing is.
    """

    values_NV: Float[Tensor, "N V"]
    log_weight_N: Float32[Tensor, " N"] | None


def refit(
    keys_RTD: Float[Tensor, "R T D"],
    values_RTV: Float[Tensor, "R T V"],
    exists_RT: Bool[Tensor, "R T"],
    keep_RT: Bool[Tensor, "R T"],
    evidence: Evidence,
    how: Refit,
) -> Refitted:
    """Fit kept entries to what queries get of all entries.

    With `p_n[i]` what query n pays entry i, of all entries of its row: log weights are the logarithm of the
    `w >= 0` that minimises `sum_n (sum_{j kept} w_j p_n[j] - 1)^2`. Then, with `a_n[j]` what it pays of the
    kept ones, so weighted, values minimise
    `sum_n |sum_j a_n[j] v_j - sum_i p_n[i] v_i|^2 + ridge g sum_j |v_j - v_j before|^2`, where g is the mean
    of `sum_n a_n[j]^2` over j. In float64, on the host.

    Args:
        evidence: of the layer: its rows `b * H + h`, with the queries of the whole prompt.

    Raises:
        MissingExtra: SciPy is not there, whose non-negative least squares it takes.
        RuntimeError: these find no end.
    """
    keep_RT = keep_RT & exists_RT
    values_RTV, heads = values_RTV.clone(), evidence.num_heads
    log_weight_RT = torch.zeros(keep_RT.shape, device=keep_RT.device)
    for row, (exists_T, keep_T) in enumerate(zip(exists_RT, keep_RT, strict=True)):
        if torch.equal(exists_T, keep_T) or not bool(keep_T.any()):
            continue
        sequence, head = divmod(row, heads)
        logits_NT, sink_N1 = _logits(keys_RTD[row, exists_T], evidence, sequence, head, how.queries)
        kept_K = keep_T[exists_T]
        fitted = _fitted(logits_NT, sink_N1, values_RTV[row, exists_T].double().cpu(), kept_K.cpu(), how)
        values_RTV[row, keep_T] = fitted[0].to(values_RTV)
        log_weight_RT[row, keep_T] = fitted[1].to(log_weight_RT)
    return Refitted(values_RTV[keep_RT], log_weight_RT[keep_RT] if how.weights else None)


def _logits(
    keys_TD: Float[Tensor, "T D"], evidence: Evidence, sequence: int, head: int, most: int
) -> tuple[Tensor, Tensor | None]:
    """Logits `[N, T]` of queries that are asked, and of the sink `[N, 1]`, if there is one."""
    group = evidence.group
    asks_S = evidence.asks_BS[sequence]
    queries_GSD = evidence.queries_BQSD[sequence, head * group : (head + 1) * group][:, asks_S]
    S = queries_GSD.shape[1]
    tokens_S = torch.linspace(0, S - 1, min(S, max(1, most // group)), device=queries_GSD.device)
    queries_NGD = queries_GSD[:, tokens_S.round().long()].transpose(0, 1)
    logits_NT = (queries_NGD.flatten(0, 1).double() @ keys_TD.double().T) * evidence.scaling
    if evidence.soft_cap is not None:
        logits_NT = evidence.soft_cap * torch.tanh(logits_NT / evidence.soft_cap)
    if evidence.sinks_Q is None:
        return logits_NT.cpu(), None
    sink_N = evidence.sinks_Q[head * group : (head + 1) * group].double().repeat(len(queries_NGD))
    return logits_NT.cpu(), sink_N[:, None].cpu()


def _fitted(
    logits_NT: Tensor, sink_N1: Tensor | None, values_TV: Tensor, kept_T: Tensor, how: Refit
) -> tuple[Tensor, Tensor]:
    """Values `[K, V]` and log weights `[K]` of what one row keeps."""
    want_NV = _paid(logits_NT, sink_N1) @ values_TV
    held_NK, old_KV = logits_NT[:, kept_T], values_TV[kept_T]
    log_weight_K = held_NK.new_zeros(held_NK.shape[1])
    if how.weights:
        with require("eval", "scipy", what="a refit of weights"):
            from scipy.optimize import nnls

        mass_NK = (held_NK - logits_NT.logsumexp(-1, keepdim=True)).exp()
        aims_N = mass_NK.new_ones(len(mass_NK))
        weight_K, _ = nnls(mass_NK.numpy(), aims_N.numpy(), maxiter=30 * mass_NK.shape[1])
        log_weight_K = torch.tensor(weight_K).clamp_min(LEAST_WEIGHT).log()
    paid_NK = _paid(held_NK + log_weight_K, sink_N1)
    gram_KK = paid_NK.T @ paid_NK
    gram_KK += how.ridge * gram_KK.diagonal().mean() * torch.eye(len(gram_KK), dtype=gram_KK.dtype)
    rest_NV = want_NV - paid_NK @ old_KV
    return old_KV + torch.linalg.solve(gram_KK, paid_NK.T @ rest_NV), log_weight_K


def _paid(logits_NT: Tensor, sink_N1: Tensor | None) -> Tensor:
    """Attention over these entries, beside the sink."""
    if sink_N1 is None:
        return logits_NT.softmax(-1)
    return torch.cat([logits_NT, sink_N1], -1).softmax(-1)[:, :-1]
