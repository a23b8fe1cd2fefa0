import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.ranking import rank_entries, refuse_nan


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, float("-inf"), float("inf")]), min_size=1, max_size=12))
def test_ranks_are_their_formula_with_ties_to_the_later_position(row):
    naive = [
        sum(other > mine or (other == mine and k > i) for k, other in enumerate(row))
        for i, mine in enumerate(row)
    ]
    assert rank_entries(torch.tensor([row, row])).tolist() == [naive, naive]


def test_nan_is_refused_by_its_place():
    score = torch.zeros(2, 2, 3)
    score[1, 0, 2] = float("nan")
    with pytest.raises(ValueError, match="sequence 1, head 0, entry 2 is NaN"):
        refuse_nan(score)
