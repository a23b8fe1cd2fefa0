import math
from dataclasses import replace

import pytest
import torch

from retain.attention.rotary import Rotary
from retain.scores import knorm
from tests.naive import assert_heads_close, naive_scores, random_evidence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pads", [(0,), (0, 4, 9)])
def test_knorm_is_its_formula(pads, dtype):
    evidence = random_evidence(pads=pads, num_tokens=17, dtype=dtype)
    score = knorm(evidence)
    assert score.unit == "rank"
    naive = naive_scores(evidence, lambda b, h, i: -math.hypot(*evidence.keys_BHTD[b, h, i].tolist()))
    assert_heads_close(score.values_BHT, naive)


def test_positions_do_not_matter():
    evidence = random_evidence(head_width=4)
    turned = Rotary(torch.tensor([1.0, 0.1])).rotate(evidence.keys_BHTD, evidence.positions_BT)
    assert_heads_close(knorm(replace(evidence, keys_BHTD=turned)).values_BHT, knorm(evidence).values_BHT)
