"""Precision as a stage: after selection, what stays may be held in fewer bits, but for the last of a row.

The layout is KIVI's (A Tuning-Free Asymmetric 2bit Quantization for KV Cache, arXiv 2402.02750): keys share
scales by channel, values by entry.
"""

from fractions import Fraction
from typing import Literal

from pydantic.dataclasses import dataclass

from retain.config import STRICT, Whole
from retain.kernels.codes import SCALES, bytes_wide

# Entries that share the scale of a channel of their keys, and channels of a value that share a scale.
GROUP = 32


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
