from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.largest_remainder import exact, largest_remainder


def test_a_number_is_taken_as_it_was_written():
    assert exact(0.1) == Fraction(1, 10)
    assert exact(0.2) * 100 == 20
    assert exact(Fraction(1, 3)) == Fraction(1, 3)
    assert exact(1e-7) == Fraction(1, 10**7)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_shares_sum_exactly_fit_and_stay_within_one_of_their_quota(data):
    weights = data.draw(st.lists(st.fractions(0, 5, max_denominator=7), min_size=1, max_size=6))
    capacity = data.draw(st.lists(st.integers(0, 20), min_size=len(weights), max_size=len(weights)))
    total = data.draw(st.integers(0, sum(capacity)))
    shares = largest_remainder(total, weights, capacity)
    assert sum(shares) == total
    assert all(0 <= share <= limit for share, limit in zip(shares, capacity, strict=True))
    if sum(weights):
        free = largest_remainder(total, weights)
        assert sum(free) == total
        for share, weight in zip(free, weights, strict=True):
            assert abs(share - total * weight / sum(weights)) < 1


def test_remainders_go_to_the_largest_then_the_lowest_index():
    assert largest_remainder(10, [Fraction(1)] * 3) == [4, 3, 3]
    assert largest_remainder(10, [Fraction(1), Fraction(3), Fraction(3)]) == [2, 4, 4]
    assert largest_remainder(9, [Fraction(1)] * 3, [1, 9, 9]) == [1, 4, 4]
    assert largest_remainder(5, [Fraction(1), Fraction(0)], [3, 9]) == [3, 2]


def test_more_than_fits_is_refused():
    with pytest.raises(ValueError, match="9 entries do not fit in capacities .4, 4., which hold 8"):
        largest_remainder(9, [Fraction(1)] * 2, [4, 4])
