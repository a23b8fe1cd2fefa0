import pytest
import torch

from retain.scores import tova
from tests.naive import (
    LAYERS,
    SHAPES,
    assert_heads_close,
    naive_attention,
    random_evidence,
    shaped_evidence,
    special_layer,
)


@pytest.mark.parametrize(
    ("shape", "layer"),
    [*((shape, None) for shape in sorted(SHAPES)), *(("group4", layer) for layer in LAYERS)],
)
def test_tova_is_its_formula(shape, layer):
    evidence, _ = shaped_evidence(shape, num_queries=3)
    evidence = evidence if layer is None else special_layer(evidence, layer)
    attention = naive_attention(evidence)
    B, Q, _, T = attention.shape
    naive = torch.full(evidence.keys_BHTD.shape[:3], float("-inf"), dtype=torch.float64)
    for b in range(B):
        for i in range(T):
            if evidence.valid_BT[b, i]:
                naive[b, :, i] = sum(float(attention[b, q, 2, i]) for q in range(Q)) / Q
    score = tova(evidence)
    assert score.window == 1
    assert_heads_close(score.values_BHT, naive)


def test_all_heads_rank_alike_and_one_query_is_enough():
    score = tova(random_evidence(num_queries=1)).values_BHT
    assert torch.equal(score[:, 0], score[:, 1])
    assert torch.equal(score, tova(random_evidence(num_queries=1)).values_BHT)


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="sequence 1 of 2 has 0 tokens, .* window of 1"):
        tova(random_evidence(pads=(0, 14)))
