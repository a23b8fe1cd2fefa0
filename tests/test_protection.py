from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.protection import Protection, protected_mask


def _valid(*lengths: int) -> torch.Tensor:
    width = max(lengths)
    return torch.arange(width) >= width - torch.tensor(lengths)[:, None]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.1, 0.25]),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.integers(0, 5),
    st.integers(0, 8),
    st.fractions(20, 60, max_denominator=2),
)
def test_the_mask_is_its_formula(lengths, sinks, prefix, suffix, minimum, recent, budget):
    protection = Protection(sinks, prefix, suffix, minimum, recent)
    valid = _valid(*lengths)
    first = max(sinks, max(minimum, int(Fraction(str(prefix)) * budget)) if prefix else 0)
    last = max(recent, max(minimum, int(Fraction(str(suffix)) * budget)) if suffix else 0)
    if any(min(first + last, length) > budget for length in lengths):
        with pytest.raises(ValueError, match="fewer than the .* protected"):
            protected_mask(protection, valid, [budget] * len(lengths))
        return
    mask = protected_mask(protection, valid, [budget] * len(lengths))
    for row, length in enumerate(lengths):
        start = valid.shape[1] - length
        for i in range(valid.shape[1]):
            place = i - start
            wanted = place >= 0 and (place < first or place >= length - last)
            assert bool(mask[row, i]) is wanted


def test_a_tenth_of_each_sequences_own_budget():
    mask = protected_mask(Protection(), _valid(1000, 300), [200, 60])
    assert mask.sum(-1).tolist() == [40, 12]
    assert mask[1, 700:706].all() and mask[1, -6:].all() and not mask[1, :700].any()


def test_a_budget_below_the_protected_count_says_by_how_much():
    protection = Protection(sinks=4, recent=32)
    with pytest.raises(
        ValueError, match=r"sequence 1 has a budget of 30 entries per head, 6 fewer than the 36 protected"
    ):
        protected_mask(protection, _valid(300, 100), [60, 30])
    # A fraction short is short: 36 protected do not fit in 35.5.
    with pytest.raises(ValueError, match=r"35.5 entries per head, 1 fewer than the 36 protected"):
        protected_mask(protection, _valid(100), [Fraction(71, 2)])
    assert protected_mask(protection, _valid(20), [20]).all()


def test_bad_settings_are_named_all_at_once():
    with pytest.raises(ValueError, match=r"sinks is -1.*prefix_fraction is 1.5, and must lie in 0..1"):
        Protection(sinks=-1, prefix_fraction=1.5)
