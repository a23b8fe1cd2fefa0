"""A table in text."""

from retain.eval.text_table import Column, text_table


def test_rows_stand_under_their_titles():
    spread = {"median": 2.0, "p20": 1.0, "p80": 3.5}
    columns = (
        *(Column("policy", "policy"), Column("keep", "keep", "g"), Column("held", "bytes.held", ".1f", 1024)),
        *(Column("ms", "ms", ".1f", wide=True), Column("median", "ms", ".2f")),
    )
    rows = [
        {"policy": "snapkv", "keep": 0.5, "bytes": {"held": 512}, "ms": spread},
        {"policy": "full", "keep": 1.0, "failed": "out of memory"},
    ]
    assert text_table(columns, rows) == [
        "policy keep held             ms median",
        "snapkv  0.5  0.5 2.0 (1.0..3.5)   2.00",
        "full      1    -              -      - out of memory",
    ]
