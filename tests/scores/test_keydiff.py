import math
from dataclasses import replace

import pytest
import torch

from retain.scores import keydiff
from tests.naive import assert_heads_close, naive_scores, random_evidence


def _naive(evidence, anchor):
    keys = evidence.keys_BHTD.tolist()

    def number(b, h, i):
        own = [key for key, valid in zip(keys[b][h], evidence.valid_BT[b], strict=True) if valid]
        lengths = [math.hypot(*key) if anchor == "normalised" else 1.0 for key in own]
        mean = [sum(x / n for x, n in zip(column, lengths, strict=True)) for column in zip(*own, strict=True)]
        product = sum(x * m for x, m in zip(keys[b][h][i], mean, strict=True))
        return -product / (math.hypot(*keys[b][h][i]) * math.hypot(*mean))

    return naive_scores(evidence, number)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("anchor", ["normalised", "raw"])
def test_keydiff_is_its_formula(anchor, group):
    evidence = random_evidence(pads=(0, 4, 9), num_tokens=17, group=group)
    score = keydiff(evidence, anchor=anchor)
    assert score.unit == "rank"
    assert_heads_close(score.values_BHT, _naive(evidence, anchor))


def test_the_odd_key_out_is_kept_first():
    evidence = random_evidence(pads=(0,), num_tokens=9, num_heads=1)
    keys = torch.tensor([1.0, 0.0, 0.0]).expand(1, 1, 9, 3).clone()
    keys[0, 0, 4] = torch.tensor([-1.0, 0.5, 0.0])
    keys[0, 0, 6] = 0.0  # of no direction at all: neither like nor unlike
    score = keydiff(replace(evidence, keys_BHTD=keys)).values_BHT[0, 0]
    assert score.argmax() == 4 and score[6] == 0 and score.isfinite().all()
