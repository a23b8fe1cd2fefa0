import math
from dataclasses import replace

import pytest
import torch

from retain.scores import keydiff
from tests.naive import alone, assert_heads_close, random_evidence


def _naive(evidence, anchor):
    B, H, T, D = evidence.keys_BHTD.shape
    keys = evidence.keys_BHTD.double()
    naive = torch.full((B, H, T), float("-inf"), dtype=torch.float64)
    for b in range(B):
        own = [i for i in range(T) if evidence.valid_BT[b, i]]
        for h in range(H):
            length = {i: math.sqrt(sum(float(x) ** 2 for x in keys[b, h, i])) for i in own}
            mean = [
                sum(float(keys[b, h, i, d]) / (length[i] if anchor == "normalised" else 1.0) for i in own)
                / len(own)
                for d in range(D)
            ]
            norm = math.sqrt(sum(x**2 for x in mean))
            for i in own:
                product = sum(float(keys[b, h, i, d]) * mean[d] for d in range(D))
                naive[b, h, i] = -product / (length[i] * norm)
    return naive


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("anchor", ["normalised", "raw"])
def test_keydiff_is_its_formula(anchor, group):
    evidence = random_evidence(pads=(0, 4, 9), num_tokens=17, group=group)
    score = keydiff(evidence, anchor=anchor)
    assert score.unit == "rank"
    assert_heads_close(score.values_BHT, _naive(evidence, anchor))


def test_the_anchors_differ():
    evidence = random_evidence()
    raw, normalised = (keydiff(evidence, anchor=anchor).values_BHT for anchor in ("raw", "normalised"))
    assert not torch.allclose(raw, normalised, atol=1e-3)


def test_the_odd_key_out_is_kept_first():
    evidence = random_evidence(pads=(0,), num_tokens=9, num_heads=1)
    keys = torch.tensor([1.0, 0.0, 0.0]).expand(1, 1, 9, 3).clone()
    keys[0, 0, 4] = torch.tensor([-1.0, 0.5, 0.0])
    keys[0, 0, 6] = 0.0  # of no direction at all: neither like nor unlike
    score = keydiff(replace(evidence, keys_BHTD=keys)).values_BHT[0, 0]
    assert score.argmax() == 4 and score[6] == 0 and score.isfinite().all()


def test_padding_does_not_matter():
    evidence = random_evidence(pads=(0, 5, 2))
    for anchor in ("normalised", "raw"):
        score = keydiff(evidence, anchor=anchor).values_BHT
        for b, pad in enumerate((0, 5, 2)):
            single = keydiff(alone(evidence, b), anchor=anchor).values_BHT
            assert_heads_close(score[b : b + 1, :, pad:], single)


def test_an_unknown_anchor_is_refused():
    with pytest.raises(ValueError, match="anchor is 'normalised' or 'raw'; got 'median'"):
        keydiff(random_evidence(), anchor="median")
