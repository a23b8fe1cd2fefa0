import math

import pytest
import torch

from retain.scores.value_norm import value_norm_l1
from tests.naive import assert_heads_close, naive_norm, random_evidence


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("floats_at_once", [None, 1, 31, 60, 200, 2**24])
def test_the_norm_is_its_formula_however_it_is_chunked(group, floats_at_once):
    evidence = random_evidence((0, 4, 1), group=group, num_tokens=7)
    Q = 2 * group
    naive = torch.tensor(
        [[[naive_norm(evidence, b, q, i) for i in range(7)] for q in range(Q)] for b in range(3)],
        dtype=torch.float64,
    )
    norm = value_norm_l1(evidence.values_BHTD, evidence.output_weight_QDE, floats_at_once=floats_at_once)
    assert_heads_close(norm, naive)


def test_half_precision_values_are_normed_in_float32():
    evidence = random_evidence(dtype=torch.bfloat16)
    norm = value_norm_l1(evidence.values_BHTD, evidence.output_weight_QDE)
    assert norm.dtype == torch.float32
    assert_heads_close(
        norm, value_norm_l1(evidence.values_BHTD.double(), evidence.output_weight_QDE.double())
    )


@pytest.fixture
def products(monkeypatch):
    """Shapes of the products that were made."""
    shapes, multiply = [], torch.bmm

    def record(left, right, *, out):
        shapes.append(tuple(out.shape))
        return multiply(left, right, out=out)

    monkeypatch.setattr(torch, "bmm", record)
    return shapes


@pytest.mark.parametrize(("floats_at_once", "blocks"), [(12, 5 * 7), (120, 2 * 5), (2000, 1)])
def test_products_stay_within_the_bound(products, floats_at_once, blocks):
    evidence = random_evidence((0, 0), num_tokens=7, num_heads=3, group=2)
    value_norm_l1(evidence.values_BHTD, evidence.output_weight_QDE, floats_at_once=floats_at_once)
    assert max(math.prod(shape) for shape in products) <= floats_at_once
    assert len(products) == blocks


def test_all_heads_are_in_one_product(products):
    for num_heads in (1, 2, 8):
        evidence = random_evidence((0, 0), num_tokens=7, num_heads=num_heads)
        value_norm_l1(evidence.values_BHTD, evidence.output_weight_QDE)
    assert [shape[0] for shape in products] == [1, 2, 8]


def test_weights_that_train_pass_no_gradient():
    evidence = random_evidence()
    weight = evidence.output_weight_QDE.requires_grad_()
    assert not value_norm_l1(evidence.values_BHTD, weight).requires_grad


def test_nothing_has_no_norm():
    values, weight = torch.randn(0, 2, 5, 3), torch.randn(4, 3, 6)
    assert value_norm_l1(values, weight).shape == (0, 4, 5)
    assert value_norm_l1(values.new_empty(1, 2, 0, 3), weight).shape == (1, 4, 0)
