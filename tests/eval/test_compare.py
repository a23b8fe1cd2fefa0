"""A comparison from its config to its report: what it writes, how it goes on, and what it refuses."""

import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from retain.config import load, to_mapping
from retain.eval import cli
from retain.eval import compare as entry
from retain.eval.compare import ALONE, compare, measure_all
from retain.eval.config import CompareConfig
from retain.eval.run.table import MANIFEST, RESULTS, key_of, read_manifest, read_table
from retain.process.lock import LOCK_FILE
from tests.eval.small import save_small_gates, small
from tests.launch import ROOT, launch_environment
from tests.refused import refused


def table_of(folder):
    """Lines of a run by key, without its name and times."""
    return {key: {**line, "run": "", "seconds": 0} for key, line in read_table(folder).items()}


@pytest.fixture(scope="module")
def grid(gated):
    """Policies of all kinds, at two times of eviction."""
    how = {"policies": ("snapkv", "gate", "oracle"), "when": ("prefill", "decode"), "every": 2}
    return small(gated, run="whole", question=("unknown", "known"), **how)


@pytest.fixture(scope="module")
def whole(grid):
    """Folder of a comparison that nothing happened to."""
    compare(grid)
    return grid.folder


def test_a_run_leaves_a_table_a_manifest_and_a_report(grid, whole):
    lines, manifest = read_table(whole), read_manifest(whole)
    assert len(lines) == 2 * 2 * (2 * 4 + 3)  # controls are measured behind the prompt alone
    assert {line["identity"] for line in lines.values()} and all(
        line["score"] <= 1 for line in lines.values()
    )
    assert manifest["config"]["run"] == "whole" and manifest["finished"] and manifest["processes"] == 1
    assert manifest["rows"] == {task: {"0": [0, 1]} for task in grid.tasks}
    assert set(manifest["gates"]) == {grid.gates}
    assert manifest["command"].startswith("retain compare reference:0")
    assert sorted(path.name for path in whole.iterdir()) == [
        *("manifest.json", "report.html", "report.md", "results.jsonl", "scores.png")
    ]


def test_a_finished_run_is_only_reported_again(grid, whole, monkeypatch):
    before, lines = read_manifest(whole), (whole / RESULTS).read_bytes()
    monkeypatch.setattr(entry, "measure", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(entry, "now", lambda: "later")
    assert "snapkv" in compare(replace(grid, resamples=300)).answer
    assert read_manifest(whole) == before | {"config": {**before["config"], "resamples": 300}}
    assert (whole / RESULTS).read_bytes() == lines


def test_a_torn_table_goes_on_to_the_same_lines(grid, whole, tmp_path):
    broken = replace(grid, run="whole", results=str(tmp_path))
    broken.folder.mkdir(parents=True)
    (broken.folder / MANIFEST).write_text((whole / MANIFEST).read_text())
    lines = (whole / RESULTS).read_text().splitlines(keepends=True)
    # Half of a unit, a line that is no object, and half a line: what a power cut leaves.
    (broken.folder / RESULTS).write_text("".join(lines[:13]) + "12\n[1]\n" + lines[13][:40])
    compare(broken)
    assert table_of(broken.folder) == table_of(whole)
    found = (broken.folder / RESULTS).read_text().splitlines(keepends=True)
    assert len(found) == len(lines) and found[:13] == lines[:13]


def test_policies_budgets_tasks_and_items_are_added_to_a_run(gated):
    config = small(gated, run="growing")
    compare(config)
    before = table_of(config.folder)
    more = {"policies": ("snapkv", "recency", "random"), "keep_ratios": (0.5, 0.6), "items_per_task": 3}
    grown = replace(config, **more, tasks=(*config.tasks, "reference/common"))
    compare(grown)
    after = table_of(config.folder)
    assert {key: after[key] for key in before} == before and len(after) == 3 * 3 * 7
    identity = read_manifest(config.folder)["identity"]
    assert {*identity["policies"]} == {"random", "snapkv", "recency"} and len(identity["tasks"]) == 3
    compare(replace(grown, run="once"))  # all at once
    assert table_of(grown.folder.parent / "once") == after


def test_lines_of_another_identity_are_refused_by_what_differs(gated, tmp_path):
    config = small(
        tmp_path, policies=("mine", "gate"), variants={"mine": ("snapkv",)}, tasks=("reference/lists",)
    )
    save_small_gates(tmp_path / "gates")
    compare(config)
    lines = (config.folder / RESULTS).read_bytes()

    def says(what, **changes):
        refused(rf"another identity; these differ: {what}", compare, replace(config, **changes))

    says(r"settings\.context_tokens \(150 there, 170 now\)", context_tokens=170)
    says(r"policies\.mine\.policy\.protection\.sinks", variants={"mine": ("snapkv", "protection.sinks=3")})
    says(r"tasks\.reference/lists\.settings", task_settings={"reference/lists": {"metric": "match_all"}})
    says(
        r"tasks\.reference/lists\.settings",
        first_item=2,
        task_settings={"reference": {"metric": "match_all"}},
    )
    says(r"settings\.chat \(True there, False now\)", first_item=2, chat=False)
    (tmp_path / "gates").rename(tmp_path / "moved")
    assert compare(replace(config, gates=str(tmp_path / "moved"), policies=("gate", "mine")))
    save_small_gates(tmp_path / "gates", seed=1)
    says(r"policies\.gate\.gates\.sha256")
    assert (config.folder / RESULTS).read_bytes() == lines
    for text in ("{", "[]"):
        (config.folder / MANIFEST).write_text(text)
        refused(r"manifest\.json cannot be read.*Restore it from a copy", compare, config)
    (config.folder / MANIFEST).unlink()
    refused("holds no run", compare, config)


def test_items_that_are_others_than_before_are_refused(tmp_path):
    path = tmp_path / "mine.jsonl"
    row = {"context": "The sea is calm. " * 20, "question": "How is the sea?", "answers": ["calm"]}
    config = small(tmp_path, tasks=(str(path),), policies=("recency",))
    path.write_text(json.dumps(row))
    compare(config)
    path.write_text(json.dumps(row | {"question": "How was the sea?"}))
    refused("differ: the rows themselves", compare, config)


def test_weights_of_heads_are_part_of_the_identity(tmp_path):
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({str(layer): [1.0, 0.25] for layer in range(4)}))
    variants = {"mine": ("headkv", f"allocation.weights={path}")}
    config = small(tmp_path, policies=("mine", "snapkv"), variants=variants, items_per_task=1)
    compare(config)
    path.write_text(json.dumps({str(layer): [1.0, 0.5] for layer in range(4)}))
    refused(r"policies\.mine\.policy\.allocation\.weights\.0", compare, config)
    path.unlink()
    refused("policy 'mine' with when=prefill: head weights .* do not exist", compare, config)


def test_memory_that_runs_out_stops_the_run_and_it_goes_on(gated, monkeypatch):
    config, measured, measure = small(gated, run="tight"), [], entry.measure

    def run(config, loaded, unit, done):
        measured.append(unit.name)
        if len(measured) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(config, loaded, unit, done)

    monkeypatch.setattr(entry, "measure", run)
    refused("out of memory in item 0 of reference/lists.*lower max_sequences", compare, config)
    compare(replace(config, max_sequences=1))
    assert measured[2] == measured[3] and len({*measured}) == 4  # no line is measured twice
    assert len(read_table(config.folder)) == 2 * 2 * 3


def test_the_command_ends_with_its_answer_and_writes_its_config(gated, tmp_path, capsys):
    config = small(gated, run="typed", policies=("recency",), items_per_task=1, results=str(tmp_path))
    (tmp_path / "compare.yaml").write_text(json.dumps(to_mapping(config)))
    typed = ["--config", str(tmp_path / "compare.yaml"), "run=shown"]
    assert cli.main(["compare", *typed]) == 0
    said = capsys.readouterr().out
    assert "recency" in said and said.endswith(f"Report: {tmp_path / 'shown' / 'report.html'}\n")
    manifest = read_manifest(tmp_path / "shown")
    assert manifest["command"].split() == ["python", "-m", "retain.eval.compare", *typed]
    save_again = tmp_path / "again.yaml"
    save_again.write_text(json.dumps(manifest["config"]))
    assert load(save_again, CompareConfig) == replace(config, run="shown")


def test_a_comparison_needs_no_file(tmp_path, capsys):
    typed = "reference:0 --policies random,recency --tasks reference/single --keep-ratios 0.5 --items 1"
    more = ["--context-tokens", "150", f"results={tmp_path}", "resamples=200"]
    assert cli.main(["compare", *typed.split(), *more]) == 0
    assert len(read_table(tmp_path / "reference-0")) == 3
    assert cli.main(["compare", "reference:0", "--policies", "random", f"results={tmp_path}"]) == 2
    assert "missing key 'tasks'" in capsys.readouterr().err


def test_processes_share_out_the_units(grid, whole, tmp_path):
    loaded, contexts = entry.load_checked(grid)
    rows = [context for of_task in contexts.values() for context in of_task]
    units = [*entry.units_of(grid, rows, entry.manifest_of(grid, loaded, contexts, "")["identity"])]
    shares = []
    for rank in (0, 1):
        share = replace(grid, results=str(tmp_path / str(rank)))
        share.folder.mkdir(parents=True)
        measure_all(
            share,
            loaded,
            units,
            SimpleNamespace(**{**vars(ALONE), "process_index": rank, "num_processes": 2}),
        )
        shares.append(table_of(share.folder))
    assert not {*shares[0]} & {*shares[1]} and all(shares)
    assert shares[0] | shares[1] == table_of(whole)


def command_of(config, tmp_path):
    """A file of this config, and the arguments that ask for it."""
    (path := tmp_path / "compare.yaml").write_text(json.dumps(to_mapping(config)))
    return ["eval/compare.py", "--config", str(path)]


@pytest.mark.slow
def test_two_processes_of_a_launcher_write_what_one_does(grid, whole, tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
    config = replace(grid, results=str(tmp_path))
    command = [*launch, "configs/accelerate/two_cpu_processes.yaml", *command_of(config, tmp_path)]
    how = {"env": launch_environment(ACCELERATE_USE_CPU="true"), "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, timeout=300, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Report: ") == 1  # of the first process alone
    assert table_of(config.folder) == table_of(whole)
    assert read_manifest(config.folder)["processes"] == 2  # launchers have been seen to start one


@pytest.mark.slow
def test_killed_at_random_points_it_goes_on_to_the_same_table(grid, whole, tmp_path):
    config, draw = replace(grid, results=str(tmp_path)), random.Random(7)
    command = [sys.executable, *command_of(config, tmp_path)]
    path, written = config.folder / RESULTS, []
    for _ in range(3):
        wanted = (path.stat().st_size if path.exists() else 0) + draw.randrange(1, 1500)
        with subprocess.Popen(command, cwd=ROOT, env=launch_environment(), stderr=subprocess.DEVNULL) as run:
            while run.poll() is None and not (path.exists() and path.stat().st_size >= wanted):
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.05))
            run.kill()
        written.append(len(read_table(config.folder)))
    assert written == sorted(written) and 0 < written[0] < len(table_of(whole))
    subprocess.run(command, cwd=ROOT, env=launch_environment(), check=True, stderr=subprocess.DEVNULL)
    assert table_of(config.folder) == table_of(whole) and not (config.folder / LOCK_FILE).exists()
    keys = [key_of(json.loads(line)) for line in path.read_text().splitlines()]
    assert len(keys) == len({*keys}) == len(table_of(whole))
