"""Tables of heads and layers: what is read, and what is refused."""

import pytest

from retain.head_tables import check_table, format_table, read_table, row_of
from tests.refused import refused


def test_a_table_is_rows_of_layers(tmp_path):
    path = tmp_path / "heads.tsv"
    path.write_text("0\t1.0\n\n0.25\t5e-1\n")
    table = read_table("head_classes", str(path))
    assert table.rows == ((0.0, 1.0), (0.25, 0.5)) and table.layers == (0, 1)
    assert check_table("head_classes", str(path), [2, 2]) == table
    path.write_text(format_table(table.rows, [1, 3]))
    assert path.read_text().startswith("# layers 1 3\n0.000000\t1.000000\n")
    assert read_table("head_classes", str(path)).layers == (1, 3)
    assert row_of("retrieval_heads", str(path), 3, 2) == (0.25, 0.5)
    message = "hold 0 numbers for layer 2, which shows 2 query heads: measure .* --table retrieval_heads"
    refused(message, row_of, "retrieval_heads", str(path), 2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5\t0.5\n0.5\tlow\n", "line 2: could not convert string to float: 'low'; wanted tab-separated"),
        ("0.5\t1.5\n", r"line 1: got 2 numbers \(0.5, 1.5\); wanted numbers in 0..1, as many in every row"),
        ("0.5\tnan\n", "line 1: got 2 numbers .* wanted numbers in 0..1"),
        ("0.5\t0.5\n0.5\n", r"line 2: got 1 numbers \(0.5,\); wanted numbers in 0..1, 2 as in the first row"),
        ("# layers 0\n0.5\n0.5\n", "names layers 0 and has 2 rows"),
        ("# layers 1 1\n0.5\n0.5\n", "names layers 1 1 and has 2 rows; .* ascending"),
        ("# layers one\n0.5\n", "line 1: invalid literal"),
        ("\n\n", "holds no numbers; wanted one row a layer"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, text, message):
    path = tmp_path / "heads.tsv"
    path.write_text(text)
    refused(message, read_table, "head_classes", str(path))


def test_another_models_table_and_a_missing_one_are_refused(tmp_path):
    path = tmp_path / "heads.tsv"
    path.write_text("0.5\t0.5\n")
    for heads_L, has in (([2, 2], "2 of 2"), ([3], "1 of 3")):
        message = f"hold 1 layers of 2 KV heads, .* evicts from {has}: pass"
        refused(message, check_table, "head_classes", str(path), heads_L)
    named = tmp_path / "named.tsv"
    named.write_text("# layers 5\n0.5\t0.5\n")
    check_table("head_classes", str(named), [2], [2], [5])
    check_table("head_classes", str(path), [2], [2], [5])  # names none: in order
    message = "are of layers 5, and the model evicts from 4: pass"
    refused(message, check_table, "head_classes", str(named), [2], [2], [4])
    check_table("head_importance", str(path), [1], [2])
    check_table("head_importance", str(path), [2], [8])
    check_table("head_importance", str(path), [1])  # a multiple of the KV heads
    for kind, columns in (("head_importance", "KV or query heads"), ("retrieval_heads", "query heads")):
        refused(f"1 layers of 2 {columns}, .* from 1 of", check_table, kind, str(path), [4], [8])
    refused("hold 1 layers of 2 number, .* from 1 of 1", check_table, "layer_errors", str(path), [2], [4])
    for kind, stated in (
        ("head_classes", "allocation={'head_classes': path}"),
        ("retrieval_heads", "observed_settings={'retrieval_heads': path}"),
        ("layer_errors", "with one number in 0..1 .*--table layer_errors measures one"),
    ):
        with pytest.raises(FileNotFoundError, match=f"does not exist: .*{stated}"):
            read_table(kind, str(tmp_path / "none.tsv"))
