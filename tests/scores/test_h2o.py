import pytest
import torch

from retain.scores import h2o
from tests.close import assert_close
from tests.naive import naive_attention, random_evidence


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("chunk", [1, 5, 128])
def test_h2o_is_its_formula_however_it_is_chunked(reduce, chunk):
    G, T = 2, 14
    evidence = random_evidence()
    attention = naive_attention(evidence)
    naive = torch.full((2, 2, T), float("-inf"), dtype=torch.float64)
    for b in range(2):
        for h in range(2):
            for i in range(T):
                if evidence.valid_BT[b, i]:
                    heads = range(h * G, h * G + G)
                    mass = sum(float(attention[b, q, j, i]) for q in heads for j in range(i, T)) / G
                    naive[b, h, i] = mass if reduce == "sum" else mass / (T - i)
    assert_close(h2o(evidence, reduce=reduce, chunk=chunk).values_BHT, naive)


def test_h2o_needs_every_query():
    with pytest.raises(ValueError, match="every query, but the evidence holds the last 8 of 24"):
        h2o(random_evidence(pads=(0,), num_tokens=24, num_queries=8))
    with pytest.raises(ValueError, match="reduce is 'sum' or 'mean'; got 'max'"):
        h2o(random_evidence(), reduce="max")
