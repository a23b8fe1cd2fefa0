"""TriAttention against its published series, complex number by complex number."""

import cmath
import itertools
import math

import pytest
import torch

from retain.attention.rotary import Rotary
from retain.scores import triattention
from tests.naive import assert_heads_close, existing, naive_scores, query_heads, random_evidence
from tests.refused import refused


def pairs(vector, F):
    return [complex(vector[f], vector[F + f]) for f in range(F)]


@pytest.mark.parametrize(("scaling", "furthest"), [(1.0, 9), (1.3, 64), (1.0, 1)])
def test_the_series_of_the_centre_and_the_length_of_what_scatters(scaling, furthest):
    """Six dimensions, of which RoPE turns four."""
    rotary = Rotary(torch.tensor([0.7, 0.1]), scaling)
    evidence = random_evidence((0, 3), head_width=6, rotary=rotary, dtype=torch.float64)
    frequencies, F = [float(w) for w in rotary.inverse_frequencies_F], 2
    plain_q = rotary.unrotate(evidence.queries_BQSD, evidence.positions_BT)
    plain_k = rotary.unrotate(evidence.keys_BHTD, evidence.positions_BT)
    distances = [2**n for n in range(furthest.bit_length())]

    def series(b, q):
        own, h = existing(evidence, b), q // evidence.group
        seen = [plain_q[b, q, j].tolist() for j in own]
        centre = [sum(column) / len(seen) for column in zip(*seen, strict=True)]
        lengths = [sum(abs(pairs(one, F)[f]) for one in seen) / len(seen) for f in range(F)]
        now, numbers = int(evidence.positions_BT[b, -1]) + 1, {}
        for i in own:
            key, at = plain_k[b, h, i].tolist(), int(evidence.positions_BT[b, i])
            rest = sum(c * k for c, k in zip(centre[2 * F :], key[2 * F :], strict=True))
            found = []
            for d in distances:
                total = rest
                for c, k, w in zip(pairs(centre, F), pairs(key, F), frequencies, strict=True):
                    phase = w * (now + d - at) + cmath.phase(c) - cmath.phase(k)
                    total += abs(c) * abs(k) * math.cos(phase) * scaling**2
                found.append(total)
            scatter = zip(lengths, pairs(centre, F), pairs(key, F), strict=True)
            beside = sum((m - abs(c)) * abs(k) * scaling**2 for m, c, k in scatter)
            numbers[i] = beside + sum(found) / len(found)
        mean = sum(numbers.values()) / len(numbers)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in numbers.values()) / len(numbers))
        return {i: (x - mean) / deviation for i, x in numbers.items()}

    heads = {(b, q): series(b, q) for b, q in itertools.product(range(2), range(4))}
    naive = naive_scores(evidence, lambda b, h, i: max(heads[b, q][i] for q in query_heads(evidence, h)))
    got = triattention(evidence, furthest=furthest)
    assert_heads_close(got.values_BHT, naive, ops=4)


def test_what_is_missing_is_refused():
    rotary = Rotary(torch.tensor([0.3]))
    refused("no rotary embedding", triattention, random_evidence())
    refused("a sequence has none", triattention, random_evidence((0, 14), rotary=rotary))
