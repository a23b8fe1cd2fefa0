"""The benchmark of a training step: it measures what it says, and its table says how."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from retain.train import speed
from retain.train.speed import SHAPES, Setting, Step, benchmark, main, table

MIB = 2**20
SMALL: dict[str, Any] = {
    "tokens": 160,
    "layers": 2,
    "width": 64,
    "heads": 4,
    "kv_heads": 2,
    "intermediate": 96,
    "threads": 1,
    "pairs": 3,
    "warmup": 1,
}


def test_a_step_trains_the_gates_and_reads_the_same_tokens() -> None:
    step = Step(Setting(**SMALL))
    step.prepare()
    assert step.input_ids[0].tolist() == [*step.document.context_ids, *step.document.appendix_ids]
    before = [parameter.detach().clone() for parameter in step.parameters]
    step.train()
    assert all(not torch.equal(a, b) for a, b in zip(before, step.parameters, strict=True))
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert step.read().last_hidden_state.shape == (1, 160, 64)
    assert step.planned_bytes() > 0


def test_every_pair_is_in_the_record_and_the_table_says_where_it_is_from() -> None:
    record = benchmark("step", Setting(**SMALL), command="python -m retain.train.speed")
    assert len(record["read_ms"]) == len(record["train_ms"]) == 3
    ratios = sorted(b / a for a, b in zip(record["read_ms"], record["train_ms"], strict=True))
    assert record["ratio"]["median"] == pytest.approx(ratios[1])
    assert record["ratio"]["p20"] <= record["ratio"]["median"] <= record["ratio"]["p80"]
    middle = sorted(record["train_ms"])[1]
    assert record["tokens_per_second"] == pytest.approx(160 / middle * 1e3)
    assert record["hours_per_10m_tokens"] == pytest.approx(1e7 / 160 * middle / 1e3 / 3600)
    text = table(record)
    for word in ("step / decoder alone", "2 layers, width 64", "command: python -m", "load ", "commit "):
        assert word in text


def test_a_step_is_held_against_its_plan() -> None:
    record = benchmark("step", Setting(**SMALL))
    plan = record["plan"]
    assert plan["peak_gib"] > 0 and plan["tflops"] > 0 and plan["efficiency"] == 0.4
    (line,) = speed.against_plan(record)
    assert line in table(record).splitlines() and f"{record['tokens_per_second']:,.0f} tokens/s" in line
    made = {"peak_gib": 25.0, "tokens_per_second": 8000.0, "efficiency": 0.4, "tflops": 800.0}
    lines = speed.against_plan({"plan": made, "tokens_per_second": 10000.0, "peak_gib": 24.0})
    assert lines == [
        "held: a step as fast as planned: 10,000 tokens/s, 8,000 planned; 50.0% of the 800 TFLOP/s of a "
        "matrix product, 40% planned",
        "held: peak memory as planned: 24.00 GiB, 25.00 planned",
    ]
    lines = speed.against_plan({"plan": made, "tokens_per_second": 7999.0, "peak_gib": 25.1})
    assert all(line.startswith("**NOT held**: ") for line in lines)


def test_memory_puts_the_plan_beside_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(setting: Setting, lengths: list[int]) -> list[dict[str, Any]]:
        return [
            {"tokens": tokens, "bytes": 1000 + 10 * tokens, "planned": 20.0 * tokens} for tokens in lengths
        ]

    monkeypatch.setattr(speed, "watched", watched)
    record = benchmark("memory", Setting(**SMALL))
    assert record["bytes_per_token"] == 10 and record["of_each_piece"] == [10, 10, 10]
    assert [row["tokens"] for row in record["rows"]] == [1024, 2048, 4096, 8192]
    assert "planned MiB" in table(record) and "between lengths" in table(record)


def test_the_command_line_writes_a_record_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main([*flags, "--output", str(tmp_path / "a" / "step.json")]) == 0
    record = json.loads((tmp_path / "a" / "step.json").read_text())
    assert record["setting"]["tokens"] == 160 and record["command"].endswith("step.json")
    assert (tmp_path / "a" / "step.txt").read_text() in capsys.readouterr().out


def test_shapes_are_settings_and_wrong_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert Setting(**SHAPES["8b"]).width == 4096 and Setting(**SHAPES["small"]) == Setting()
    with pytest.raises(ValueError, match="tokens is a whole number of at least 128.*dtype is one of"):
        Setting(tokens=10, dtype="int4")
    with pytest.raises(ValueError, match="do not divide one another"):
        Setting(heads=7)
    assert main(["--what", "stepp"]) == 2 and "did you mean" in capsys.readouterr().err.lower()


def test_a_watched_process_is_started_with_the_whole_setting_and_its_failure_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setting, asked = Setting(**SMALL), []

    def run(module: str, flags: list[str]) -> list[str]:
        asked.append((module, flags))
        return ["noise", *(json.dumps({"tokens": tokens}) for tokens in (160, 192))]

    monkeypatch.setattr(speed, "in_a_process", run)
    assert speed.watched(setting, [160, 192]) == [{"tokens": 160}, {"tokens": 192}]
    ((module, flags),) = asked
    assert module == "retain.train.speed" and flags[:5] == ["--what", "watch", "--lengths", "160", "192"]
    assert flags[5:] == [f"--{name.replace('_', '-')}={value}" for name, value in vars(setting).items()]

    def fail(module: str, flags: list[str]) -> list[str]:
        raise RuntimeError("the watched process failed: it broke")

    monkeypatch.setattr(speed, "in_a_process", fail)
    assert main(["--what", "memory"]) == 2
    assert capsys.readouterr().err == "error: the watched process failed: it broke\n"
