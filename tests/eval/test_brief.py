"""A run in plain lines: counts of right answers and bytes, the full cache first."""

import json

from retain.eval.report.brief import brief, main
from tests.eval.made_rows import make_row


def made(policy: str, budget: float, rights: int, of: int = 4, mib: int = 2) -> list[dict]:
    rows = [
        make_row("context_only", policy, budget, "facts/place", "held-out", 0, item, item < rights)
        for item in range(of)
    ]
    return [{**own, "bytes_held": mib * 2**20} for own in rows]


ROWS = [*made("full", 1.0, 4, mib=20), *made("snapkv", 0.1, 0), *made("snapkv", 0.2, 1, mib=4)]


def test_lines_count_right_answers_and_their_bytes():
    first, budgets, full, snapkv = brief(ROWS)
    assert first.startswith("4 questions (facts/place)")
    assert budgets.split() == ["keep_ratio", "0.1", "keep_ratio", "0.2"]
    assert full.split() == ["full", "4", "of", "4,", "20.0", "MiB"]
    assert snapkv.split() == ["snapkv", "0", "of", "4,", "2.0", "MiB", "1", "of", "4,", "4.0", "MiB"]


def test_the_command_says_where_the_report_is(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "Run eval/compare.py first" in capsys.readouterr().err
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(own) + "\n" for own in ROWS))
    assert main([str(tmp_path)]) == 0
    assert "report.html" in capsys.readouterr().out
