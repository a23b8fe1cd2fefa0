import pytest

from retain.scores import tova
from tests.naive import SHAPED, assert_heads_close, mean, naive_attention, naive_scores, shaped_evidence


@pytest.mark.parametrize(("shape", "layer"), SHAPED)
def test_tova_is_its_formula(shape, layer):
    evidence, _ = shaped_evidence(shape, layer, num_queries=3)
    last = naive_attention(evidence)[:, :, -1]
    score = tova(evidence)
    assert score.window == 1
    assert_heads_close(score.values_BHT, naive_scores(evidence, lambda b, h, i: mean(last[b, :, i].tolist())))
