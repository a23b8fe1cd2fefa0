"""Controls of selection when reading: pages at random, drawn anew for each query, and the last pages.

Neither reads an index. With `sinks` they read what streaming heads hold, or at random behind it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from retain.scores.random import hashed, uniform_of


def random_scores(
    seeds_B: Sequence[int], layer_idx: int, num_heads: int, num_seen_B: Sequence[int], num_pages: int
) -> Float[Tensor, "R P"]:
    """`mix(mix(mix(mix(mix(seed_b) + layer) + h) + n_b) + p) / 2**64`, uniform in [0, 1), where n_b tokens
    are seen: a new draw for each query, the same in any batch (`retain.scores.random`)."""
    state_B = hashed(torch.tensor([int(seed) % 2**63 for seed in seeds_B]))
    state_BH = hashed(hashed(state_B + layer_idx)[:, None] + torch.arange(num_heads))
    state_BH = hashed(state_BH + torch.tensor([*num_seen_B], dtype=torch.int64)[:, None])
    return uniform_of(state_BH.flatten()[:, None] + torch.arange(num_pages))


def recency_scores(num_rows: int, num_pages: int) -> Float[Tensor, "R P"]:
    """Later pages first."""
    return torch.arange(num_pages, dtype=torch.float32).expand(num_rows, -1)
