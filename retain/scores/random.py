"""Random scores: a control, reproducible one sequence at a time.

Each number is a hash of (seed, layer, head, place among the sequence's tokens), without generator state,
so a sequence gets the same scores alone, in any batch, under any padding, on any device and at every
eviction.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family


@family(
    "rank",
    needs=("seeds",),
    reads=(),
    paper="a control, no paper",
)
def random(evidence: Evidence, *, seeds_B: Sequence[int] | Int[Tensor, " B"] | None = None) -> Score:
    """Score by uniform numbers in [0, 1), independent over sequences, layers, heads and entries.

    `score[b, h, i] = mix(mix(mix(mix(seed_b) + layer) + h) + place_i) / 2**64` in 24 bits, with the
    splitmix64 finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).

    Args:
        evidence: the layer (its index, padding and number of heads are read).
        seeds_B: one integer a sequence. None counts the rows, 0..B-1: then a sequence's scores depend on its
            row.

    Returns:
        score in `rank`.

    Raises:
        ValueError: if the number of seeds is not the number of sequences.
    """
    B = len(evidence.valid_BT)
    seeds = list(range(B)) if seeds_B is None else [int(seed) for seed in seeds_B]
    if len(seeds) != B:
        raise ValueError(f"random scores need one seed a sequence: got {len(seeds)} seeds for {B} sequences.")
    device = evidence.valid_BT.device
    state_B = hashed(torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device))
    state_B = hashed(state_B + evidence.layer_idx)
    heads_H = torch.arange(evidence.num_heads, device=device)
    state_BH = hashed(state_B[:, None] + heads_H)
    values_BHT = uniform_of(state_BH[:, :, None] + evidence.places_BT[:, None, :])
    return masked_score(values_BHT, evidence.exists_BHT, "rank")


def draw_keys(
    weight: Score, evidence: Evidence, seeds_B: Sequence[int] | Int[Tensor, " B"] | None = None
) -> Float32[Tensor, "B H T"]:
    """Keys of the draw: `q[b, h, i] = w[b, h, i] / (1 - r[b, h, i])`, with `r` in [0, 1) of the score
    `random`, by which a share of a budget is drawn (`retain.budget.joint`).

    Args:
        weight: in risk or mass, -inf where no entry exists.
        evidence: of the layer.
        seeds_B: one integer a sequence; None: 0 for all, so that a sequence draws the same in any batch.

    Raises:
        ValueError: if the weights are in `rank`.
    """
    values_BHT = weight.values_BHT
    if weight.unit == "rank":
        raise ValueError(
            "a draw goes in proportion to numbers, and the observed score is in 'rank', of which only the "
            "order means something: take one in risk or mass."
        )
    seeds = [0] * len(evidence.valid_BT) if seeds_B is None else seeds_B
    lots_BHT = random(evidence, seeds_B=seeds).values_BHT.to(values_BHT.device)
    # -inf stays -inf, and NaN stays, so that ranking refuses it by name.
    return values_BHT / (1.0 - lots_BHT.clamp_min(0.0))


def uniform_of(state: Int[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Uniform numbers in [0, 1) of 24 bits, float32, one for each number that is hashed."""
    return _shift(hashed(state), 40).float() / 2**24


def hashed(x: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
    """splitmix64 on int64, whose products wrap."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x.bitwise_xor_(_shift(x, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    x.bitwise_xor_(_shift(x, 27)).mul_(_signed(0x94D049BB133111EB))
    return x.bitwise_xor_(_shift(x, 31))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right: int64 shifts copy the sign, so those bits are masked away."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number
