"""Reads latent attention (MLA) as attention over one row a layer, which all query heads share.

A token's keys and values of all heads are linear in one latent `c` `[R]` (after its norm) and one rotated key
`r` `[P]`: head q has the key `[W_K^q c; r]` and the value `W_V^q c`, with `W_K^q` and `W_V^q` its parts of
`kv_b_proj`. transformers caches `c` and `r`, and expands them whenever a layer attends. So the entry of a
token is the row `x = [r; c]`, D = P + R numbers, and what one head asks and gets is the same in it:

    [q_n; q_r] . [W_K^q c; r] = [q_r; (W_K^q)^T q_n] . x
    sum_i a_i W_V^q c_i       = W_V^q (sum_i a_i x_i)[P:]
    W_O^q W_V^q c             = [0; W_O^q W_V^q] x

That is attention with one KV head: rows are its keys, rows without their rotated part its values, and
`[0; W_O W_V]` its output projection. Nothing is approximated; rounding differs, as products are taken in
another order. DeepSeek-V2 (arXiv 2405.04434), section 2.1, names this absorption.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from retain.hf.model.projection import dense_weight

# The module that expands latents into keys and values, and the method that calls it.
UP, EXPAND = "kv_b_proj", "expand_kv"


@dataclass(frozen=True)
class Latent:
    """Widths of one latent attention layer.

    Args:
        rank: R, of the latent.
        turned: P, of the rotated key that all heads share.
        plain: width of the part of a head's key that comes out of the latent.
        value: V, width of a head's value.
    """

    rank: int
    turned: int
    plain: int
    value: int

    @classmethod
    def of(cls, attention: Any) -> "Latent":
        """Those of an attention module that is laid out like DeepSeek-V3's."""
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        return cls(*(getattr(attention, name) for name in names))

    @property
    def width(self) -> int:
        """D, of a row."""
        return self.turned + self.rank

    def rows(self, latents: Float[Tensor, "*T R"], turned: Float[Tensor, "*T P"]) -> Float[Tensor, "*T D"]:
        """Rows of what a module gives its cache: latents, and rotated keys."""
        return torch.cat([turned, latents], dim=-1)

    def parts(self, rows: Float[Tensor, "*T D"]) -> tuple[Float[Tensor, "*T R"], Float[Tensor, "*T P"]]:
        """Latents and rotated keys of rows: what a module takes back from its cache."""
        turned, latents = rows.split([self.turned, self.rank], dim=-1)
        return latents, turned

    def values(self, rows: Float[Tensor, "*T D"]) -> Float[Tensor, "*T D"]:
        """Rows with zeros for their rotated part, which no value has."""
        return pad(rows[..., self.turned :], (self.turned, 0))

    def up(
        self, module: nn.Module, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "R Q plain"], Float[Tensor, "R Q V"]]:
        """What expands a latent into each head's key and value."""
        dense = dense_weight(getattr(module, UP), dtype)
        return dense.unflatten(1, (-1, self.plain + self.value)).split([self.plain, self.value], dim=-1)

    def absorbed(self, module: nn.Module, queries_BQSK: Float[Tensor, "B Q S K"]) -> Float[Tensor, "B Q S D"]:
        """Queries of rows, from queries of each head's own keys (K numbers, the rotated ones last)."""
        up_RQN = self.up(module, queries_BQSK.dtype)[0].to(queries_BQSK.dtype)
        plain, turned = queries_BQSK.split([self.plain, self.turned], dim=-1)
        return torch.cat([turned, torch.einsum("bqsn,rqn->bqsr", plain, up_RQN)], dim=-1)

    def expanded(self, module: nn.Module, out_BSQD: Float[Tensor, "B S Q D"]) -> Float[Tensor, "B S Q V"]:
        """Each head's own output, from its mean of rows."""
        up_RQV = self.up(module, out_BSQD.dtype)[1].to(out_BSQD.dtype)
        return torch.einsum("bsqr,rqv->bsqv", out_BSQD[..., self.turned :], up_RQV)

    def output(self, module: nn.Module, dense_QVE: Float[Tensor, "Q V E"]) -> Float[Tensor, "Q D E"]:
        """The output projection of rows, from that of each head's own values."""
        up_RQV = self.up(module, dense_QVE.dtype)[1].to(dense_QVE.dtype)
        return pad(torch.einsum("rqv,qve->qre", up_RQV, dense_QVE), (0, 0, self.turned, 0))


class LatentCache:
    """Stands before a cache while one latent attention module runs, and shows the cache rows.

    Args:
        latent: the module's widths.
        module: it.
        cache: what rows are stored in; None: in nothing.
    """

    def __init__(self, latent: Latent, module: nn.Module, cache: Any = None):
        self.latent, self.module, self.cache = latent, module, cache
        self.rows_B1SD: Tensor | None = None  # of the tokens that the module was called with

    def update(
        self, latents: Tensor, turned: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.rows_B1SD = self.latent.rows(latents, turned)
        if self.cache is None:
            return latents, turned
        held, _ = self.cache.update(self.rows_B1SD, self.rows_B1SD, layer_idx, *args, **kwargs)
        return self.latent.parts(held)

    def shown(self, queries_BQSK: Tensor) -> tuple[Tensor, Tensor]:
        """Queries of rows, and the rows of the same tokens."""
        assert self.rows_B1SD is not None, "the module asks its cache before it attends"
        queries_BQSD = self.latent.absorbed(self.module, queries_BQSK)
        return queries_BQSD.to(self.rows_B1SD.dtype), self.rows_B1SD
