"""Whole runs: what is written, resuming to the same numbers, two real processes, and what is refused."""

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import retain
from retain.config import load
from retain.gates import GATES
from retain.hf.intercept.observe import observe
from retain.policy import load_policy
from retain.train import local_stage as local
from retain.train.arguments import distill_parser, recipe_of
from retain.train.distill import distill, main
from retain.train.recipe import DistillConfig, check
from retain.train.run.checkpoint import latest, read_log
from retain.train.teacher import load_frozen
from tests.refused import refused
from tests.tiny import tiny_model
from tests.train.runs import ROOT, killed_at, same_gates, written

Make = Callable[..., Any]


def test_a_run_writes_an_artifact_that_loads_and_scores(make_config: Make) -> None:
    config = make_config()
    folder = distill(config)
    files = "README.md config.yaml gates.json gates.safetensors log.jsonl run.json"
    assert sorted(path.name for path in folder.iterdir()) == files.split()
    assert load(folder / "config.yaml", DistillConfig) == config
    log = read_log(folder)
    steps = [record for record in log if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert all(0 <= record["overlap"] <= 1 for record in steps)
    looks = [record for record in log if "held_out" in record]
    assert [record["step"] for record in looks] == [0, 4, 8]
    assert {"overlap_random", "overlap_recency", "overlap_value_norm"} <= looks[0]["held_out"].keys()
    assert looks[-1]["held_out"]["loss"] < looks[0]["held_out"]["loss"]

    frozen = load_frozen(config.model, dtype="float32")
    gates = retain.load_gates(folder, frozen.model)
    made = gates.metadata["training"]
    assert made["num_processes"] == 1
    assert made["held_out"] == looks[-1]["held_out"]
    assert gates.metadata["config"]["model"] == config.model and gates.metadata["protected_window"] == 8
    for evidence in observe(frozen.model, torch.arange(2, 40)[None]):
        assert gates.score(evidence).values_BHT.isfinite().all()
        assert gates.score(evidence).unit == "risk"


@pytest.mark.always
def test_a_killed_run_resumes_to_the_same_numbers(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = distill(make_config(output=str(tmp_path / "whole")))
    killed = make_config(output=str(tmp_path / "killed"))
    with killed_at(6):  # two steps after the checkpoint: their log lines must go
        distill(killed)
    found = latest(Path(killed.output))
    assert found is not None and found[0] == 4
    assert not (Path(killed.output) / "gates.json").exists()
    torch.rand(100)  # whatever else happened to the global generator must not matter
    resumed = distill(killed)
    assert read_log(resumed) == read_log(whole), "losses, documents, learning rates: all digits"
    assert same_gates(whole, resumed)


def test_a_run_killed_after_its_last_step_still_reports_the_held_out_documents(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()

    def killed(*arguments: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("retain.train.distill.save_gates", killed)
        with pytest.raises(KeyboardInterrupt):
            distill(config)
    found = latest(Path(config.output))
    assert found is not None and found[0] == config.training.steps
    made = json.loads((distill(config) / "gates.json").read_text())["training"]
    looks = [record for record in read_log(Path(config.output)) if "held_out" in record]
    assert [record["step"] for record in looks] == [0, 4, 8]
    assert made["held_out"] == looks[-1]["held_out"] and made["held_out"]


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("changed", ["base model", "documents"])
def test_a_run_that_would_begin_with_something_else_is_refused(
    make_config: Make, tmp_path: Path, finished: bool, changed: str
) -> None:
    base = make_config(**{"training.steps": 2, "training.checkpoint_every": 1})
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(base.model, model)
    rows.write_bytes(Path(base.data.path).read_bytes())
    config = replace(base, model=str(model), data=replace(base.data, path=str(rows)))
    with contextlib.nullcontext() if finished else killed_at(1):
        distill(config)
    folder = Path(config.output)
    assert finished == (latest(folder) is None)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if changed == "base model":
        tiny_model("qwen3", seed=1, num_hidden_layers=2).save_pretrained(model)
    else:
        rows.write_text(rows.read_text().replace('"context_ids": [1, ', '"context_ids": [2, '))
    sha256 = json.loads((folder / "run.json").read_text())[changed]
    said = rf"\({changed}: sha256 {sha256} -> \w{{64}}\): choose another `output`"
    refused(said, distill, config)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    distill(replace(config, overwrite=True))
    assert json.loads((folder / "run.json").read_text())[changed] != sha256


def test_a_finished_run_is_left_alone_and_another_config_refused(
    make_config: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(**{"training.steps": 1})
    folder = distill(config)
    before = (folder / "gates.json").read_bytes()
    distill(config)
    assert "nothing to do" in capsys.readouterr().out
    other = replace(config, seed=5)
    with pytest.raises(ValueError, match=r"run of another config \(seed: 0 -> 5\)"):
        distill(other)
    assert (folder / "gates.json").read_bytes() == before
    distill(replace(other, overwrite=True))
    assert json.loads((folder / "gates.json").read_text())["training"]["seed"] == 5
    assert len(read_log(folder)) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: float
) -> None:
    config = make_config(**{"data.held_out": 0, "training.micro_batch": 4})
    total_loss = local.total_loss
    calls = []

    def spoilt(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        loss = total_loss(*arguments)
        return loss * bad if len(calls) == 2 * 4 * 5 + 1 else loss  # two layers, four documents: step 6

    monkeypatch.setattr(local, "total_loss", spoilt)
    with pytest.raises(
        FloatingPointError, match=r"step 6: the loss is not finite \(batch of documents \[.*step 4 in"
    ):
        distill(config)
    folder = Path(config.output)
    assert not (folder / "gates.json").exists() and len(read_log(folder)) == 5
    monkeypatch.setattr(local, "total_loss", total_loss)
    # Wherever it was moved to, as a full disk has it, and whatever is planned for.
    moved = folder.rename(folder.with_name("elsewhere"))
    config = replace(config, output=str(moved))
    assert len(read_log(distill(config))) == 8, "and the run goes on from there"
    assert "going on from a checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gate.family=mpl", "data.lengths=[9]"], "(?s)did you mean 'mlp'.*data.lengths has 9"),
        (["target.horizon=0", "training.lr=.nan"], "(?s)target.horizon: input .*training.lr: input"),
        (["seeed=1", "gate.family=mpl"], "(?s)unknown key 'seeed' .*did you mean 'mlp'"),
        (["target.horizon=99"], "too short: .* more than 99 are needed"),
        (["target.horizon=500"], "lengths=100 and target.horizon=500: no context would be longer"),
        (["model=no/such-model"], "model='no/such-model' cannot be loaded"),
        (["data.path=nowhere.jsonl"], "no such data file"),
    ],
)
def test_bad_requests_end_before_work_starts(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    """And before weights are read, which may take long."""

    def load_frozen(*_: Any, **__: Any) -> None:
        raise AssertionError("read the weights")

    monkeypatch.setattr("retain.train.assembly.load_frozen", load_frozen)
    path = written(make_config(), tmp_path / "c.yaml")
    with pytest.raises(SystemExit, match=message):
        main(["--config", path, *overrides])
    assert not (tmp_path / "run").exists()


SHIPPED = sorted((ROOT / "configs" / "distill").rglob("*.yaml"))


def test_every_family_has_a_recipe() -> None:
    recipes = {load(path, DistillConfig).gate.family for path in SHIPPED if path.parent.name == "families"}
    assert recipes == set(GATES) and len(SHIPPED) == len(GATES) + 5


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_build(path: Path) -> None:
    config = load(path, DistillConfig)
    check(config, 1)
    assert config.output.startswith("runs/")
    # What is trained for the default policy can be used by it; published families are compared alone.
    policy = load_policy("gate" if path.parent.name == "families" else "learned")
    assert config.target.horizon <= policy.protection.recent
    head = path.read_text().splitlines()[:3]
    launch = "accelerate launch --quiet --config_file configs/accelerate/one_process.yaml train/distill.py"
    assert all(line.startswith("# ") for line in head) and launch in head[2]


FAMILIES = [path for path in SHIPPED if path.parent.name == "families"]


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
def test_each_familys_recipe_trains_the_reference_model_in_small(path: Path, tmp_path: Path) -> None:
    """Its own stage, target, loss and gate: gates move, load, and evict in a cache."""
    small = [f"output={tmp_path / 'run'}", "data.documents=8", "data.held_out=2", "data.max_tokens=300"]
    small += [
        "training.steps=3",
        "training.batch_documents=2",
        "training.warmup_steps=1",
        "soft.ramp_steps=1",
    ]
    config = load(path, DistillConfig, small)
    folder = distill(config)
    looks = [record["held_out"] for record in read_log(folder) if "held_out" in record]
    assert len(looks) == 2 and all(math.isfinite(found["loss"]) for found in looks)
    assert all(0 <= found["overlap"] <= 1 for found in looks if config.stage != "end_to_end")
    steps = [record for record in read_log(folder) if "grad_norm" in record]
    assert len(steps) == 3 and all(record["grad_norm"] > 0 for record in steps)
    frozen = load_frozen(config.model, dtype="float32")
    gates = retain.load_gates(folder, frozen.model)
    assert gates.family == config.gate.family
    policy: Any = {"policy": "gate", "tokens_per_head": 64, "gates": gates}
    with retain.attach(frozen.model):
        cache = retain.Cache(frozen.model, **policy)
        cache.prefill(torch.arange(2, 202)[None])
    assert cache.entries_held == 4 * 2 * 64 and cache.report().total.entries_evicted == 4 * 2 * (200 - 64)


def test_the_gates_that_are_trained_are_those_that_are_compared() -> None:
    config = load(ROOT / "configs" / "distill" / "reference.yaml", DistillConfig)
    compared, demo = (
        yaml.safe_load((ROOT / "configs" / "compare" / f"{name}.yaml").read_text())
        for name in ("reference", "demo")
    )
    assert config.model == f"reference:{config.seed}" and demo.get("seeds", [0]) == [config.seed]
    assert config.output == compared["gates"].format(seed=config.seed)
    assert f"output={demo['gates']} overwrite=true" in (ROOT / "Makefile").read_text()


def test_processes_that_would_train_alone_or_share_nothing_are_refused(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="batch_documents=4 must be a multiple of the 3 processes"):
        check(make_config(), 3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match="started 2 processes, and accelerate sees 1: .*ACCELERATE_USE_CPU=true"
    ):
        distill(make_config())


@pytest.mark.parametrize(
    ("words", "path", "changes"),
    [
        (
            ["m", "d.jsonl", "seed=3", "--dry-run", "overwrite=true"],
            "laptop.yaml",
            ["seed=3", "overwrite=true"],
        ),
        (["o/m", "o/data"], "laptop.yaml", ["data.source=hub"]),
        (["o/m", "folder"], "laptop.yaml", ["data.source=hub", 'data.path="folder"']),
        (["reference:0", "reference"], None, ['model="reference:0"', 'output="runs/reference-0"']),
        (["--config", "c.yaml", "seed=3"], "c.yaml", ["seed=3"]),
    ],
)
def test_a_model_and_data_are_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], path: str | None, changes: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.parquet").write_bytes(b"PAR1")
    found, overrides = recipe_of(distill_parser().parse_args(words))
    assert (found and found.name) == path and {*changes} <= {*overrides}
    if path != "c.yaml":
        config = load(found, DistillConfig, overrides)
        check(config, 1)


def test_documents_of_two_kinds_are_refused(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.jsonl"):
        (tmp_path / name).write_text("{}")
    for data in (tmp_path, tmp_path / "a.parquet"):
        with pytest.raises(ValueError, match="a folder of one kind of files"):
            recipe_of(distill_parser().parse_args(["m", str(data)]))


def test_help_lists_every_key_with_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    lines = [line for line in said.partition("keys (")[2].splitlines()[1:] if line]
    assert len(lines) > 60 and all(re.match(r"  [\w.]+ \(.+; .+\): \S.*\.$", line) for line in lines)
    assert "  training.lr (float >= 1e-30; 0.005): Peak learning rate of AdamW." in lines


@pytest.mark.parametrize("words", [[], ["model"], ["m", "d", "e"], ["m", "d", "--config", "c.yaml"]])
def test_a_request_without_a_recipe_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"wanted --config YAML, or MODEL and DATA; got"):
        main(words)
