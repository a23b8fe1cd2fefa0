"""Units of work on a tiny random model: equal memory, answers as of one cache at a time, resuming."""

import gc
import json
import os
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from retain.config import load, save
from retain.eval import cli
from retain.eval import compare as entry
from retain.eval.compare import compare, describe_run
from retain.eval.config import CompareConfig, Line, fits_table
from retain.eval.run import evaluated_model as models
from retain.eval.run import runner
from retain.eval.run.checks import check
from retain.eval.run.evaluated_model import EvaluatedModels, Unit, load_evaluated, one_by_one, plan
from retain.eval.run.processes import Processes
from retain.eval.run.results_store import ITEMS, MANIFEST, REFERENCES, open_run, read_references, read_rows
from retain.eval.run.runner import run_all
from retain.head_weights import format_weights
from tests.eval.stub import STUB, TASKS, save_stub_gates, stub_config, stub_item
from tests.refused import refused


class KilledError(Exception):
    pass


def run_unit(config, suite, evaluated, unit):
    return runner.run_unit(config, suite, evaluated, unit).rows


def keys(config):
    return [unit.key for unit in plan(config, STUB)]


def opened(config):
    """A run whose folder is there, before its first unit."""
    open_run(config.folder, describe_run(config, STUB), keys(config))
    return config


def killed(config, behind):
    """A run that dies behind so many units."""
    written = []

    def kill(unit):
        written.append(unit)
        if len(written) == behind:
            raise KilledError

    with pytest.raises(KilledError):
        run_all(opened(config), STUB, on_unit=kill)


def manifest_of(config):
    return json.loads((config.folder / MANIFEST).read_text())


@pytest.mark.always
def test_a_killed_run_goes_on_to_the_same_report(gated):
    config = stub_config(gated, items_per_task=3, policies=("snapkv", "gate", "token_identity"))
    whole = compare(config, STUB)
    broken = replace(config, results=str(gated / "broken"))
    killed(broken, 3)
    items = broken.folder / ITEMS
    torn = items.read_text().splitlines(keepends=True)
    # Half of the last unit, and half a line: what a power cut leaves.
    items.write_text("".join(torn[:-3]) + torn[-3][:40])
    resumed = compare(broken, STUB)
    units, wanted = (sorted(row["unit"] for row in read_rows(own.folder)) for own in (broken, config))
    assert units == wanted and len(units) == 3 * 3 * 2 * (1 + 3 * 2)
    stable = [
        [line for line in path.read_text().splitlines() if not line.startswith("Code ")]
        for path in (resumed, whole)
    ]
    assert stable[0] == stable[1]


def test_a_finished_run_is_only_reported_again(gated, monkeypatch):
    config = stub_config(gated, policies=("recency",), keep_ratios=(0.6,))
    compare(config, STUB)
    before = manifest_of(config)
    monkeypatch.setattr(entry, "now", lambda: "later")
    monkeypatch.setattr(entry, "code_state", lambda _: {"commit": "another", "clean": False})
    monkeypatch.setattr(runner, "run_unit", lambda *_: pytest.fail("a finished unit was run again"))
    report = compare(replace(config, resamples=300), STUB)
    assert "300 resamples" in report.read_text()
    assert manifest_of(config) == before | {"config": {**before["config"], "resamples": 300}}


def test_the_command_shows_the_table_and_ends_with_the_report(gated, monkeypatch, capsys):
    monkeypatch.setattr(entry, "suite_of", lambda _: STUB)
    save(config := stub_config(gated, policies=("recency",), keep_ratios=(0.6,)), gated / "compare.yaml")
    typed = ["--config", str(gated / "compare.yaml"), "run=shown"]
    assert cli.main(["compare", *typed]) == 0  # whatever this process itself was given
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| recency |") for line in lines)
    folder, shown = gated / "results" / "shown", replace(config, run="shown")
    assert lines[-1] == f"Report: {folder / 'report.md'}, {folder / 'report.html'}"
    assert manifest_of(shown)["command"].split() == ["python", "-m", "retain.eval.compare", *typed]
    assert load(folder / "compare.yaml", CompareConfig) == shown
    # Of a program that typed nothing, the config that the run left says it all.
    assert describe_run(config, STUB)["command"].endswith(f"--config {config.folder / 'compare.yaml'}")


def test_all_of_it_end_to_end(gated):
    config = stub_config(gated, seeds=(0, 1))
    save_stub_gates(gated, seeds=(1,))
    report = compare(config, STUB)
    assert report == config.folder / "report.md"
    assert (config.folder / "scores.png").read_bytes().startswith(b"\x89PNG")
    manifest, text = manifest_of(config), report.read_text()
    assert manifest["config"]["seeds"] == [0, 1] and manifest["finished"]
    assert set(manifest["identity"]["models"]) == set(manifest["identity"]["gates"]) == {"0", "1"}
    names = ("random", "token_identity", "fused", "oracle", "full", "held-out, seed 1")
    assert all(name in text for name in names)


def test_at_a_temperature_all_policies_draw_alike(gated):
    """A policy and its double, and a second run, give the same answers; the likeliest tokens are others."""
    options = {"policies": ("snapkv", "double"), "variants": {"double": ("snapkv",)}, "keep_ratios": (0.45,)}
    answers = {}
    for name, temperature in (("greedy", 0.0), ("once", 4.0), ("again", 4.0)):
        config = stub_config(gated, run=name, temperature=temperature, **options)
        run_all(opened(config), STUB)
        for row in read_rows(config.folder):
            place = (row["task"], row["item"], row["question"], row["regime"], row["policy"])
            answers[name, row["policy"], *place[:-1]] = row["tokens"]
    own = {key[1:]: value for key, value in answers.items() if key[0] == "once"}
    assert own == {key[1:]: value for key, value in answers.items() if key[0] == "again"}
    assert own != {key[1:]: value for key, value in answers.items() if key[0] == "greedy"}
    for (policy, *place), value in own.items():
        if policy == "double":
            assert value == own["snapkv", *place]


def test_two_processes_write_what_one_does(gated):
    options = {"policies": ("snapkv", "token_identity"), "keep_ratios": (0.45,), "unit_items": 1}
    found = []
    for workers in (0, 2):
        config = stub_config(gated, run=f"workers{workers}", workers=workers, **options)
        assert run_all(opened(config), STUB) == 6
        found.append(sorted(json.dumps(row | {"run": ""}) for row in read_rows(config.folder)))
    assert found[0] == found[1] and len(found[0]) == 6 * 2 * 3


def test_weights_of_heads_are_read_from_a_file(gated, tmp_path):
    path = tmp_path / "heads.json"
    path.write_text(format_weights(dict.fromkeys(range(3), (1.0, 0.25))))
    variants = {
        name: (name.partition("_")[0], f"allocation.weights={path}", *changes)
        for name, changes in (("duoattention_mine", ("protection.recent=8",)), ("headkv_mine", ()))
    }
    config = stub_config(gated, policies=(*variants, "snapkv"), variants=variants)
    evaluated = load_evaluated(config, STUB, 0)
    told = {name: evaluated.trained(Line(name, name)) for name in config.policies}
    assert told == {**dict.fromkeys(variants, True), "snapkv": False}
    rows = run_unit(config, STUB, evaluated, Unit(0, "pair", 0, 2))
    assert len({row.kept_entries for row in rows if row.budget == 0.45}) == 2  # one a regime

    def identity():
        return describe_run(config, STUB)["identity"]["policies"]

    before = identity()
    assert before["headkv_mine"]["allocation"]["weights"] == dict.fromkeys("012", [1.0, 0.25])
    path.write_text(format_weights(dict.fromkeys(range(3), (1.0, 0.5))))
    changed = identity()
    assert [name for name in changed if changed[name] != before[name]] == [*variants]
    path.unlink()
    refused(r"policy 'headkv_mine': head weights .* do not exist: pass", check, config, STUB)


def test_how_many_items_are_read_together_is_lowered_when_memory_runs_out(gated, monkeypatch):
    counts = dict.fromkeys(("items_per_task", "unit_items", "batch_items"), 3)
    config = stub_config(gated, policies=("random", "snapkv"), tasks=("odd", "pair"), **counts)
    read, run_items = [], runner.run_items

    def run(config, suite, evaluated, unit, items):
        read.append(len(items))
        if unit.task == "odd" and len(items) > 1:
            with models.naming(unit, "the prefill"):
                raise torch.OutOfMemoryError("tried to allocate")
        return run_items(config, suite, evaluated, unit, items)

    monkeypatch.setattr(runner, "run_items", run)
    refused(r"out of memory in seed0/odd/0-3.*Lower batch_items or", compare, config, STUB)
    compare(replace(config, batch_items=1), STUB)
    assert read == [3, 3, 1, 1, 1]  # the other unit was done, and is not done again
    monkeypatch.undo()
    compare(replace(config, run="together"), STUB)
    lowered, together = (
        [row | {"run": ""} for row in read_rows(gated / "results" / run)] for run in ("stub", "together")
    )
    assert lowered == together
    manifest = manifest_of(config)
    assert manifest["config"]["batch_items"] == 1 and "batch_items" not in manifest["identity"]["config"]


@pytest.fixture
def loaded(monkeypatch):
    """A suite whose models are counted: how many were loaded, and how many were there at once at most."""
    living: weakref.WeakSet = weakref.WeakSet()
    told = {"loads": 0, "at_once": 0}

    def load(seed):
        gc.collect()
        model = STUB.load_model(0 if told.get("one") else seed)
        living.add(model)
        told["loads"] += 1
        told["at_once"] = max(told["at_once"], len(living))
        return model

    return replace(STUB, load_model=load), told


def test_models_are_loaded_one_at_a_time(gated, loaded):
    suite, told = loaded
    save_stub_gates(gated, (1,))
    config = stub_config(gated, seeds=(0, 1), policies=("gate",), tasks=("pair",), keep_ratios=(0.6,))
    assert one_by_one(config, suite, lambda seed, _: seed) == {0: 0, 1: 1}
    compare(config, suite)
    assert told == {"loads": 8, "at_once": 1}  # for gates, for the manifest, for the run


def test_one_model_for_all_seeds_is_kept_with_its_gates(gated, loaded):
    suite, told = loaded
    told["one"] = True
    suite = replace(suite, seeds=None)
    config = stub_config(gated, seeds=(0, 1), gates=str(gated / "gates-seed0"), policies=("gate",))
    held = EvaluatedModels(config, suite)
    first, again, second = (held.of(seed) for seed in (0, 0, 1))
    assert first is again and (second.seed, second.model, second.sets) == (1, first.model, first.sets)
    assert told["loads"] == 1
    moved = EvaluatedModels(replace(config, gates=str(gated / "gates-seed{seed}")), suite)
    own = moved.of(0).sets["gates"]
    (gated / "gates-seed1").symlink_to(gated / "gates-seed0")
    assert moved.of(1).sets["gates"] is not own  # of another folder


def test_nothing_is_fitted_where_nothing_is_to_be(gated, monkeypatch):
    assert not fits_table(stub_config(gated, policies=("recency", "oracle", "duoattention")))
    assert fits_table(stub_config(gated, policies=("token_identity",)))
    launched = Processes(rank=0, count=2)
    monkeypatch.setattr(runner, "load_evaluated", lambda *_: pytest.fail("loaded to be fitted"))
    plain = stub_config(gated, policies=("recency",), tasks=("pair",), keep_ratios=(0.6,))
    plain.folder.mkdir(parents=True)
    assert run_all(plain, STUB, processes=launched) == 1


def test_a_row_says_whether_its_items_are_its_seeds_own(gated):
    tasks = {**TASKS, "copy": replace(TASKS["copy"], seeded=False)}
    config = stub_config(gated, policies=("recency",), keep_ratios=(0.6,))
    compare(config, replace(STUB, tasks=tasks))
    told = {(row["task"], row["seeded"]) for row in read_rows(config.folder)}
    assert told == {("copy", False), ("pair", True), ("odd", True)}


def test_where_items_begin_is_part_of_what_the_run_is(gated):
    """Rows are those of the items behind, under their own indices; a run from 0 on is what it was before
    that could be said."""
    first = stub_config(gated, policies=("snapkv", "random"), tasks=("odd",))
    both = replace(first, items_per_task=4, results=str(gated / "both"))
    behind = replace(first, first_item=2, results=str(gated / "behind"))
    names, measured = ("item", "policy", "regime", "budget", "tokens_sha", "kept_entries"), []
    for config in (both, behind):
        compare(config, STUB)
        measured.append({tuple(row[name] for name in names) for row in read_rows(config.folder)})
    assert {key[0] for key in measured[1]} == {2, 3}
    assert measured[1] == {key for key in measured[0] if key[0] >= 2}
    of_first, of_behind = (describe_run(own, STUB) for own in (first, behind))
    assert "first_item" not in of_first["identity"]["config"] and of_first["config"]["first_item"] == 0
    assert of_behind["identity"]["config"]["first_item"] == 2
    assert of_first["identity"]["items"] != of_behind["identity"]["items"]
    refused(r"config.first_item \(2 there, None now\)", compare, replace(behind, first_item=0), STUB)


def test_references_that_are_missing_or_torn_are_written_again(gated):
    config = stub_config(gated, policies=("recency",), keep_ratios=(0.6,), tasks=("pair", "copy"))
    compare(config, STUB)
    path, whole = config.folder / REFERENCES, read_references(config.folder)
    lines = path.read_text().splitlines(keepends=True)
    assert len(whole) == len(lines) == 4
    for left in (lines[0] + lines[1][:30], None):
        path.unlink() if left is None else path.write_text(left)
        compare(config, STUB)
        assert read_references(config.folder) == whole


def test_items_that_are_others_than_before_stop_a_run_that_goes_on(gated):
    config = stub_config(gated, policies=("recency",), keep_ratios=(0.6,), tasks=("pair",))
    config = replace(config, regimes=("context_only", "decode"))
    killed(config, 1)
    before = (config.folder / ITEMS).read_bytes()

    def item(*place):
        own = stub_item(*place)
        return own if place[2] == 0 else replace(own, context_ids=own.context_ids[::-1])

    says = r"seed0/pair/0-2/decode: question 0 of item 1 is not the one .*context_sha differ"
    refused(says, run_all, config, replace(STUB, item=item))
    assert (config.folder / ITEMS).read_bytes() == before
    assert run_all(config, STUB) == 1


def test_a_worker_ends_with_the_run_that_started_it():
    """Also where that was killed and could tell nobody."""
    script = """
import os, subprocess, sys, time
waits = 'from retain.eval.run.processes import end_with; '
waits += f'print(1, flush=True); end_with({os.getpid()})'
worker = subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE, text=True)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        os.kill(worker, 0)
        run.kill()
    until, stat = time.monotonic() + 60, Path(f"/proc/{worker}/stat")
    while stat.exists() and "Z" not in stat.read_text().split()[2]:
        assert time.monotonic() < until, "the worker is still there"
        time.sleep(0.2)


def test_what_the_run_is(gated):
    """The weights of its gates and not their folder, its variants and not their names, its items."""

    def identity(suite=STUB, **changes):
        return describe_run(stub_config(gated, **changes), suite)["identity"]

    before = identity()
    (gated / "gates-seed0").rename(gated / "moved")
    assert identity(gates=str(gated / "moved")) == before
    save_stub_gates(gated)

    def of_variant(*variant, name="mine"):
        return identity(policies=(name,), variants={name: ("snapkv", *variant)})

    mine = of_variant()
    assert of_variant("protection.sinks=4") == mine != of_variant("protection.sinks=3")
    assert of_variant(name="other") != mine

    def other(**changes):
        now = identity(replace(STUB, item=lambda *place: replace(stub_item(*place), **changes)))
        return {name for name in now if now[name] != before[name]}

    assert other() == set()
    assert other(context_ids=(5,) * 100) == other(end_ids=(3,)) == {"items"}
    changes = {"ruler/qa_1": {"path": "there"}, "niah": {"path": "there", "length": 3, "words": 2}}
    text = replace(stub_config(gated).text, changes=changes, device_map=None)
    assert identity(text=text)["config"]["text"]["changes"] == {"niah": {"length": 3, "words": 2}}
