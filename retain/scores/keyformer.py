"""Keyformer: scores entries by attention received, with noise on the logits that favours none for long.

What an eviction takes away changes the softmax of all later queries. Gumbel noise on every logit smooths the
attention that is added up, so that entries which a few queries happen to prefer do not crowd out the others.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from retain.attention.received import accumulated_in, rows_of
from retain.config import Positive, Seed
from retain.evidence import Evidence, RunningStatistics, Score, masked_score
from retain.scores.family import family
from retain.scores.h2o import running_statistics
from retain.scores.random import hashed, uniform_of

# Of the sums that rows are divided by: a row of zeros stays.
SMALLEST = torch.finfo(torch.float32).tiny


def advance_with_noise(
    evidence: Evidence,
    running: RunningStatistics | None = None,
    *,
    tau: float = 1.0,
    seed: int = 0,
) -> RunningStatistics:
    """As `retain.attention.received.advance`, of a softmax with noise; an access is the writing alone.

    With `a` a row, `(a exp(z)) ** (1 / tau)`, divided
    by its sum, is the softmax of `(x + z) / tau`, with the logits x; a sink logit takes no part. The noise of
    a pair is a hash of (seed, layer, query head, places of the query and the entry), so that a sequence gets
    the same alone, in any batch, and however many queries come at once.

    Args:
        running: as in `advance`.
        tau, seed: as in `keyformer`.
    """
    H, place_BHT = evidence.num_heads, evidence.places_BT[:, None].expand(-1, evidence.num_heads, -1)
    if running is None:
        mass_BHT = torch.zeros(place_BHT.shape, dtype=accumulated_in(evidence), device=place_BHT.device)
    else:
        mass_BHT = running.mass_BHT.to(accumulated_in(evidence)).clone()
    for start, rows_BQsK in rows_of(evidence):
        seen = rows_BQsK.shape[-1]
        noisy_BQsK = rows_BQsK / _noise(evidence, start, seen, seed)
        if tau != 1.0:  # the largest is 1, so that a small tau leaves something
            noisy_BQsK = (noisy_BQsK / noisy_BQsK.amax(-1, keepdim=True)).nan_to_num(0.0) ** (1 / tau)
        rows_BQsK = noisy_BQsK / noisy_BQsK.sum(-1, keepdim=True).clamp_min(SMALLEST)
        mass_BHT[..., :seen] += rows_BQsK.unflatten(1, (H, -1)).mean(2).sum(2)
    return RunningStatistics(mass_BHT, place_BHT)


@family(
    "mass",
    needs=("running",),
    reads=(),
    paper=(
        "Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative "
        "Inference, arXiv 2403.09054"
    ),
    fold=advance_with_noise,
)
def keyformer(evidence: Evidence, *, tau: Positive = 1.0, seed: Seed = 0) -> Score:
    """Score by attention received from all queries, of a softmax with noise, averaged over the group.

    `mean_{q in group(h)} sum_{j >= i} softmax_i((x_qj[i] + z_qji) / tau)`, with x the logits and z
    independent numbers of Gumbel(0, 1) (`advance_with_noise`).

    As in its released code (github.com/d-matrix-ai/keyformer-llm), where tau is 1 for the prompt and grows by
    0.01 with every generated token. Here it stays, so that at the eviction after a prefill the score is the
    published one, and later it is not smoothed more and more.

    Args:
        evidence: the layer, with `running`, or with S == T queries. A cache that kept `running` added the
            noise while it did so; `tau` and `seed` are then not read.
        tau: temperature.
        seed: of the noise, the same for all sequences.

    Returns:
        score in `mass`.

    Raises:
        ValueError: if the evidence has neither running statistics nor every query.
    """
    running = running_statistics(evidence, advance_with_noise, tau=tau, seed=seed)
    return masked_score(running.mass_BHT, evidence.exists_BHT, "mass")


def _noise(evidence: Evidence, start: int, seen: int, seed: int) -> Float[Tensor, "B Q s K"]:
    """`exp(-z)`, with z the Gumbel noise of the pairs of the queries at entries `start..seen` and the entries
    `0..seen`."""
    Q, place_BK = evidence.queries_BQSD.shape[1], evidence.places_BT[:, :seen]
    heads_Q = torch.arange(Q, device=place_BK.device)
    seed_ = torch.tensor(seed, device=place_BK.device)
    state_Q = hashed(hashed(hashed(seed_) + evidence.layer_idx) + heads_Q)
    state_BQs = hashed(state_Q[:, None] + place_BK[:, None, start:])
    uniform = uniform_of(state_BQs[..., None] + place_BK[:, None, None]).double()
    # Half a step up, so that 0 has a logarithm; in float32 the sum would round to 1 at the other end.
    return (uniform + 2.0**-25).log_().neg_().to(accumulated_in(evidence))
