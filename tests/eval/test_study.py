"""A study end to end on the stub suite: run, reported, resumed; and what its command line says."""

import html
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retain.config import load, save
from retain.eval import cli
from retain.eval.config import CompareConfig, GateSource
from retain.eval.diagnose import command as diagnose
from retain.eval.report import kept
from retain.eval.run.results_store import ITEMS, read_manifest, read_rows
from retain.eval.study import command as entry
from retain.eval.study.command import main, run_study
from retain.eval.study.plan import Level, StudyConfig, Training, Winner, plan_of
from tests.eval.stub import STUB, save_stub_gates, stub_config


def make_study(folder: Path, **changes: Any) -> StudyConfig:
    absent = GateSource(str(folder / "absent-seed{seed}"))
    places = {"tasks": ("copy", "odd"), "keep_ratios": (0.5, 0.6), "regimes": ("context_only",)}
    sets = {"wrong": GateSource(control="other_layer"), "absent": absent}
    compare = stub_config(folder, **places, gate_sets=sets)
    study = StudyConfig(
        compare=compare,
        winner=Winner(("fused", "fusion=max", "draw=null")),
        factors={
            "fusion": {
                "max": Level(("fusion=max",)),
                "observed": Level(("fusion=observed", "learned=false"), absent=True),
            },
            "layer": {"own": Level(gates="gates"), "other": Level(gates="wrong", absent=True)},
        },
        references=("recency", "oracle"),
    )
    return replace(study, **changes)


def test_a_study_is_run_and_reported_from_its_rows(tmp_path):
    save_stub_gates(tmp_path)
    study = make_study(tmp_path)
    path = run_study(study, STUB)
    folder = tmp_path / "results" / "stub"
    assert path == folder / "study.md"
    rows = read_rows(folder)
    lines = {row["policy"] for row in rows}
    assert lines == {"full", "winner", "fusion=observed", "layer=other", "recency", "oracle"}
    found = json.loads((folder / "study.json").read_text())
    assert found["lines"]["layer=other"] == {
        "policy": ["fused", "fusion=max", "draw=null"],
        "gates": "wrong",
        "levels": {"layer": "other"},
    }
    assert {one["line"] for one in found["entries"]} == lines - {"full"}
    assert {one["factor"] for one in found["ingredients"]} == {"fusion", "layer"}
    assert load(folder / "study.yaml", StudyConfig) == study
    assert (folder / "study.png").read_bytes().startswith(b"\x89PNG")
    text = path.read_text()
    headings = ("# Study `stub`", "## Ingredients", "## fusion", "### layer, context_only", "## references")
    assert all(heading in text for heading in headings)


def test_a_finished_study_is_only_reported_again(tmp_path):
    save_stub_gates(tmp_path)
    study = make_study(tmp_path, references=())
    path = run_study(study, STUB)
    before, rows = path.read_text(), (path.parent / ITEMS).read_bytes()
    path.unlink()
    assert run_study(study, STUB).read_text() == before
    assert (path.parent / ITEMS).read_bytes() == rows
    # How levels are called and what is absent is no part of what was measured; a new level is.
    factors = {"fusion": study.factors["fusion"], "layer": {"wrong": Level(gates="wrong")}}
    with pytest.raises(ValueError, match="holds the items of another configuration"):
        run_study(replace(study, factors=factors), STUB)
    text = run_study(replace(study, compare=replace(study.compare, margin_points=7.0)), STUB).read_text()
    assert "within ±7 points" in text


def test_missing_gates_stop_a_study_before_anything_is_written(tmp_path):
    save_stub_gates(tmp_path)
    study = make_study(tmp_path, winner=Winner(("fused", "fusion=max", "draw=null"), "absent"))
    with pytest.raises(ValueError, match="(?s)This study cannot start.*no gates in .*absent-seed0"):
        run_study(study, STUB)
    assert not (tmp_path / "results").exists()


def test_the_command_runs_what_the_file_says(tmp_path, monkeypatch, capsys):
    save_stub_gates(tmp_path)
    save(make_study(tmp_path, references=()), tmp_path / "study.yaml")
    monkeypatch.setattr(entry, "suite_of", lambda config: STUB)
    # As `retain study` hands it on: the process's own arguments are others.
    monkeypatch.setattr(sys, "argv", ["retain", "study", "--config", "another.yaml"])
    typed = ["--config", str(tmp_path / "study.yaml"), "compare.run=other"]
    assert cli.main(["study", *typed]) == 0
    said = capsys.readouterr().out
    assert "| ingredient | tasks |" in said and str(tmp_path / "results" / "other" / "study.md") in said
    assert (tmp_path / "results" / "other" / "study.md").is_file()
    command = read_manifest(tmp_path / "results" / "other")["command"]
    assert shlex.split(command) == ["python", "-m", "retain.eval.study", *typed]
    assert said.endswith(f"; again: {command}\n")


def test_the_page_of_a_study_names_commands_that_work(tmp_path, monkeypatch):
    """A study's own config is none of a comparison: the comparison it came to lies beside its rows."""
    save_stub_gates(tmp_path)
    study = make_study(tmp_path, references=())
    folder = run_study(study, STUB, command="python -m retain.eval.study --config study.yaml").parent
    assert load(folder / "compare.yaml", CompareConfig) == plan_of(study, STUB).compare
    page = (folder / "report.html").read_text()
    shown = [html.unescape(one) for one in re.findall("<code>(python [^<]*)</code>", page)]
    commands = {part[2]: part[3:] for part in map(shlex.split, shown) if part[1] == "-m"}
    assert commands["retain.eval.report.kept"] == ["--config", str(folder / "compare.yaml")]
    monkeypatch.setattr(kept, "suite_of", lambda config: STUB)
    assert kept.main(commands["retain.eval.report.kept"]) == 0 and (folder / "kept.json").is_file()
    # All its policies are variants: the winner is what is diagnosed.
    given = diagnose.parser().parse_args(commands["retain.eval.diagnose"])
    assert given.policies == ["fused,fusion=max,draw=null"] and given.gates == str(tmp_path / "gates-seed0")
    assert [diagnose.policy_of(typed).fusion for typed in given.policies] == ["max"]
    assert commands["retain.eval.speed"] == ["--what", "serving", "--output", str(folder / "speed.json")]


def test_the_command_prints_what_trains_the_gates(tmp_path, capsys):
    config = str(Path(__file__).parents[2] / "configs" / "distill" / "reference.yaml")
    train = {"gates": Training(config), "absent": Training(changes=("gate.settings={F: 16}",))}
    save(make_study(tmp_path, train=train), tmp_path / "study.yaml")
    command = ["--config", str(tmp_path / "study.yaml"), "--train-commands", "--processes", "2"]
    assert main([*command, "compare.seeds=[0,1]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    launch = "accelerate launch --num_processes 2 train/distill.py --config"
    assert all(line.startswith(launch) for line in lines)
    assert lines[3].endswith(f"seed=1 output={tmp_path / 'absent-seed1'} 'gate.settings={{F: 16}}'")
    assert not (tmp_path / "results").exists()


def test_what_is_typed_wrong_is_said_in_one_line_and_status_two(tmp_path, capsys):
    save(make_study(tmp_path), tmp_path / "study.yaml")
    assert main(["--config", str(tmp_path / "study.yaml"), "factrs={}", "compare.keep_ratio=[0.5]"]) == 2
    said = capsys.readouterr().err
    assert "unknown key 'factrs' (did you mean 'factors'?)" in said
    assert "unknown key 'compare.keep_ratio' (did you mean 'keep_ratios'?)" in said
    assert main(["--config", str(tmp_path / "no.yaml")]) == 2
    assert "does not exist" in capsys.readouterr().err
