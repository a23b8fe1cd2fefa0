import pytest
import torch

from retain.scores.window import pool_entries
from tests.naive import assert_heads_close, naive_pool


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize(
    ("size", "window"), [(1, 4), (3, 4), (5, 4), (7, 4), (7, 2), (5, 1), (5, 14), (5, 0)]
)
def test_pooling_is_its_formula_with_the_window_apart(kind, size, window):
    values = torch.rand(2, 3, 14)
    rows = [naive_pool(row.double(), kind, size, 14 - window) for row in values.flatten(0, 1)]
    assert_heads_close(pool_entries(values, kind, size, window=window), torch.stack(rows).view(2, 3, 14))


def test_no_pool_is_no_copy():
    values = torch.rand(2, 14)
    assert pool_entries(values, None, 5, window=4) is values
