"""Draws a share of a budget by priority sampling.

Of many entries that a query reads together, each has a small maximum, and all of them go. A few drawn at
random can stand for the rest, since attention is normalised over the entries left. A draw in proportion to
weight keeps sums right in the mean; keeping the largest would not.

Priority Sampling for Estimation of Arbitrary Subset Sums (Duffield, Lund, Thorup; J. ACM 54(6), 2007): of n
weights `w_i` and uniform numbers `u_i` in (0, 1], the k largest `q_i = w_i / u_i`; entry i is among them with
a chance of about `min(1, w_i / tau)`, `tau` being the (k+1)-th largest `q`.

Others keep entries by lot too: Keyformer (Gumbel noise on scores, arXiv 2403.09054), VaSE (stochastic
eviction, arXiv 2606.03928), Nexus (weighted reservoir sampling, arXiv 2606.23961).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float32, Int
from torch import Tensor

from retain.config import Share, check_fields
from retain.evidence import Evidence, Score
from retain.scores.random import random as random_score


@dataclass(frozen=True)
class Draw:
    """How much of a budget is drawn.

    Args:
        share: of the shared budget beside the guaranteed entries, in [0, 1]; the rest goes by score. A part
            of an entry goes by score.
    """

    share: Share = 0.2

    def __post_init__(self) -> None:
        check_fields(self, "draw")


def draw_keys(
    weight: Score, evidence: Evidence, seeds_B: Sequence[int] | Int[Tensor, " B"] | None = None
) -> Float32[Tensor, "B H T"]:
    """Keys of the draw: `q[b, h, i] = w[b, h, i] / (1 - r[b, h, i])`, with `r` in [0, 1) of the score
    `random`.

    An entry always has the same `r`, so that a drawn entry is drawn again while its weight lasts.

    Args:
        weight: in risk or mass, non-negative where an entry exists, -inf elsewhere.
        evidence: of the layer.
        seeds_B: one integer a sequence; None: 0 for all, so that a sequence draws the same in any batch.

    Raises:
        ValueError: if a weight is negative, or in `rank`.
    """
    values_BHT = weight.values_BHT
    if weight.unit == "rank":
        raise ValueError(
            "a draw goes in proportion to numbers, and the observed score is in 'rank', of which only the "
            "order means something: take one in risk or mass."
        )
    # NaN stays, so that ranking refuses it by name.
    exists_BHT = ~values_BHT.isneginf()
    if ((values_BHT < 0) & exists_BHT).any():
        raise ValueError(
            "a draw takes weights of at least 0, and the observed score has some below: take one in risk or "
            "mass."
        )
    seeds = [0] * len(evidence.valid_BT) if seeds_B is None else seeds_B
    lots_BHT = random_score(evidence, seeds_B=seeds).values_BHT.to(values_BHT.device)
    keys_BHT = values_BHT / (1.0 - lots_BHT.clamp_min(0.0))
    return keys_BHT.masked_fill(~exists_BHT, float("-inf"))
