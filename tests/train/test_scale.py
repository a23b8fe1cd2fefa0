"""Whole runs, launched, stopped, killed and starved; and the files that launch them."""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from safetensors.torch import load_file

from retain.train import assembly, loop
from retain.train.distill import distill
from retain.train.run import checkpoint
from retain.train.run.checkpoint import latest, read_log
from retain.train.run.signals import STOP_FILE, StopRequested
from tests.launch import launch_environment
from tests.train.runs import (
    LAUNCH,
    ROOT,
    TWO_PROCESSES,
    after_step,
    python,
    same_gates,
    terminate,
    written,
)

CONFIGS = ROOT / "configs"
LAUNCH_FILES = sorted((CONFIGS / "accelerate").glob("*.yaml"))
Make = Callable[..., Any]


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_a_launch_file_is_what_accelerate_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = path.read_text().splitlines()
    assert all(line.startswith("# ") for line in lines[:3]) and f"configs/accelerate/{path.name}" in lines[2]
    assert "accelerate launch" in lines[2] and "train/distill.py --config configs/distill/" in lines[2]
    # Accelerate's loader refuses keys that it does not know.
    loaded = load_config_from_file(str(path))
    mapping = yaml.safe_load(path.read_text())
    parser: ArgumentParser = launch_command_parser()
    known = {action.dest for action in parser._actions}
    for section in ("fsdp_config", "deepspeed_config"):
        assert mapping.get(section, {}).keys() <= known
    if "deepspeed_config" in mapping:
        # Accelerate refuses a launch file that repeats what DeepSpeed's own file says.
        assert "mixed_precision" not in mapping
        assert (ROOT / loaded.deepspeed_config["deepspeed_config_file"]).is_file()


def test_two_processes_distil_from_a_model_in_parts_what_one_does_from_a_whole_one(
    make_config: Make, tmp_path: Path
) -> None:
    changes = {"training.steps": 3, "training.micro_batch": 1}
    config = make_config(output=str(tmp_path / "whole"), **changes)
    written(config, tmp_path / "c.yaml")
    whole = distill(config)
    ways = ("fsdp2", "zero3") if find_spec("deepspeed") else ("fsdp2",)
    script = ["tests/train/two_processes.py", str(tmp_path), *(f"distill_{way}" for way in ways)]
    python(*TWO_PROCESSES, *script, ACCELERATE_USE_CPU="true", DS_ACCELERATOR="cpu")
    wanted = load_file(whole / "gates.safetensors")
    for way in ways:
        for process in range(2):
            outcome = torch.load(tmp_path / f"distill_{way}-{process}.pt")
            assert outcome["sharded"] == [True] and outcome["num_processes"] == 2
        made = json.loads((tmp_path / way / "gates.json").read_text())["training"]
        assert made["num_processes"] == 2
        for one, two in zip(read_log(whole), read_log(tmp_path / way), strict=True):
            if "held_out" in one:
                assert two["held_out"]["loss"] == pytest.approx(one["held_out"]["loss"], rel=1e-3)
                continue
            assert [len(read) for read in two["documents"]] == [2, 2], "each read its own documents"
            assert sorted(sum(two["documents"], [])) == sorted(one["documents"][0])
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
        for name, tensor in load_file(tmp_path / way / "gates.safetensors").items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs deepspeed: pip install 'retain-kv[deepspeed]'"
)
def test_the_deepspeed_launch_file_runs_a_distillation(make_config: Make, tmp_path: Path) -> None:
    config = make_config(output=str(tmp_path / "run"), **{"training.steps": 2})
    path = written(config, tmp_path / "c.yaml")
    # Shipped settings, but that tiny weights are sharded too.
    settings = json.loads((CONFIGS / "deepspeed" / "zero3.json").read_text())
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (tmp_path / "zero.json").write_text(json.dumps(settings))
    launch = yaml.safe_load((CONFIGS / "accelerate" / "deepspeed_zero3.yaml").read_text())
    # On a CPU, accelerate and DeepSpeed agree on one process only (two: raw DeepSpeed, in test_parallel).
    launch |= {"num_processes": 1}
    launch["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "zero.json")
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(launch))
    arguments = ["--config_file", str(tmp_path / "launch.yaml"), "train/distill.py", "--config", path]
    python(*LAUNCH, *arguments, DS_ACCELERATOR="cpu")
    whole = distill(make_config(output=str(tmp_path / "whole"), **{"training.steps": 2}))
    one, two = (load_file(folder / "gates.safetensors") for folder in (whole, tmp_path / "run"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6)
    base = [json.loads((folder / "run.json").read_text()) for folder in (whole, tmp_path / "run")]
    assert base[0] == base[1], "the model was hashed whole"


def test_asked_to_stop_a_run_saves_and_goes_on_to_the_same_gates(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = distill(make_config(output=str(tmp_path / "whole"), **{"training.checkpoint_every": 0}))
    config = make_config(output=str(tmp_path / "asked"), **{"training.checkpoint_every": 0})
    with after_step(3, terminate), pytest.raises(StopRequested) as raised:
        distill(config)
    assert raised.value.code == 143 and "after step 3" in capsys.readouterr().err
    assert (latest(tmp_path / "asked") or (0,))[0] == 3 and not (tmp_path / "asked" / "gates.json").exists()
    assert same_gates(whole, distill(config))


def test_two_processes_stop_together_and_one_goes_on(make_config: Make, tmp_path: Path) -> None:
    changes = {"training.steps": 30, "training.held_out_every": 0, "training.checkpoint_every": 0}
    config = make_config(output=str(tmp_path / "run"), **changes)
    output, path = tmp_path / "run", written(config, tmp_path / "c.yaml")
    launch = [sys.executable, *TWO_PROCESSES]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = launch_environment(ACCELERATE_USE_CPU="true")
    with subprocess.Popen([*launch, "train/distill.py", "--config", path], cwd=ROOT, env=env, **pipes) as run:
        while run.poll() is None and len(read_log(output)) < 4:
            time.sleep(0.01)
        (output / STOP_FILE).touch()
        said = run.communicate(timeout=120)[0]
    assert run.returncode != 0 and "stopped on request after step" in said, said[-3000:]
    assert "exitcode  : 143" in said, "as a launcher expects of a process that was told to end"
    found = latest(output)
    assert found is not None and 3 <= found[0] < 30 and not (output / STOP_FILE).exists()
    assert found[0] == [record["step"] for record in read_log(output) if "loss" in record][-1]
    assert checkpoint._state_of(found[1])["num_processes"] == 2

    distill(config)
    whole = distill(make_config(output=str(tmp_path / "whole"), **changes))
    pairs = list(zip(read_log(whole), read_log(output), strict=True))
    for one, two in pairs:
        if "loss" in one:
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
            assert sorted(sum(one["documents"], [])) == sorted(sum(two["documents"], []))
    assert {len(two["documents"]) for _, two in pairs if "loss" in two} == {1, 2}, "by one, and by two"
    first, second = (load_file(folder / "gates.safetensors") for folder in (whole, output))
    for name, tensor in first.items():
        # The same sums in another order are 4e-7 apart at most (three runs); a lost step is about lr, 1e-2.
        torch.testing.assert_close(second[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("place", "name"), [(assembly, "load_corpus"), (loop, "held_out_record")])
def test_asked_to_stop_before_the_first_step(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    changes = {"training.steps": 4, "training.held_out_every": 0, "training.checkpoint_every": 0}
    whole = distill(make_config(output=str(tmp_path / "whole"), **changes))
    config, stop, inner = make_config(**changes), tmp_path / "run" / STOP_FILE, getattr(place, name)
    stop.parent.mkdir()
    stop.touch()  # of an earlier run

    def asking(*arguments: Any, **settings: Any) -> Any:
        assert not stop.exists()
        stop.touch()
        return inner(*arguments, **settings)

    with monkeypatch.context() as patch, pytest.raises(StopRequested) as raised:
        patch.setattr(place, name, asking)
        distill(config)
    assert raised.value.code == 143 and not stop.exists()
    assert [record["step"] for record in read_log(stop.parent)] == [0, 1]
    # The log is that of a run that nobody stopped.
    assert read_log(distill(config)) == read_log(whole)
