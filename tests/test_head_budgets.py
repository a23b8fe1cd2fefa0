"""Budgets of heads by class and by importance, against their naive versions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.head_budgets import class_budgets, importance_shares, released_importance


def _naive_budgets(classes_LH, threshold, total, least, capacity_LH):
    """Entry by entry: to the retrieval head that holds least, of equal ones the first; then to the others."""
    flat = [cell for row in classes_LH for cell in row]
    most = [own for row in capacity_LH for own in row]
    held = [min(least, own) for own in most]
    for _ in range(total - sum(held)):
        for retrieval in (True, False):
            able = [
                i for i, cell in enumerate(flat) if (cell >= threshold) == retrieval and held[i] < most[i]
            ]
            if able:
                held[min(able, key=lambda i: (held[i], i))] += 1
                break
    width = len(classes_LH[0])
    return [held[start : start + width] for start in range(0, len(held), width)]


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.data())
def test_budgets_are_the_naive_ones_and_sum_exactly(num_layers, num_heads, least, data):
    def table(cell):
        row = st.lists(cell, min_size=num_heads, max_size=num_heads)
        return data.draw(st.lists(row, min_size=num_layers, max_size=num_layers))

    classes_LH, capacity_LH = table(st.sampled_from([0.0, 0.3, 0.5, 1.0])), table(st.integers(0, 9))
    flat = [own for row in capacity_LH for own in row]
    total = data.draw(st.integers(sum(min(least, own) for own in flat), sum(flat)))
    budgets = class_budgets(classes_LH, 0.5, total, least, capacity_LH)
    assert budgets == _naive_budgets(classes_LH, 0.5, total, least, capacity_LH)
    assert sum(map(sum, budgets)) == total


@pytest.mark.parametrize(
    ("classes_LH", "threshold", "total", "least", "capacity_LH", "budgets"),
    [
        ([[0.5, 0.49]], 0.5, 12, 2, [[20, 20]], [[10, 2]]),  # at the threshold: a retrieval head
        ([[0.5, 0.49]], 0.4, 12, 2, [[20, 20]], [[6, 6]]),
        ([[0.5, 0.49]], 0.5, 0, 1, [[0, 0]], [[0, 0]]),  # a sequence that has nothing
        ([[0.5, 0.49]], 0.5, 12, 2, [[7, 20]], [[7, 5]]),  # a retrieval head that has evicted
        ([[0.1, 0.2], [0.0, 0.3]], 0.5, 13, 2, [[20, 20], [20, 20]], [[4, 3], [3, 3]]),  # no retrieval heads
    ],
)
def test_budgets_at_the_edges(classes_LH, threshold, total, least, capacity_LH, budgets):
    assert class_budgets(classes_LH, threshold, total, least, capacity_LH) == budgets


def _naive_importance(importance_LC, heads_L, beta, mean):
    """HeadKV's own words, query head by query head: its part of the pool and its equal part."""
    whole = sum(map(sum, importance_LC))
    groups = [len(row) // heads for row, heads in zip(importance_LC, heads_L, strict=True)]
    pool = mean / beta * sum(map(len, importance_LC))
    budgets = []
    for row, group in zip(importance_LC, groups, strict=True):
        of_queries = [
            mean - mean / beta + (own / whole if whole else 1 / sum(map(len, importance_LC))) * pool
            for own in row
        ]
        budgets += [sum(of_queries[i : i + group]) / group for i in range(0, len(row), group)]
    return budgets


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.data())
def test_shares_by_importance_are_the_published_budgets(num_layers, num_heads, group, data):
    cell = st.sampled_from([0.0, 0.001, 0.25, 0.7, 1.0])
    row = st.lists(cell, min_size=num_heads * group, max_size=num_heads * group)
    importance = data.draw(st.lists(row, min_size=num_layers, max_size=num_layers))
    beta = data.draw(st.sampled_from([1.0, 1.005, 1.5, 10.0]))
    shares = importance_shares(importance, [num_heads] * num_layers, beta)
    assert sum(shares) == 1
    mean = 50
    want = _naive_importance(importance, [num_heads] * num_layers, beta, mean)
    assert [float(own) * mean * len(shares) for own in shares] == pytest.approx(want)


def test_a_release_rounds_each_budget_by_itself():
    """`b // beta` is 66 of 100: a pool of 264 for four heads, and 34 for each."""
    shares = importance_shares([[1.0, 0.5], [0.25, 0.25]], [2, 2], 1.0)
    assert released_importance(shares, 100, 1.5) == [34 + 132, 34 + 66, 34 + 33, 34 + 33]
    shares = importance_shares([[1.0, 0.9, 0.1]], [3], 1.0)
    assert released_importance(shares, 100, 1.5) == [round(198 * own + 34) for own in (0.5, 0.45, 0.05)]
