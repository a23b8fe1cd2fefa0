import math
from dataclasses import replace

import pytest
import torch

from retain.attention.rotary import Rotary
from retain.scores import knorm
from tests.naive import assert_heads_close, random_evidence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pads", [(0,), (0, 4, 9)])
def test_knorm_is_its_formula(pads, dtype):
    evidence = random_evidence(pads=pads, num_tokens=17, dtype=dtype)
    score = knorm(evidence)
    assert score.unit == "rank"
    naive = torch.full((len(pads), 2, 17), float("-inf"), dtype=torch.float64)
    for b, pad in enumerate(pads):
        for h in range(2):
            for i in range(pad, 17):
                naive[b, h, i] = -math.sqrt(sum(float(x) ** 2 for x in evidence.keys_BHTD[b, h, i]))
    assert_heads_close(score.values_BHT, naive)


def test_positions_do_not_matter():
    evidence = random_evidence(head_width=4)
    turned = Rotary(torch.tensor([1.0, 0.1])).rotate(evidence.keys_BHTD, evidence.positions_BT)
    assert_heads_close(knorm(replace(evidence, keys_BHTD=turned)).values_BHT, knorm(evidence).values_BHT)
