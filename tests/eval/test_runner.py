"""Units of work on a tiny random model: equal memory, answers as of one cache at a time, resuming."""

import gc
import itertools
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

from retain.budget.statement import Budget
from retain.config import load, save
from retain.eval import cli
from retain.eval import compare as entry
from retain.eval.compare import compare, describe_run
from retain.eval.config import CompareConfig, find_policy, fits_tables
from retain.eval.diagnose.head_classes import measure_head_classes
from retain.eval.run import evaluated_model as subjects
from retain.eval.run import runner, shared_prefill
from retain.eval.run.answers import read_back
from retain.eval.run.baselines import oracle
from retain.eval.run.evaluated_model import Subjects, Unit, item_seed, load_subject, one_by_one, plan
from retain.eval.run.processes import Processes
from retain.eval.run.results_store import ITEMS, MANIFEST, REFERENCES, open_run, read_references, read_rows
from retain.eval.run.runner import run_all
from retain.eval.run.shared_prefill import first_entries, observed_tokens, seen_tokens
from retain.head_classes import read_head_classes
from retain.hf.cache.cache import Cache
from retain.policy import decide_layers, score_entries
from retain.scores import Score
from tests.eval.stub import STUB, TASKS, save_stub_gates, stub_config, stub_item


def run_unit(config, suite, subject, unit):
    return runner.run_unit(config, suite, subject, unit).rows


def keys(config):
    return [unit.key for unit in plan(config, STUB)]


@pytest.fixture
def gated(tmp_path):
    save_stub_gates(tmp_path)
    return tmp_path


def test_every_policy_holds_the_same_entries_item_by_item(gated):
    config = stub_config(gated, regimes=("query_aware",))
    unit = Unit(0, "odd", 0, 2)
    subject = load_subject(config, STUB, 0)
    rows = run_unit(config, STUB, subject, unit)
    assert len(config.policies) == 10
    assert len(rows) == 2 * (1 + 10 * 2) and {row.unit_rows for row in rows} == {len(rows)}
    layers, heads = subject.model.config.num_hidden_layers, subject.model.config.num_key_value_heads
    for item, question in ((0, 3), (1, 4)):
        seen = 100 + question - 1
        for ratio in config.keep_ratios:
            held = {row.kept_entries for row in rows if (row.item, row.budget) == (item, ratio)}
            assert held == {layers * round(ratio * seen * heads)}
    for row in rows:
        entry = row.bytes_full // row.seen_entries
        assert row.bytes_held == row.kept_entries * entry and entry == 2 * 16 * 4
        assert row.kept_entries < row.seen_entries or row.policy == "full"


@pytest.mark.parametrize("regime", ["context_only", "query_aware"])
@pytest.mark.parametrize("task", ["copy", "odd"])
def test_answers_equal_one_cache_one_item_at_a_time(gated, task, regime):
    policies = ("snapkv", "fused", "random", "defensivekv", "cake", "lava", "joint")
    variants = {"joint": ("layer_defensivekv", "protection.sinks=0")}
    config = stub_config(
        gated, policies=policies, variants=variants, keep_ratios=(0.45,), max_sequences=4, regimes=(regime,)
    )
    subject = load_subject(config, STUB, 0)
    rows = run_unit(config, STUB, subject, Unit(0, task, 0, 2))
    assert len({row.tokens for row in rows}) > 1, (
        "every answer is the same: this test would pass whatever happened"
    )
    for row in rows:
        item = stub_item(task, 0, row.item, 100)
        whole = (*item.context_ids, *item.question_ids)
        before = whole[: seen_tokens(item, regime)]
        options = {} if row.policy == "full" else {"keep_ratio": 0.45}
        seeds = [item_seed(0, task, row.item)]
        gates = subject.gates if row.policy == "fused" else None
        policy = "full" if row.policy == "full" else find_policy(config, row.policy)
        if regime == "context_only" or row.policy == "full":
            cache = Cache(subject.model, policy, gates=gates, seeds=seeds, **options)
            cache.prefill(torch.tensor([before]))
        else:
            cache = _evicted_after_looking(subject, policy, gates, seeds, before, whole)
        assert cache.bytes_held() == row.bytes_held
        ids = torch.tensor([whole])
        with torch.no_grad():
            out = subject.model.generate(
                ids, past_key_values=cache, max_new_tokens=item.generate, do_sample=False
            )
        assert tuple(out[0, ids.shape[1] :].tolist()) == row.tokens


def _evicted_after_looking(subject, policy, gates, seeds, before, whole):
    """Scores observe the whole prompt in one cache; another, which never saw its last token, evicts."""
    looking, cache = Cache(subject.model, policy=None), Cache(subject.model, policy=None)
    looking.prefill(torch.tensor([whole]), evict=False, hold_evidence=True)
    cache.prefill(torch.tensor([before]), evict=False, hold_evidence=True)
    scores = []
    for observed in looking.evidence:
        learned = None if gates is None else gates.score(observed)
        score = score_entries(policy, observed, learned=learned, seeds_B=seeds)
        # Only what is evicted from competes; the window is one entry shorter, as its last is not there.
        first_BHT = None if score.first_BHT is None else score.first_BHT[..., : len(before)]
        window = score.window - 1 if score.window else 0
        values_BHT = score.values_BHT[..., : len(before)]
        keys_BHT = None if score.draw_BHT is None else score.draw_BHT[..., : len(before)]
        scores.append(
            Score(values_BHT, score.unit, first_BHT, window, score.layer_weight_B, draw_BHT=keys_BHT)
        )
    made = decide_layers(policy, cache.evidence, Budget(keep_ratio=0.45), scores=scores)
    return cache.evict_with([one.keep_BHT for one in made])


def test_scores_and_tokens_are_those_of_the_item(gated):
    config = stub_config(gated, policies=("recency",), keep_ratios=(0.6,))
    rows = run_unit(config, STUB, load_subject(config, STUB, 0), Unit(0, "copy", 0, 2))
    for row in rows:
        item = stub_item("copy", 0, row.item, 100)
        assert len(row.tokens) == item.generate == 3
        assert (row.exact, row.partial) == item.score(row.tokens)
        assert (row.family, row.task) == ("seen", "copy")


def test_a_killed_run_goes_on_to_the_same_report(gated):
    config = stub_config(gated, items_per_task=3, policies=("snapkv", "gate", "token_identity"))
    whole, _ = compare(config, STUB)
    broken = stub_config(gated, items_per_task=3, policies=config.policies, results=str(gated / "broken"))
    open_run(broken.folder, describe_run(broken, STUB), keys(broken))

    class KilledError(Exception):
        pass

    written = []

    def kill(unit):
        written.append(unit.key)
        if len(written) == 3:
            raise KilledError

    with pytest.raises(KilledError):
        run_all(broken, STUB, on_unit=kill)
    items = broken.folder / ITEMS
    torn = items.read_text().splitlines(keepends=True)
    # Half of the last unit, and half a line: what a power cut leaves.
    items.write_text("".join(torn[:-3]) + torn[-3][:40])
    resumed, _ = compare(broken, STUB)
    units = [row["unit"] for row in read_rows(broken.folder)]
    assert sorted(units) == sorted(row["unit"] for row in read_rows(config.folder))
    assert len(units) == 3 * 3 * 2 * (1 + 3 * 2)

    def stable(path):
        return [line for line in path.read_text().splitlines() if not line.startswith("Code ")]

    assert stable(resumed) == stable(whole)


def test_a_finished_run_is_only_reported_again(gated, monkeypatch):
    config = stub_config(gated, policies=("recency",), keep_ratios=(0.6,))
    compare(config, STUB)
    before = json.loads((config.folder / MANIFEST).read_text())
    monkeypatch.setattr(entry, "now", lambda: "later")
    monkeypatch.setattr(entry, "code_state", lambda _: {"commit": "another", "clean": False})
    monkeypatch.setattr(runner, "run_unit", lambda *_: pytest.fail("a finished unit was run again"))
    report, _ = compare(stub_config(gated, policies=("recency",), keep_ratios=(0.6,), resamples=300), STUB)
    assert "300 resamples" in report.read_text()
    after = json.loads((config.folder / MANIFEST).read_text())
    assert after == before | {"config": {**before["config"], "resamples": 300}}


def test_the_command_shows_the_table_and_ends_with_the_report(gated, monkeypatch, capsys):
    monkeypatch.setattr(entry, "suite_of", lambda _: STUB)
    save(config := stub_config(gated, policies=("recency",), keep_ratios=(0.6,)), gated / "compare.yaml")
    typed = ["--config", str(gated / "compare.yaml"), "run=shown"]
    assert cli.main(["compare", *typed]) == 0  # whatever this process itself was given
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| recency |") for line in lines) and "Claims checked" in lines
    folder = gated / "results" / "shown"
    assert lines[-1] == f"Report: {folder / 'report.md'}, {folder / 'report.html'}"
    made = json.loads((folder / MANIFEST).read_text())
    assert made["command"].split() == ["python", "-m", "retain.eval.compare", *typed]
    assert load(folder / "compare.yaml", CompareConfig) == replace(config, run="shown")
    # Of a program that typed nothing, the config that the run left says it all.
    assert describe_run(config, STUB)["command"].endswith(f"--config {config.folder / 'compare.yaml'}")


def test_the_same_weights_elsewhere_are_the_same_run(gated):
    config = stub_config(gated)
    (gated / "gates-seed0").rename(gated / "moved")
    moved = replace(config, gates=str(gated / "moved"))
    save_stub_gates(gated)
    assert describe_run(config, STUB)["identity"] == describe_run(moved, STUB)["identity"]


def test_all_of_it_end_to_end(gated):
    config = stub_config(gated, seeds=(0, 1))
    save_stub_gates(gated, seeds=(1,))
    report, claims = compare(config, STUB)
    text = report.read_text()
    assert report == config.folder / "report.md"
    assert (config.folder / "scores.png").read_bytes().startswith(b"\x89PNG")
    manifest = json.loads((config.folder / "manifest.json").read_text())
    assert manifest["config"]["seeds"] == [0, 1] and manifest["finished"]
    assert set(manifest["identity"]["models"]) == set(manifest["identity"]["gates"]) == {"0", "1"}
    for name in (
        "random",
        "token_identity",
        "fused",
        "oracle",
        "full",
        "## Claims checked",
        "held-out, seed 1",
    ):
        assert name in text
    # keep_ratio 0.2 was not run, so no claim about it may be made.
    assert {claim.outcome for claim in claims} == {"not measured"}


def test_random_scores_do_not_depend_on_the_batch(gated):
    rows = {}
    for batch in (1, 3):
        config = stub_config(
            gated, items_per_task=3, policies=("random",), unit_items=batch, keep_ratios=(0.45,)
        )
        subject = load_subject(config, STUB, 0)
        for unit in plan(config, STUB):
            if unit.task == "pair":
                for row in run_unit(config, STUB, subject, unit):
                    rows.setdefault((row.item, row.regime, row.policy), []).append(row.tokens)
    assert all(len(tokens) == 2 and tokens[0] == tokens[1] for tokens in rows.values())


def test_two_processes_write_what_one_does(gated):
    options = {"policies": ("snapkv", "token_identity"), "keep_ratios": (0.45,), "unit_items": 1}
    for workers in (0, 2):
        config = stub_config(gated, run=f"workers{workers}", workers=workers, **options)
        open_run(config.folder, describe_run(config, STUB), keys(config))
        assert run_all(config, STUB) == 6

    def rows(workers):
        own = read_rows(stub_config(gated, run=f"workers{workers}").folder)
        return sorted(tuple(sorted((k, str(v)) for k, v in row.items() if k != "run")) for row in own)

    assert rows(0) == rows(2) and len(rows(2)) == 6 * 2 * 3


def test_the_last_question_token_is_read_after_the_eviction():
    item = stub_item("odd", 0, 1, 100)
    assert (seen_tokens(item, "context_only"), seen_tokens(item, "query_aware")) == (100, 103)
    assert (observed_tokens(item, "context_only"), observed_tokens(item, "query_aware")) == (100, 104)
    assert len(item.question_ids) == 4


@pytest.mark.parametrize(("task", "generate", "size"), [("copy", 3, 2), ("pair", 2, 1), ("odd", 1, 0)])
@pytest.mark.parametrize("regime", ["context_only", "query_aware"])
def test_the_oracle_sees_the_queries_that_generation_makes_and_no_other(
    gated, monkeypatch, task, generate, size, regime
):
    item = stub_item(task, 0, 0, 100)
    assert (item.generate, len(item.gold_ids)) == (generate, generate + 1)
    assert read_back(item) == item.gold_ids[:size]
    seen = []

    def watched(teacher, n):
        seen.append((teacher, n))
        return oracle(teacher, n)

    monkeypatch.setattr(shared_prefill, "oracle", watched)
    config = stub_config(gated, policies=("oracle",), regimes=(regime,))
    run_unit(config, STUB, load_subject(config, STUB, 0), Unit(0, task, 0, 1))
    ((teacher, document_tokens),) = seen
    # Real queries: the prompt's tokens after the eviction, and each generated token but the last.
    assert document_tokens == seen_tokens(item, regime)
    assert teacher[0].num_seen == 100 + len(item.question_ids) + generate - 1 > document_tokens


def test_controls_share_the_gates_protection_and_scope(tmp_path):
    config = stub_config(tmp_path, protections={"joint": ("scope=model", "protection.recent=8")})
    for name, kind in itertools.product(("token_identity", "oracle"), ("preset", "joint")):
        gate, control = find_policy(config, "gate", kind), find_policy(config, name, kind)
        assert (control.protection, control.scope, control.learned) == (gate.protection, gate.scope, True)
        assert control.scope == ("model" if kind == "joint" else "head") and control.draw is None
        # Nothing but the control's own score orders entries.
        assert (control.observed, control.fusion, control.floor) == (None, "learned", None)


def test_a_score_is_cut_with_all_that_it_says():
    values_BHT = torch.arange(10.0).view(1, 1, 10)
    score = Score(values_BHT, "mass", values_BHT + 100, 3, torch.tensor([7.0], dtype=torch.float64))
    cut = first_entries(score, 8)
    assert cut.values_BHT.tolist() == [[list(range(8))]]
    assert cut.first_BHT.tolist() == [[[100.0 + i for i in range(8)]]]
    # Of the window's three entries, 7, 8 and 9, one is left.
    assert cut.window == 1 and cut.layer_weight_B.tolist() == [7.0]
    assert first_entries(score, 6).window == 0
    plain = first_entries(Score(values_BHT, "rank"), 8)
    assert (plain.first_BHT, plain.window, plain.layer_weight_B) == (None, 0, None)


def test_policies_with_one_score_score_once(gated, monkeypatch):
    made = []

    def count(policy, layer, **options):
        made.append(policy.name)
        return score_entries(policy, layer, **options)

    monkeypatch.setattr(shared_prefill, "score_entries", count)
    variants = {
        "bare": ("snapkv", "protection.sinks=0"),
        "other": ("snapkv", "observed_settings.aggregate=max"),
        "gate_bare": ("gate", "protection.sinks=0"),
    }
    shared = ("snapkv", "adakv", "pyramidkv", "bare")
    names = (*shared, "other", "gate", "gate_bare", "token_identity", "oracle", "fused", "random")
    config = stub_config(gated, policies=names, variants=variants, regimes=("context_only",))
    subject = load_subject(config, STUB, 0)
    run_unit(config, STUB, subject, Unit(0, "pair", 0, 1))
    layers = subject.model.config.num_hidden_layers
    alone = ("snapkv", "other", "gate", "token_identity", "oracle", "fused", "random")
    assert made == [name for name in alone for _ in range(layers)]


def test_a_variant_differs_from_its_preset_in_what_it_changes(gated):
    variants = {"early": ("recency", "observed=random"), "same": ("recency", "protection.sinks=4")}
    config = stub_config(
        gated, policies=("random", "recency", "early", "same"), variants=variants, keep_ratios=(0.45,)
    )
    subject = load_subject(config, STUB, 0)
    rows = [row for task in TASKS for row in run_unit(config, STUB, subject, Unit(0, task, 0, 2))]
    answers = {name: [row.tokens for row in rows if row.policy == name] for name in config.policies}
    assert answers["same"] == answers["recency"] != answers["random"] == answers["early"]


def test_head_classes_are_measured_once_for_each_model(gated, monkeypatch):
    measured = []

    def measure(model, documents, *, sinks, recent):
        measured.append((len(list(documents)), sinks, recent))
        return measure_head_classes(model, STUB.documents(0, 2, 100), sinks=sinks, recent=recent)

    monkeypatch.setattr(subjects, "measure_head_classes", measure)
    variants = {"duo_bare": ("duoattention", "protection.prefix_fraction=0", "protection.recent=8")}
    config = stub_config(gated, policies=("duoattention", "duo_bare", "snapkv"), variants=variants)
    subject = load_subject(config, STUB, 0)
    path = config.folder / "head_classes-seed0.tsv"
    assert read_head_classes(str(path)) and json.loads(path.with_suffix(".json").read_text())["recent"] == 32
    assert measured == [(2, 4, 32)]
    for name in ("duoattention", "duo_bare"):
        assert subject.policies[name].allocation.head_classes == str(path)
    assert subject.policies["snapkv"].allocation.head_classes is None
    load_subject(config, STUB, 0)
    assert len(measured) == 1
    load_subject(replace(config, control_documents=3), STUB, 0)  # made from something else
    assert [count for count, *_ in measured] == [2, 3]
    rows = run_unit(config, STUB, subject, Unit(0, "pair", 0, 2))
    assert len({row.kept_entries for row in rows if row.budget == 0.45}) == 2  # one a regime


def test_a_variant_is_part_of_what_the_run_is(gated):
    def identity(*changes, name="mine"):
        config = stub_config(gated, policies=(name,), variants={name: ("snapkv", *changes)})
        return describe_run(config, STUB)["identity"]

    assert identity("protection.sinks=4") == identity() != identity("protection.sinks=3")
    assert identity(name="other") != identity()


def test_how_many_items_are_read_together_is_lowered_when_memory_runs_out(gated, monkeypatch):
    options = {
        "policies": ("random", "snapkv"),
        "tasks": ("odd", "pair"),
        "items_per_task": 3,
        "unit_items": 3,
    }
    config = stub_config(gated, batch_items=3, **options)
    read, run_shared = [], runner.run_shared

    def run(config, suite, subject, unit, items):
        read.append(len(items))
        if unit.task == "odd" and len(items) > 1:
            with subjects.naming(unit, "the prefill"):
                raise torch.OutOfMemoryError("tried to allocate")
        return run_shared(config, suite, subject, unit, items)

    monkeypatch.setattr(runner, "run_shared", run)
    with pytest.raises(ValueError, match=r"out of memory in seed0/odd/0-3.*Lower batch_items or"):
        compare(config, STUB)
    compare(replace(config, batch_items=1), STUB)
    assert read == [3, 3, 1, 1, 1]  # the other unit was done, and is not done again
    monkeypatch.undo()
    compare(replace(config, run="together"), STUB)

    def rows(run):
        return [{**row, "run": ""} for row in read_rows(gated / "results" / run)]

    assert rows("stub") == rows("together")
    manifest = json.loads((config.folder / MANIFEST).read_text())
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
    config = stub_config(
        gated, seeds=(0, 1, 2), gates=str(gated / "gates-seed0"), policies=("gate",), tasks=("pair",)
    )
    held = Subjects(config, suite)
    first = held.of(0)
    assert held.of(0) is first
    second = held.of(1)
    assert (second.seed, second.model, second.gates) == (1, first.model, first.gates)
    assert told["loads"] == 1
    moved = Subjects(replace(config, gates=str(gated / "gates-seed{seed}")), suite)
    own = moved.of(0).gates
    (gated / "gates-seed1").symlink_to(gated / "gates-seed0")
    assert moved.of(1).gates is not own  # of another folder


def test_nothing_is_fitted_where_nothing_is_to_be(gated, monkeypatch):
    config = stub_config(gated, policies=("recency", "duoattention"))
    assert not fits_tables(stub_config(gated, policies=("recency", "oracle")))
    assert fits_tables(config) and fits_tables(stub_config(gated, policies=("token_identity",)))
    launched = Processes(rank=0, count=2)
    monkeypatch.setattr(runner, "load_subject", lambda *_: pytest.fail("loaded to be fitted"))
    plain = stub_config(gated, policies=("recency",), tasks=("pair",), keep_ratios=(0.6,))
    plain.folder.mkdir(parents=True)
    assert run_all(plain, STUB, processes=launched) == 1


def test_a_row_says_whether_its_items_are_its_seeds_own(gated):
    tasks = {**TASKS, "copy": replace(TASKS["copy"], seeded=False)}
    config = stub_config(gated, policies=("recency",), keep_ratios=(0.6,))
    compare(config, replace(STUB, tasks=tasks))
    told = {(row["task"], row["seeded"]) for row in read_rows(config.folder)}
    assert told == {("copy", False), ("pair", True), ("odd", True)}


def test_what_its_items_are_is_part_of_what_the_run_is(gated):
    config = stub_config(gated, policies=("recency",))
    before = describe_run(config, STUB)["identity"]

    def other(**changes):
        def item(*place):
            return replace(stub_item(*place), **changes)

        now = describe_run(config, replace(STUB, item=item))["identity"]
        return {name for name in now if now[name] != before[name]}

    assert other() == set()
    assert other(context_ids=(5,) * 100) == other(end_ids=(3,)) == {"items"}
    moved = {"ruler/qa_1": {"path": "there"}, "niah": {"path": "there", "length": 3}}
    text = replace(config.text, changes=moved, device_map=None)
    assert describe_run(replace(config, text=text), STUB)["identity"]["config"]["text"]["changes"] == {
        "niah": {"length": 3}
    }


def test_where_items_begin_is_part_of_what_the_run_is(gated):
    """Rows are those of the items behind, under their own indices; a run from 0 on is what it was before
    that could be said."""
    first = stub_config(gated, policies=("snapkv", "random"), tasks=("odd",), results=str(gated / "first"))
    both = replace(first, items_per_task=4, results=str(gated / "both"))
    behind = replace(first, first_item=2, results=str(gated / "behind"))
    for config in (both, behind):
        compare(config, STUB)

    def measured(config):
        own = ("item", "policy", "regime", "budget")
        rows = read_rows(config.folder)
        return {tuple(row[name] for name in own): (row["tokens_sha"], row["kept_entries"]) for row in rows}

    assert {key[0] for key in measured(behind)} == {2, 3}
    assert measured(behind) == {key: own for key, own in measured(both).items() if key[0] >= 2}
    of_first, of_behind = (describe_run(own, STUB) for own in (first, behind))
    assert "first_item" not in of_first["identity"]["config"] and of_first["config"]["first_item"] == 0
    assert of_behind["identity"]["config"]["first_item"] == 2
    assert of_first["identity"]["items"] != of_behind["identity"]["items"]
    with pytest.raises(ValueError, match=r"config.first_item \(2 there, None now\)"):
        compare(replace(behind, first_item=0), STUB)
    # A finished run is only reported again.
    before = (behind.folder / "items.jsonl").read_bytes()
    compare(behind, STUB)
    assert (behind.folder / "items.jsonl").read_bytes() == before


def test_every_weight_is_part_of_what_the_run_is():
    model = STUB.load_model(0)
    seen = {entry.weights_sha(model)}
    assert seen == {entry.weights_sha(STUB.load_model(0))}
    names = [name for name, _ in model.named_parameters()]
    for part in ("mlp.up_proj", "q_proj", "v_proj", "layernorm", "model.norm", "q_norm"):
        own = next(parameter for name, parameter in model.named_parameters() if part in name)
        with torch.no_grad():
            own.mul_(1.5)
        seen.add(entry.weights_sha(model))
    assert len(seen) == 7 and len(names) > 7


def test_references_that_are_missing_or_torn_are_written_again(gated):
    config = stub_config(gated, policies=("recency",), keep_ratios=(0.6,), tasks=("pair", "copy"))
    compare(config, STUB)
    path, whole = config.folder / REFERENCES, read_references(config.folder)
    assert len(whole) == 4
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:30])
    compare(config, STUB)
    assert read_references(config.folder) == whole
    path.unlink()
    compare(config, STUB)
    assert read_references(config.folder) == whole


def test_items_that_are_others_than_before_stop_a_run_that_goes_on(gated):
    config = stub_config(
        gated, policies=("recency",), regimes=("context_only", "decode"), keep_ratios=(0.6,), tasks=("pair",)
    )
    open_run(config.folder, describe_run(config, STUB), keys(config))

    class KilledError(Exception):
        pass

    def kill(_):
        raise KilledError

    with pytest.raises(KilledError):
        run_all(config, STUB, on_unit=kill)
    before = (config.folder / ITEMS).read_bytes()

    def item(*place):
        own = stub_item(*place)
        return own if place[2] == 0 else replace(own, context_ids=own.context_ids[::-1])

    with pytest.raises(
        ValueError, match=r"seed0/pair/0-2/decode: question 0 of item 1 is not the one .*context_sha differ"
    ):
        run_all(config, replace(STUB, item=item))
    assert (config.folder / ITEMS).read_bytes() == before
    assert run_all(config, STUB) == 1


def test_a_worker_ends_with_the_run_that_started_it():
    """Also where that was killed and could tell nobody."""
    script = (
        "import os, subprocess, sys, time\n"
        "waits = 'import os; from retain.eval.run.runner import _end_with; '\n"
        "waits += f'print(1, flush=True); _end_with({os.getpid()})'\n"
        "worker = subprocess.Popen([sys.executable, '-c', waits], stdout=subprocess.PIPE, text=True)\n"
        "worker.stdout.readline()\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        os.kill(worker, 0)
        run.kill()
    until = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() < until, "the worker is still there"
        time.sleep(0.2)
