"""Head classes from a file: what is read, what is refused, and budgets against their naive version."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.head_classes import check_shape, class_budgets, read_head_classes
from tests.refused import refused


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


def test_a_table_is_rows_of_layers(tmp_path):
    path = tmp_path / "heads.tsv"
    path.write_text("0\t1.0\n\n0.25\t5e-1\n")
    assert read_head_classes(str(path)) == ((0.0, 1.0), (0.25, 0.5))
    assert check_shape(str(path), [2, 2]) == ((0.0, 1.0), (0.25, 0.5))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5\t0.5\n0.5\tlow\n", "line 2: could not convert string to float: 'low'; wanted tab-separated"),
        ("0.5\t1.5\n", r"line 1: got 2 numbers \(0.5, 1.5\); wanted numbers in 0..1, as many in every row"),
        ("0.5\tnan\n", "line 1: got 2 numbers .* wanted numbers in 0..1"),
        ("0.5\t0.5\n0.5\n", r"line 2: got 1 numbers \(0.5,\); wanted numbers in 0..1, 2 as in the first row"),
        ("\n\n", "holds no numbers; wanted one row a layer"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, text, message):
    path = tmp_path / "heads.tsv"
    path.write_text(text)
    refused(message, read_head_classes, str(path))


def test_another_models_table_and_a_missing_one_are_refused(tmp_path):
    path = tmp_path / "heads.tsv"
    path.write_text("0.5\t0.5\n")
    for heads_L, has in (([2, 2], "2 of 2"), ([3], "1 of 3")):
        refused(f"hold 1 layers of 2 KV heads, .* evicts from {has}: pass", check_shape, str(path), heads_L)
    with pytest.raises(FileNotFoundError, match="does not exist: pass allocation="):
        read_head_classes(str(tmp_path / "none.tsv"))
