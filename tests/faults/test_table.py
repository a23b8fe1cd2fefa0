"""Tests the table of a fault run: the columns, the verdict, and reasons that do not hold."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.draw import Fault
from tests.faults.table import make_table, read_reasons

CAUGHT = {"how": "test", "test": "tests/test_a.py::test_b[x|y]", "scope": "mirrored"}
LOOPED = {"how": "timeout", "test": "stopped after 9 s", "scope": "tier"}


def faults(count: int) -> list[Fault]:
    return [
        Fault(
            f"f{n}",
            "retain" if n % 2 else "retain.eval",
            "retain/a.py",
            n,
            "core/AddNot",
            f"x = {n}",
            "y = 0",
        )
        for n in range(count)
    ]


def row(fault: Fault, default: Any, whole: Any = "not asked") -> dict[str, Any]:
    asked = None if whole == "not asked" else {"caught": whole, "seconds": 1.0}
    return {"id": fault.id, "tree": "t", "default": {"caught": default, "seconds": 1.0}, "whole": asked}


def test_every_column_and_the_verdict() -> None:
    drawn = faults(10)
    rows = [row(fault, CAUGHT) for fault in drawn[:6]]
    rows += [
        row(drawn[6], LOOPED),
        row(drawn[7], None, CAUGHT),
        row(drawn[8], None, None),
        row(drawn[9], None, None),
    ]
    table = make_table(drawn, rows, {"f9": "The order does not matter."})
    assert "| retain | 5 | 3 | 1 | 0 | 1 |" in table
    assert "| retain.eval | 5 | 4 | 0 | 1 | 0 |" in table
    assert "| **all** | 10 | 7 | 1 | 1 | 1 |" in table
    assert "The default tier catches 7 of 10; 9 are wanted: **missed**." in table
    assert "Caught by timeout alone, no test failed: 1." in table
    assert "`f9` retain/a.py line 9, equivalent: The order does not matter." in table
    assert "  - x = 8\n  + y = 0" in table
    assert r"test_b[x\|y] (mirrored tests)" in table


def test_thirty_six_of_forty_are_enough() -> None:
    drawn = faults(40)
    rows = [row(fault, CAUGHT if n < 36 else None, None) for n, fault in enumerate(drawn)]
    assert "36 of 40; 36 are wanted: **met**" in make_table(drawn, rows, {})
    assert "35 of 40; 36 are wanted: **missed**" in make_table(
        drawn, [*rows[1:], row(drawn[0], None, None)], {}
    )


def test_an_unfinished_run_has_no_verdict() -> None:
    drawn = faults(10)
    table = make_table(drawn, [row(drawn[0], CAUGHT), row(drawn[1], None)], {})
    assert "**open**" in table
    assert "Unfinished: 9 faults" in table


def test_reasons_that_do_not_hold_are_refused(tmp_path: Path) -> None:
    drawn = faults(1)
    with pytest.raises(ValueError, match="not drawn: f7"):
        make_table(drawn, [], {"f7": "Never."})
    with pytest.raises(ValueError, match="listed as equivalent, but the whole tier caught it"):
        make_table(drawn, [row(drawn[0], None, CAUGHT)], {"f0": "Never."})
    path = tmp_path / "equivalent.yaml"
    path.write_text("12: as a number\n")
    with pytest.raises(ValueError, match="both as text"):
        read_reasons(path)
    path.write_text('"12": The order does not matter.\n')
    assert read_reasons(path) == {"12": "The order does not matter."}


def test_the_committed_reasons_are_sentences() -> None:
    reasons = read_reasons(Path(__file__).with_name("equivalent.yaml"))
    assert [key for key, reason in reasons.items() if len(key) != 8 or not reason.endswith(".")] == []
