"""TriAttention: scores keys by what the centre of a head's queries will pay them at positions to come.

Before RoPE the queries of a head lie close to one centre, which changes little with the text. With it the
attention logit is a trigonometric series of the distance; where queries scatter, the key's length counts.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from retain.attention.rotary import Rotary, turn
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.window import group_heads


@family(
    "rank",
    needs=("queries", "rotary"),
    paper="TriAttention: Efficient Long Reasoning with Trigonometric KV Compression, arXiv 2604.04921",
    cost="one product of the keys with the centre of each query head (Q T D), and their lengths (H T D)",
)
def triattention(
    evidence: Evidence,
    *,
    furthest: int = 65536,
) -> Score:
    """Score by the series at distances to come, and by the key's length where queries scatter.

    In pairs f of dimensions that RoPE turns together, as complex numbers before RoPE: with `c_f = E[q_f]` and
    `m_f = E[|q_f|]` of a query head, n the position after the last, and w_f the frequencies,
    `s_q[i, d] = sum_f |c_f| |k_f| cos(w_f (n + d - p_i) + arg c_f - arg k_f) + sum_f (m_f - |c_f|) |k_f|`,
    the mean over `d = 1, 2, 4, ... <= furthest`; dimensions that RoPE leaves alone add the product of their
    means. Less the mean of the head's entries, over their deviation, the largest of the group counts.

    TriAttention: Efficient Long Reasoning with Trigonometric KV Compression, arXiv 2604.04921; as in its
    released code (github.com/WeianMao/triattention, each head of each layer by itself), which keeps all of
    the prompt and scores generated tokens. Its centres are measured once a model, on a corpus; here they are
    those of the queries that the evidence holds (at a later eviction those since the last).

    Args:
        evidence: the layer, with `rotary` and queries.
        furthest: largest distance to come, at least 1.

    Returns:
        score in `rank`.

    Raises:
        ValueError: no rotary embedding, a sequence without queries, or settings out of range.
    """
    if not isinstance(furthest, int) or furthest < 1:
        raise ValueError(f"triattention furthest is a distance of at least 1; got {furthest}.")
    rotary = evidence.rotary
    if rotary is None:
        raise ValueError(
            "triattention turns queries back to before RoPE, and this evidence has no rotary embedding: use "
            "a score that needs none, such as keydiff."
        )
    keys_BHTD = evidence.keys_BHTD.to(torch.promote_types(evidence.keys_BHTD.dtype, torch.float32))
    centre_BQD, length_BQF = centres_of(evidence)
    # Turned by where the query will be, the centre's product with a key as cached is the series.
    distances = 2 ** torch.arange(furthest.bit_length(), device=keys_BHTD.device)
    ahead_BN = evidence.positions_BT[:, -1:] + 1 + distances
    cos_B1NR, sin_B1NR = (table[:, None].to(keys_BHTD) for table in rotary.tables(ahead_BN))
    turned_BQND = turn(centre_BQD[:, :, None].expand(-1, -1, len(distances), -1), cos_B1NR, sin_B1NR)
    turned_BHGD = group_heads(turned_BQND.mean(2), evidence.num_heads)
    series_BHGT = turned_BHGD @ keys_BHTD.transpose(-1, -2)
    scatter_BQF = length_BQF - pair_lengths(centre_BQD, rotary)
    scatter_BHGF = group_heads(scatter_BQF, evidence.num_heads) * rotary.scaling
    values_BHGT = series_BHGT + scatter_BHGF @ pair_lengths(keys_BHTD, rotary).transpose(-1, -2)
    values_BHGT = _standardised(values_BHGT, evidence.exists_BHT[:, :, None])
    return masked_score(values_BHGT.amax(2), evidence.exists_BHT, "rank")


def centres_of(evidence: Evidence) -> tuple[Float[Tensor, "B Q D"], Float[Tensor, "B Q F"]]:
    """Mean of the queries before RoPE, and mean length of each of their pairs.

    Raises:
        ValueError: a sequence has no query.
    """
    rotary, S = evidence.rotary, evidence.num_queries
    assert rotary is not None
    asked_B1S1 = evidence.asks_BS[:, None, :, None]
    number_B11 = asked_B1S1.sum(2)
    if not bool((number_B11 > 0).all()):
        raise ValueError(
            "triattention takes centres of the queries, and a sequence has none: record queries."
        )
    plain_BQSD = rotary.unrotate(evidence.queries_BQSD, evidence.positions_BT[:, evidence.num_seen - S :])
    plain_BQSD = plain_BQSD.masked_fill(~asked_B1S1, 0.0)
    lengths_BQSF = pair_lengths(plain_BQSD, rotary)
    return plain_BQSD.sum(2) / number_B11, lengths_BQSF.sum(2) / number_B11


def pair_lengths(x: Float[Tensor, "*rows D"], rotary: Rotary) -> Float[Tensor, "*rows F"]:
    """Length of each pair of dimensions that RoPE turns together."""
    F = len(rotary.inverse_frequencies_F)
    return torch.hypot(x[..., :F], x[..., F : 2 * F])


def _standardised(values_BHGT: Tensor, exists_BH1T: Tensor) -> Tensor:
    """Less the mean over the entries that exist, over their deviation (over N)."""
    count = exists_BH1T.sum(-1, keepdim=True).clamp_min(1)
    mean = values_BHGT.masked_fill(~exists_BH1T, 0.0).sum(-1, keepdim=True) / count
    centred = values_BHGT - mean
    variance = centred.masked_fill(~exists_BH1T, 0.0).square().sum(-1, keepdim=True) / count
    return centred / variance.sqrt().clamp_min(1e-6)
