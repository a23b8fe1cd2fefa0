"""Inverts rotary position embeddings of queries and keys.

Half convention of Llama and its relatives: dimension `d` turns with `d + R/2`, over the first `R` dimensions;
the others are not turned. Nothing here imports transformers.

RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv 2104.09864.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding.

    Args:
        inverse_frequencies_F: float32, `R / 2` of them, in radians a position.
        scaling: factor on both tables (YaRN and relatives; 1 for plain RoPE).
    """

    inverse_frequencies_F: Float[Tensor, " F"]
    scaling: float = 1.0

    def tables(self, positions: Int[Tensor, "*rows T"]) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[..., T, R]`, float32."""
        angles = positions[..., None].float() * self.inverse_frequencies_F.float().to(positions.device)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling

    def unrotate(
        self, turned_BQSD: Float[Tensor, "B Q S D"], positions_BS: Int[Tensor, "B S"]
    ) -> Float[Tensor, "B Q S D"]:
        """Queries or keys as they were before they were turned, in float32 (float64 stays).

        `x = (y cos - rotate_half(y) sin) / scaling^2`, since a rotation's inverse is its transpose.
        """
        dtype = torch.promote_types(turned_BQSD.dtype, torch.float32)
        cos, sin = (table[:, None].to(dtype) / self.scaling**2 for table in self.tables(positions_BS))
        return turn(turned_BQSD.to(dtype), cos, -sin)


def turn(
    x: Float[Tensor, "*rows D"], cos: Float[Tensor, "*tables R"], sin: Float[Tensor, "*tables R"]
) -> Float[Tensor, "*rows D"]:
    """`x cos + rotate_half(x) sin`, `rotate_half([a, b]) = [-b, a]`, over the first R of the D dimensions.

    The rest is left alone. Means of tables give the mean of the rotations; tables broadcast but for the last
    axis.
    """
    width = cos.shape[-1]
    a, b = x[..., :width].chunk(2, dim=-1)
    turned = x[..., :width] * cos + torch.cat([-b, a], dim=-1) * sin
    return torch.cat([turned, x[..., width:]], dim=-1)
