import json

import pytest

from retain.eval.speed import decode as speed_decode
from retain.eval.speed.decode import Setting, benchmark, main, spread_of

TINY = ["--batch", "1", "--heads", "4", "--kv-heads", "2", "--width", "8", "--seen", "400", "--threads", "1"]
TINY += ["--evicted", "5", "--layers", "2", "--rounds", "2"]


def test_rows_are_as_unequal_as_asked():
    for setting in (Setting(), Setting(spread=1.0), Setting(seen=1000, batch=1)):
        lengths = setting.lengths()
        assert len(lengths) == setting.batch * setting.kv_heads
        assert sum(lengths) == setting.held * len(lengths)
        assert max(lengths) / min(lengths) == pytest.approx(setting.spread, rel=0.02)


def test_a_record_answers_the_four_questions(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed_decode, "SHORT", 20)
    monkeypatch.setattr(speed_decode, "LONG", 70)
    output = tmp_path / "decode.json"
    assert main([*TINY, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert [name[0] for name in record["ratios"]] == list("abccdd")
    assert {name: row["kept"] is None for name, row in record["ratios"].items()} == {
        name: name[0] in "cd" for name in record["ratios"]
    }
    assert all(len(times["all"]) == 2 for times in record["times_ms"].values())
    assert record["bytes_held"] == 2 * 80 * 2 * 8 * 4
    shown = capsys.readouterr().out
    assert output.with_suffix(".txt").read_text() in shown
    assert "d: compaction over attention" in shown and "--seen 400" in shown


def test_nothing_is_timed_if_the_op_is_wrong(monkeypatch, tmp_path, capsys):
    attend = speed_decode.attend
    monkeypatch.setattr(speed_decode, "attend", lambda *args, **kwargs: attend(*args, **kwargs) * 1.001)
    monkeypatch.setattr(speed_decode, "measures", None)
    assert main([*TINY, "--output", str(tmp_path / "decode.json")]) == 2
    shown = capsys.readouterr()
    assert "ragged attention is wrong: error" in shown.err and not shown.out
    assert not list(tmp_path.iterdir())


def test_settings_that_do_not_fit_are_all_named():
    with pytest.raises(
        ValueError, match=r"rounds .* at least 2, got 0; keep_ratio .* got 2.0; dtype is one of"
    ):
        benchmark(Setting(rounds=0, keep_ratio=2.0, dtype="int8"))
    with pytest.raises(ValueError, match="heads 5 are not a multiple of kv_heads 2"):
        Setting(heads=5, kv_heads=2)
    with pytest.raises(ValueError, match="evicted 500 would empty the shortest row, of 328"):
        Setting(evicted=500)


def test_percentiles():
    assert spread_of([5.0, 1.0, 3.0, 2.0, 4.0]) == {
        **{"median": 3.0, "p5": 1.2, "p20": 1.8, "p80": 4.2, "p95": 4.8}
    }
