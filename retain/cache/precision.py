"""Precision as a stage: after selection, what stays may be held in fewer bits, but for the last of a row.

The layout is KIVI's (A Tuning-Free Asymmetric 2bit Quantization for KV Cache, arXiv 2402.02750): keys share
scales by channel, values by entry. Scales of values are a column. Scales of keys, which `GROUP` entries share
by channel, are a table, and a column names the group of each entry.
"""

from fractions import Fraction
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from pydantic.dataclasses import dataclass
from torch import Tensor

from retain.cache.layout import spans
from retain.config import STRICT, Whole
from retain.kernels.codes import SCALES, bytes_wide, encode

# Entries that share the scale of a channel of their keys, and channels of a value that share a scale.
GROUP = 32
# Columns that are no numbers of an entry: the scales of its value, and the group that its key shares.
VALUE_SCALES, GROUPS = "value_scales", "groups"


@dataclass(frozen=True, config=STRICT)
class Precision:
    """Settings.

    Args:
        bits: of a code.
        recent: last entries of a row that stay as they are. While decoding, new entries are quantised once
            `GROUP` of them lie before these.
    """

    bits: Literal[8, 4, 2]
    recent: Whole = 32

    def cost(self, head_dim: int, value_dim: int, element_size: int) -> tuple[Fraction, Fraction]:
        """Bytes of an entry that is packed; and bytes of a head beside its entries, at most.

        Codes, scales and groups count. A group of entries may not be full, for which every head pays one
        group; and its recent entries are as they were.

        Args:
            head_dim, value_dim: D and V.
            element_size: bytes of a number as it was.
        """
        D, V, scale = head_dim, value_dim, 2 * SCALES.itemsize
        codes = bytes_wide(D, self.bits) + bytes_wide(V, self.bits)
        packed = codes + scale * -(-V // min(GROUP, V)) + 4 + Fraction(scale * D, GROUP)
        whole = Fraction((D + V) * element_size)
        return packed, scale * D + self.recent * max(whole - packed, Fraction(0))


class Codec(NamedTuple):
    """Keys and values as codes; stores of one codec can be joined.

    Args:
        head_dim, value_dim: D and V, channels of keys and of values.
        dtype: precision of the numbers that codes stand for.
    """

    bits: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """Channels that share a scale of values."""
        return min(GROUP, self.value_dim)

    def encode(
        self, keys_ND: Float[Tensor, "N D"], values_NV: Float[Tensor, "N V"], lengths_R: Int[Tensor, " R"]
    ) -> tuple[dict[str, Tensor], Float[Tensor, "G 2 D"]]:
        """Columns of entries that come row after row, and the scales of their keys' groups, of `GROUP`
        neighbours of a row.

        Raises:
            ValueError: numbers that float16 does not hold.
        """
        counts_R = -(-lengths_R.long() // GROUP)
        places_N = spans(torch.zeros_like(counts_R), lengths_R)
        groups_N = torch.repeat_interleave(counts_R.cumsum(0) - counts_R, lengths_R) + places_N // GROUP
        values = encode(values_NV, self.bits, self.span)
        keys = encode(keys_ND, self.bits, 1, groups_N)
        columns = {"keys": keys.codes_CW, "values": values.codes_CW}
        columns |= {VALUE_SCALES: values.scales_G2N, GROUPS: groups_N.to(torch.int32)}
        return columns, keys.scales_G2N
