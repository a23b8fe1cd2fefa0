"""Numbers held as a few bits: asymmetric integers with a step and a least value for each group of them.

`x = least + step * code`, with codes of 8, 4 or 2 bits, packed low bits first into bytes. A group is `span`
channels of an entry, or of all entries that share a group. The two kinds are KIVI's (arXiv 2402.02750): keys
are grouped by channel over 32 entries (`span` 1, `groups_C`), values by entry over 32 channels (`span` 32, no
`groups_C`). torchao packs whole tensors of one group size; rows here differ in length, and their groups with
them.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

# What a code may have.
BITS = (8, 4, 2)
# Of steps and least values.
SCALES = torch.float16


class Codes(NamedTuple):
    """Columns of a store, as codes.

    Args:
        codes_CW: bytes of each entry: channel d is in byte `d * bits // 8`, at bit `d * bits % 8`.
        scales_G2N: float16, step and least value of each group: N = ceil(width / span).
        groups_C: int32, the group of each entry; None: each entry is its own.
        bits: of a code: 8, 4 or 2.
        span: neighbouring channels that share a scale.
        width: channels.
    """

    codes_CW: UInt8[Tensor, "C W"]
    scales_G2N: Float[Tensor, "G 2 N"]
    groups_C: Int[Tensor, " C"] | None
    bits: int
    span: int
    width: int

    @property
    def shape(self) -> torch.Size:
        """`[C, D]`, of the numbers that codes stand for."""
        return torch.Size((self.codes_CW.shape[0], self.width))

    @property
    def device(self) -> torch.device:
        return self.codes_CW.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is held here."""
        groups = () if self.groups_C is None else (self.groups_C,)
        return (self.codes_CW, self.scales_G2N, *groups)

    def part(self, held: slice) -> "Codes":
        """The codes of these entries, as views."""
        if self.groups_C is None:
            return self._replace(codes_CW=self.codes_CW[held], scales_G2N=self.scales_G2N[held])
        return self._replace(codes_CW=self.codes_CW[held], groups_C=self.groups_C[held])


def bytes_wide(width: int, bits: int) -> int:
    """Bytes of the codes of an entry of so many channels."""
    return -(-width * bits // 8)


def encode(
    x_ND: Float[Tensor, "N D"], bits: int, span: int, groups_N: Int[Tensor, " N"] | None = None
) -> Codes:
    """Quantise entries: each group between its least and its largest value, to the nearest of `2**bits`.

    Step and least are rounded to float16 first, and codes are found by the rounded ones, so that no error is
    made but the codes' own: at most half a step, and what float16 cannot hold of the ends.

    Args:
        x_ND: finite numbers below 65,504.
        bits: 8, 4 or 2.
        span: neighbouring channels that share a scale.
        groups_N: group of each entry, counted from 0; None: each its own.

    Raises:
        ValueError: numbers that float16 does not hold.
    """
    count, width = x_ND.shape
    spans = -(-width // span)
    numbers = x_ND.float()
    short = spans * span - width
    if short:  # the last span is filled up with what it has
        numbers = torch.cat([numbers, numbers[:, -1:].expand(-1, short)], dim=1)
    numbers_NKs = numbers.view(count, spans, span)
    least, most = numbers_NKs.amin(-1), numbers_NKs.amax(-1)
    if groups_N is not None:
        num_groups = int(groups_N.max()) + 1 if count else 0
        index = groups_N.long()[:, None].expand(-1, spans)
        least, most = (
            ends.new_zeros(num_groups, spans).scatter_reduce_(0, index, ends, how, include_self=False)
            for ends, how in ((least, "amin"), (most, "amax"))
        )
    ends = torch.stack([least, most])
    if not bool((ends.abs() <= torch.finfo(SCALES).max).all()):
        raise ValueError(
            f"keys or values to be held in {bits} bits reach {float(ends.abs().max()):.3g}, and scales are "
            "float16, up to 65504: hold these entries in the model's precision (no precision=, no bits=)."
        )
    least16 = least.to(SCALES)
    # Divided first: both ends may be near the largest that float16 holds.
    step16 = ((most / (2**bits - 1)) - (least16.float() / (2**bits - 1))).to(SCALES)
    scales_G2N = torch.stack([step16, least16], dim=1)
    scales = scales_G2N if groups_N is None else scales_G2N[groups_N.long()]
    step, start = scales[:, 0, :, None].float(), scales[:, 1, :, None].float()
    steps = torch.where(step > 0, (numbers_NKs - start) / step, 0.0)
    codes_ND = steps.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(1)[:, :width]
    groups = None if groups_N is None else groups_N.to(torch.int32)
    return Codes(pack(codes_ND, bits), scales_G2N, groups, bits, span, width)


def decode(codes: Codes, dtype: torch.dtype) -> Float[Tensor, "C D"]:
    """The numbers that codes stand for, rounded once to this precision."""
    numbers = unpack(codes.codes_CW, codes.bits, codes.width).float()
    scales = codes.scales_G2N if codes.groups_C is None else codes.scales_G2N[codes.groups_C.long()]
    step, least = scales.float().repeat_interleave(codes.span, -1)[..., : codes.width].unbind(1)
    return (least + step * numbers).to(dtype)


def pack(codes_ND: UInt8[Tensor, "N D"], bits: int) -> UInt8[Tensor, "N W"]:
    """Several codes a byte, the first in the lowest bits; the last byte is filled up with zeros."""
    if bits == 8:
        return codes_ND.contiguous()
    each = 8 // bits
    count, width = codes_ND.shape
    wide = bytes_wide(width, bits)
    whole = codes_ND.new_zeros(count, wide * each)
    whole[:, :width] = codes_ND
    shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes_ND.device)
    # Bits do not overlap, so that their sum is their union.
    return (whole.view(count, wide, each) << shift).sum(-1, dtype=torch.uint8)


def unpack(codes_NW: UInt8[Tensor, "N W"], bits: int, width: int) -> UInt8[Tensor, "N D"]:
    """The codes of `pack`."""
    if bits == 8:
        return codes_NW[:, :width]
    shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes_NW.device)
    return ((codes_NW[..., None] >> shift) & (2**bits - 1)).flatten(1)[:, :width]
