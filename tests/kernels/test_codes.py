"""`retain.kernels.codes`: what a code stands for, against loops; how codes lie in bytes; what is refused."""

import pytest
import torch

from retain.kernels.codes import BITS, Codes, bytes_wide, decode, encode, pack, unpack

# Keys as KIVI groups them (by channel, over entries), and values (by entry, over channels).
SPANS = {"by channel": (1, True), "by entry": (32, False), "by few": (3, False)}


def numbers(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Channels of very different size and offset, as keys have them."""
    draw = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 1, width, dtype=torch.float64)
    made = torch.randn(count, width, generator=draw, dtype=torch.float64) * scale + 3 * scale
    return made.float()


def group_of(count: int, together: bool) -> torch.Tensor | None:
    """Groups of 1 to 32 entries, which do not lie side by side; None: one for each entry."""
    return (torch.arange(count) * 7 % 10).to(torch.int64) if together else None


def stands_for(codes: Codes, i: int, d: int) -> float:
    """The docstring's formula, for one channel of one entry, in float64, from its bits."""
    byte = int(codes.codes_CW[i, d * codes.bits // 8])
    code = byte >> d * codes.bits % 8 & 2**codes.bits - 1
    group = i if codes.groups_C is None else int(codes.groups_C[i])
    step, least = (float(codes.scales_G2N[group, which, d // codes.span]) for which in (0, 1))
    return least + step * code


@pytest.mark.parametrize("width", [1, 7, 20, 64])
@pytest.mark.parametrize("how", SPANS)
@pytest.mark.parametrize("bits", BITS)
def test_a_code_is_the_nearest_step_of_its_group(bits, how, width):
    """At most half a step away, and what the ends lose to float16: the least its rounding, the most that of
    the least and, over all steps, that of a step."""
    (span, together), count = SPANS[how], 23
    x_ND = numbers(count, width)
    codes = encode(x_ND, bits, span, group_of(count, together))
    assert codes.shape == x_ND.shape
    assert codes.codes_CW.shape == (count, bytes_wide(width, bits)) and codes.codes_CW.dtype == torch.uint8
    whole = decode(codes, torch.float64)
    for i in range(count):
        for d in range(width):
            group_i = range(count) if together else [i]
            group_i = [j for j in group_i if not together or int(codes.groups_C[j]) == int(codes.groups_C[i])]
            span_d = range(d // span * span, min(width, d // span * span + span))
            group = [float(x_ND[j, e]) for j in group_i for e in span_d]
            least, step = min(group), (max(group) - min(group)) / (2**bits - 1)
            stood = stands_for(codes, i, d)
            lost = 2**-11 * (abs(least) + step * (2**bits - 1)) + 2**-25 * 2**bits
            assert abs(stood - float(x_ND[i, d])) <= 0.5 * step * (1 + 2**-10) + 2 * lost
            # Decoded in float32, which rounds a product and a sum.
            assert abs(float(whole[i, d]) - stood) <= 2**-22 * (abs(stood) + abs(least) + 1e-6)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [1, 3, 5, 20, 33])
def test_codes_lie_low_bits_first_and_come_back(width, bits):
    draw = torch.Generator().manual_seed(width)
    codes_ND = torch.randint(0, 2**bits, (9, width), generator=draw).to(torch.uint8)
    packed_NW = pack(codes_ND, bits)
    assert torch.equal(unpack(packed_NW, bits, width), codes_ND)
    each = 8 // bits
    for row, codes in zip(packed_NW.tolist(), codes_ND.tolist(), strict=True):
        codes += [0] * (len(row) * each - width)  # the last byte is filled up with zeros
        want = [
            sum(code << place * bits for place, code in enumerate(codes[byte * each : byte * each + each]))
            for byte in range(len(row))
        ]
        assert row == want


@pytest.mark.parametrize("bits", BITS)
def test_a_constant_group_is_held_as_it_is(bits):
    x_ND = torch.full((6, 5), -2.5)
    x_ND[:, 3] = 0.0
    for span, groups in ((1, torch.zeros(6, dtype=torch.int64)), (1, None)):
        codes = encode(x_ND, bits, span, groups)
        assert torch.equal(decode(codes, torch.float32), x_ND) and not codes.codes_CW.any()


@pytest.mark.parametrize("bits", BITS)
def test_numbers_near_the_largest_of_float16_are_held_and_larger_ones_refused(bits):
    x_ND = torch.tensor([[-65_000.0, 65_000.0, 0.0, 12.0]])
    step = 130_000 / (2**bits - 1)
    error = (decode(encode(x_ND, bits, 4), torch.float32) - x_ND).abs().max()
    assert float(error) <= 0.51 * step + 64
    for bad, said in ((70_000.0, "7e\\+04"), (float("inf"), "inf"), (float("nan"), "nan")):
        with pytest.raises(ValueError, match=f"held in {bits} bits reach {said}, and scales are float16"):
            encode(torch.tensor([[0.0, bad]]), bits, 2)
