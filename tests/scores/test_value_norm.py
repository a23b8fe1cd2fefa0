import math
from dataclasses import replace

import pytest
import torch

from retain.kernels.value_norm import reference, value_norm
from retain.scores.value_norm import value_norms
from tests.naive import assert_heads_close, naive_norm, random_evidence


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("group", [1, 3])
def test_the_norm_is_its_formula(group, p):
    evidence = random_evidence((0, 4, 1), group=group, num_tokens=7)
    naive = [
        [[naive_norm(evidence, b, q, i, p) for i in range(7)] for q in range(2 * group)] for b in range(3)
    ]
    assert_heads_close(value_norms(evidence, p=p), torch.tensor(naive, dtype=torch.float64))


def test_norms_that_were_kept_are_of_p_1_alone():
    evidence = random_evidence()
    kept = replace(evidence, value_norm_BQT=torch.rand(2, 4, 14))
    assert value_norms(kept) is kept.value_norm_BQT
    assert torch.equal(value_norms(kept, p=2), value_norms(evidence, p=2))


@pytest.fixture
def products(monkeypatch):
    """Shapes of the products that were made."""
    shapes, multiply = [], torch.bmm

    def record(left, right, *, out):
        shapes.append(tuple(out.shape))
        return multiply(left, right, out=out)

    monkeypatch.setattr(torch, "bmm", record)
    return shapes


@pytest.mark.parametrize(("floats_at_once", "blocks"), [(12, 5 * 7), (120, 2 * 5), (2000, 1), (None, 1)])
def test_products_stay_within_the_bound_and_are_of_all_heads(products, monkeypatch, floats_at_once, blocks):
    evidence = random_evidence((0, 0), num_tokens=7, num_heads=3, group=2)
    if floats_at_once:
        monkeypatch.setattr(reference, "CPU_FLOATS_AT_ONCE", floats_at_once)
    value_norm(evidence.values_BHTD, evidence.output_weight_QDE)
    assert max(math.prod(shape) for shape in products) <= (floats_at_once or math.inf)
    assert len(products) == blocks and {shape[0] for shape in products} == {3}


def test_nothing_has_no_norm():
    values, weight = torch.randn(0, 2, 5, 3), torch.randn(4, 3, 6)
    assert value_norm(values, weight).shape == (0, 4, 5)
    assert value_norm(values.new_empty(1, 2, 0, 3), weight).shape == (1, 4, 0)
