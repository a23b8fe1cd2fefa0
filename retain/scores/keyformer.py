"""Keyformer: scores entries by attention received, with noise on the logits that favours none for long.

What an eviction takes away changes the softmax of all later queries. Gumbel noise on every logit smooths the
attention that is added up, so that entries which a few queries happen to prefer do not crowd out the others.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from retain.attention.received import rows_at_once
from retain.evidence import Evidence, RunningStatistics, Score, attention_probs, masked_score
from retain.scores.h2o import running_statistics
from retain.scores.random import hashed, uniform_of


def keyformer(evidence: Evidence, *, tau: float = 1.0, seed: int = 0, chunk: int | None = None) -> Score:
    """Score by attention received from all queries, of a softmax with noise, averaged over the group.

    `mean_{q in group(h)} sum_{j >= i} softmax_i((x_qj[i] + z_qji) / tau)`, with x the logits and z
    independent numbers of Gumbel(0, 1) (`advance_with_noise`).

    Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference, arXiv
    2403.09054; as in its released code (github.com/d-matrix-ai/keyformer-llm), where tau is 1 for the prompt
    and grows by 0.01 with every generated token. Here it stays, so that at the eviction after a prefill the
    score is the published one, and later it is not smoothed more and more.

    Args:
        evidence: the layer, with `running`, or with S == T queries. A cache that kept `running` added the
            noise while it did so; `tau` and `seed` are then not read.
        tau: temperature, above 0.
        seed: of the noise, the same for all sequences.

    Returns:
        score in `mass`.

    Raises:
        ValueError: if tau is not positive, or the evidence has neither running statistics nor every query.
    """
    reads = "keyformer sums the attention of every query"
    settings = {"tau": tau, "seed": seed}
    running = running_statistics(evidence, chunk, reads=reads, fold=advance_with_noise, **settings)
    return masked_score(running.mass_BHT, evidence.exists_BHT, "mass")


def advance_with_noise(
    evidence: Evidence,
    running: RunningStatistics | None = None,
    chunk: int | None = None,
    *,
    tau: float = 1.0,
    seed: int = 0,
) -> RunningStatistics:
    """As `retain.attention.received.advance`, of a softmax with noise; an access is the writing alone.

    Rows of attention are made, `chunk` queries at a time. With `a = softmax(x)` over what a query sees, a
    softmax of `(x + z) / tau` is `a^(1 / tau) exp(z / tau)` over its sum. The noise of a pair is a hash of
    (seed, layer, query head, places of the query and the entry), so that a sequence gets the same alone, in
    any batch, and however many queries come at once.
    """
    if not tau > 0:
        raise ValueError(f"keyformer tau is a temperature, above 0; got {tau}.")
    S, H = evidence.num_queries, evidence.num_heads
    mass_BHT = None if running is None else running.mass_BHT
    at_once = chunk or rows_at_once(evidence)
    for start in range(0, S, at_once):
        stop = min(start + at_once, S)
        rows_BQsT = attention_probs(evidence, start, stop)
        rows_BQsT = rows_BQsT.pow(1 / tau) * (_noise(evidence, start, stop, seed) / tau).exp()
        total_BQs1 = rows_BQsT.sum(-1, keepdim=True)
        rows_BQsT = rows_BQsT / total_BQs1.clamp_min(torch.finfo(rows_BQsT.dtype).tiny)
        paid_BHT = rows_BQsT.unflatten(1, (H, -1)).mean(2).sum(2)
        mass_BHT = paid_BHT if mass_BHT is None else mass_BHT + paid_BHT
    assert mass_BHT is not None
    return RunningStatistics(mass_BHT, evidence.places_BT[:, None].expand(-1, H, -1))


def _noise(evidence: Evidence, start: int, stop: int, seed: int) -> Float[Tensor, "B Q s T"]:
    """Gumbel noise of the pairs of queries `start..stop` and entries."""
    T, S, Q = evidence.num_seen, evidence.num_queries, evidence.queries_BQSD.shape[1]
    place_BT = evidence.places_BT
    heads_Q = evidence.first_head * evidence.group + torch.arange(Q, device=place_BT.device)
    state_Q = hashed(
        hashed(hashed(torch.tensor(seed, device=place_BT.device)) + evidence.layer_idx) + heads_Q
    )
    state_BQs = hashed(state_Q[:, None] + place_BT[:, None, T - S + start : T - S + stop])
    # Half a step up, so that it has a logarithm, which float32 would round to 1.
    uniform = uniform_of(state_BQs[..., None] + place_BT[:, None, None]).double() + 2.0**-25
    return -(-uniform.log()).log().to(torch.promote_types(evidence.keys_BHTD.dtype, torch.float32))
