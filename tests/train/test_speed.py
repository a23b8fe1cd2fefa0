"""The benchmark of a training step: it measures what it says, and its table says how."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from retain.process import benchmark
from retain.train import speed
from retain.train.speed import MEMORY, SHAPES, STEP, Step, TrainingSpeedSettings, main, watched

SMALL: dict[str, Any] = {
    **{"tokens": 160, "layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "intermediate": 96},
    **{"threads": 1, "pairs": 3, "warmup": 1},
}


def test_a_step_trains_the_gates_and_reads_the_same_tokens() -> None:
    step = Step(TrainingSpeedSettings(**SMALL))
    step.prepare()
    assert step.input_ids[0].tolist() == [*step.document.context_ids, *step.document.appendix_ids]
    before = [parameter.detach().clone() for parameter in step.parameters]
    step.train()
    assert all(not torch.equal(a, b) for a, b in zip(before, step.parameters, strict=True))
    assert all(parameter.grad is None for parameter in step.model.parameters())
    with torch.no_grad():
        assert step.read().last_hidden_state.shape == (1, 160, 64)
    assert step.planned_bytes() > 0


def test_every_pair_is_in_the_record_and_the_rate_is_held_against_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert main([*flags, "--output", str(tmp_path / "a" / "step.json")]) == 0
    record, text = json.loads((tmp_path / "a" / "step.json").read_text()), capsys.readouterr().out
    assert record["setting"]["tokens"] == 160 and (tmp_path / "a" / "step.txt").read_text() in text
    read, train = record["read_ms"], record["train_ms"]
    assert len(read["all"]) == 3
    ratios = [b / a for a, b in zip(read["all"], train["all"], strict=True)]
    assert record["ratio"]["all"] == pytest.approx(ratios)
    assert record["tokens_per_second"] == pytest.approx(160 / train["median"] * 1e3)
    assert record["hours_per_10m_tokens"] == pytest.approx(1e7 / 160 * train["median"] / 1e3 / 3600)
    plan = record["plan"]
    assert plan["peak_gib"] > 0 and plan["tflops"] > 0 and plan["efficiency"] == 0.4
    (line,) = speed.against_plan(record)
    assert line in text.splitlines() and f"{record['tokens_per_second']:,.0f} tokens/s" in line
    assert "step / decoder alone" in text and "2 layers, width 64" in text


def test_what_holds_of_a_plan_is_said() -> None:
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
    asked = []

    def run(module: str, arguments: list[str]) -> list[str]:
        assert module == "retain.train.speed" and arguments[:3] == ["--what", "memory", "--watch"]
        asked.extend(json.loads(arguments[3]))
        tokens = asked[-1]["tokens"]
        return ["noise", json.dumps({"tokens": tokens, "bytes": 1000 + 10 * tokens, "planned": 20.0})]

    monkeypatch.setattr(benchmark, "in_a_process", run)
    record = MEMORY.record(TrainingSpeedSettings(**SMALL))
    assert record["bytes_per_token"] == 10 and record["of_each_piece"] == [10, 10, 10]
    assert [row["tokens"] for row in record["rows"]] == [1024, 2048, 4096, 8192]
    assert TrainingSpeedSettings(**asked[0]) == TrainingSpeedSettings(**{**SMALL, "tokens": 1024})
    assert "planned MiB" in MEMORY.text(record) and "between lengths" in MEMORY.text(record)


def test_shapes_are_settings_and_what_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert STEP.shapes is SHAPES and TrainingSpeedSettings(**SHAPES["8b"]).width == 4096
    with pytest.raises(ValueError, match=r"tokens is a whole number of at least 128.*not 7 heads of an even"):
        TrainingSpeedSettings(tokens=10, heads=7)

    def fail(module: str, arguments: list[str]) -> list[str]:
        raise RuntimeError("the watched process failed: it broke")

    monkeypatch.setattr(benchmark, "in_a_process", fail)
    assert main(["--what", "memory"]) == 2
    assert capsys.readouterr().err == "error: the watched process failed: it broke\n"
    with pytest.raises(RuntimeError, match="it broke"):
        watched(TrainingSpeedSettings(**SMALL), [160])
