import pytest
import torch

from retain.scores.value_norm import value_norm_l1
from tests.close import assert_close
from tests.naive import naive_norm, random_evidence


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("floats_at_once", [1, 60, 2**24])
def test_the_norm_is_its_formula_however_it_is_chunked(group, floats_at_once):
    evidence = random_evidence(group=group, num_tokens=7)
    Q = 2 * group
    naive = torch.tensor(
        [[[naive_norm(evidence, b, q, i) for i in range(7)] for q in range(Q)] for b in range(2)],
        dtype=torch.float64,
    )
    norm = value_norm_l1(evidence.values_BHTD, evidence.output_weight_QDE, floats_at_once=floats_at_once)
    assert_close(norm, naive)


def test_half_precision_values_are_normed_in_float32():
    evidence = random_evidence(dtype=torch.bfloat16)
    norm = value_norm_l1(evidence.values_BHTD, evidence.output_weight_QDE)
    assert norm.dtype == torch.float32
    assert_close(norm, value_norm_l1(evidence.values_BHTD.double(), evidence.output_weight_QDE.double()))
