"""Calibration may fail and be asked for otherwise, and costs no training."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import retain
from retain.config import load, to_mapping
from retain.train import loop
from retain.train.distill import distill, main
from retain.train.recipe import DistillConfig
from retain.train.run import artifact
from retain.train.run.checkpoint import latest, read_log
from tests.train.runs import same_gates

Make = Callable[..., Any]


def small(make_config: Make, **changes: Any) -> DistillConfig:
    few = {"calibration.knots": 4, "training.steps": 2, "training.checkpoint_every": 0}
    return make_config(**few, **changes)


def no_steps(*arguments: Any) -> None:
    raise AssertionError("trained again")


def test_a_calibration_that_fails_costs_no_training(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(make_config)
    corrected = replace(config, calibration=replace(config.calibration, kind="shared", knots=5))
    whole = distill(replace(corrected, output=str(tmp_path / "whole")))
    folder = Path(config.output)

    def failing(*arguments: Any, **settings: Any) -> None:
        raise ValueError("no curve goes through this.")

    with monkeypatch.context() as patch:
        patch.setattr(artifact, "calibrate_", failing)
        (tmp_path / "c.yaml").write_text(json.dumps(to_mapping(config)))
        with pytest.raises(SystemExit, match=r"no curve .* all 2 steps .* without training again"):
            main(["--config", str(tmp_path / "c.yaml")])
    found = latest(folder)
    assert found is not None and found[0] == 2 and not (folder / "gates.json").exists()
    before = read_log(folder)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step_", no_steps)
        # What is trained still binds it.
        with pytest.raises(ValueError, match=r"run of another config \(seed: 0 -> 1\)"):
            distill(replace(corrected, seed=1))
        assert distill(corrected) == folder
        assert read_log(folder) == before and latest(folder) is None
        assert load(folder / "config.yaml", DistillConfig) == corrected, "what it went on with"
        assert same_gates(folder, whole)
        gates = retain.load_gates(folder)
        assert gates.metadata["calibration"]["settings"]["kind"] == "shared"
        assert gates.metadata["config"]["calibration"]["knots"] == 5
        # A finished one is bound by what it was calibrated with.
        with pytest.raises(ValueError, match=r"run of another config \(calibration.knots: 5 -> 6\)"):
            distill(replace(corrected, calibration=replace(corrected.calibration, knots=6)))
        capsys.readouterr()
        assert distill(corrected) == folder
        assert "nothing to do" in capsys.readouterr().out
