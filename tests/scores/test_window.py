import pytest
import torch

from retain.scores.window import pool_entries, window_attention
from tests.naive import (
    LAYERS,
    SHAPES,
    assert_heads_close,
    naive_attention,
    random_evidence,
    shaped_evidence,
    special_layer,
)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("layer", [None, *LAYERS])
def test_window_attention_is_the_softmax_over_all_valid_entries(shape, layer):
    evidence, window = shaped_evidence(shape)
    evidence = evidence if layer is None else special_layer(evidence, layer)
    naive = naive_attention(evidence)
    assert_heads_close(window_attention(evidence, window), naive)
    assert_heads_close(window_attention(evidence, 2), naive[:, :, -2:])


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize(
    ("size", "window"), [(1, 4), (3, 4), (5, 4), (7, 4), (7, 2), (5, 1), (5, 14), (5, 0)]
)
def test_pooling_is_its_formula_with_the_window_apart(kind, size, window):
    values = torch.rand(2, 3, 14)
    split = 14 - window
    naive = torch.zeros(2, 3, 14, dtype=torch.float64)
    for row in range(2):
        for head in range(3):
            for i in range(14):
                near = [
                    float(values[row, head, k])
                    for k in range(max(0, i - size // 2), min(14, i + size // 2 + 1))
                    if (k < split) == (i < split)
                ]
                naive[row, head, i] = sum(near) / size if kind == "avg" else max(near)
    assert_heads_close(pool_entries(values, kind, size, window=window), naive)


def test_no_pool_is_no_copy():
    values = torch.rand(2, 14)
    assert pool_entries(values, None, 5, window=4) is values


def test_bad_pools_are_refused():
    with pytest.raises(ValueError, match="pool is 'avg', 'max' or None; got 'mean'"):
        pool_entries(torch.rand(2, 14), "mean", 5, window=4)
    with pytest.raises(ValueError, match="odd number of entries.*got 4"):
        pool_entries(torch.rand(2, 14), "avg", 4, window=4)
    with pytest.raises(ValueError, match="at least 1 query; got 0"):
        window_attention(random_evidence(), 0)
