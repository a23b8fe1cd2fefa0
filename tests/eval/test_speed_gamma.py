"""Gamma from times by hand, and prefill-time equivalents in a report."""

import json

import pytest

from retain.eval.report.run import Run
from retain.eval.report.tables import memory_table
from retain.eval.speed import gamma
from retain.eval.speed.__main__ import main
from retain.eval.speed.caches import TimedCache
from retain.eval.speed.gamma import GammaSettings
from tests.eval.made_run import make_run
from tests.refused import refused

TINY = (
    "--what gamma --layers 3 --width 16 --heads 2 --kv-heads 2 --intermediate 16 --tokens 40 --steps 2 "
    "--threads 1 --rounds 3 --warmup 0"
)


@pytest.fixture
def clock(monkeypatch):
    """Sets how many milliseconds a prefill of n tokens takes, and a token behind them."""

    def sets(prefill, token):
        def run(self):
            length = self.work.prompt_BT.shape[1]
            assert self.name == "full" and self.work.following_BS.shape == (1, 2)
            return {"prefill_ms": prefill(length), "token_ms": token(length)}

        monkeypatch.setattr(TimedCache, "run", run)

    return sets


def test_gamma_is_the_slope_over_a_prefilled_token(clock, tmp_path, capsys):
    clock(lambda n: 2.0 * n, lambda n: 7.0 + 0.5 * n)
    output = tmp_path / "gamma.json"
    assert main([*TINY.split(), "--output", str(output)]) == 0
    record, shown = json.loads(output.read_text()), capsys.readouterr().out
    # Half a millisecond a token is held by 3 layers of 2 heads, and a token takes 2 ms to prefill.
    assert record["gamma"]["median"] == pytest.approx(0.5 / 6 / 2) and record["kv_heads"] == 6
    assert record["entry_ns"]["median"] == pytest.approx(1e6 * 0.5 / 6)
    assert "prompts of 10 and 40 tokens" in shown and "4.167e-02" in shown


def test_a_gamma_within_noise_is_no_gamma(clock):
    clock(lambda n: 2.0 * n, lambda n: 7.0)
    settings = GammaSettings(width=16, heads=2, kv_heads=2, intermediate=16, tokens=40, steps=2, threads=1)
    with pytest.raises(RuntimeError, match="gamma cannot be told from noise: take more --tokens"):
        gamma.measure(settings)
    refused("tokens is at least 8, got 4", GammaSettings, tokens=4)


def test_a_report_has_equivalents_beside_memory_where_gamma_was_measured(tmp_path):
    folder = make_run(tmp_path)
    assert "PTE" not in memory_table(Run.read(folder)).columns
    rows = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    for place, row in enumerate(rows):
        row["read_entries"] = 100 * (place + 1)
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = {
        **{"command": "the command", "date": "today", "model": "reference", "gamma": {"median": 0.5}},
        "environment": {"device": "cpu"},
    }
    (folder / "gamma.json").write_text(json.dumps(record))
    made = memory_table(Run.read(folder))
    assert made.columns[5:7] == ("% of full", "PTE")
    assert "gamma 0.5 of model reference, measured today on cpu by `the command`" in made.caption
    for line in made.rows:
        regime, budget, policy = (line[place].text for place in (0, 1, 2))
        own = [row for row in rows if (row["regime"], row["policy"]) == (regime, policy)]
        own = [row for row in own if f"{row['budget']:g}" in (budget, str(line[1].value))]
        wanted = sum(row["num_prompt"] + 0.5 * row["read_entries"] for row in own) / len(own)
        assert line[6].value == pytest.approx(wanted)
    del rows[0]["read_entries"]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert any(line[6].value is None for line in memory_table(Run.read(folder)).rows)
