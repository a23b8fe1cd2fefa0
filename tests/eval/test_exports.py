"""A made-up run in other people's layouts: nothing lost, nothing said that was not measured."""

import csv
import hashlib
import json
from collections import Counter
from dataclasses import asdict

import pytest
import yaml
from pyarrow import parquet

from retain.eval.report.exports import file_name, kvpress_name, main, write_exports
from retain.eval.report.run import Run
from retain.eval.run.results_store import ITEMS
from tests.eval.made_run import (
    BUDGETS,
    HOSTILE,
    ITEMS_PER_TASK,
    TASKS,
    make_manifest,
    make_rows,
    make_run,
)

POLICIES = ("snapkv", "gate", f"odd{HOSTILE}")
CELLS = 2 * (1 + len(POLICIES) * len(BUDGETS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_run(tmp_path_factory.mktemp("made"), measured=False, policies=POLICIES)
    paths = write_exports(Run(made, make_manifest(clean=False), TASKS))
    assert len(paths) == 1 + CELLS * (3 + 1)
    return made


def rows_of(task, policy, regime):
    """Rows of one task at the middle budget."""
    place = (task, policy, regime, 0.2)
    return [row for row in make_rows(POLICIES) if (row.task, row.policy, row.regime, row.budget) == place]


def test_the_parquet_file_holds_every_row(folder):
    table = parquet.read_table(folder / "items.parquet")
    rows = table.to_pylist()
    made = [asdict(row) for row in make_rows(POLICIES)]
    assert len(rows) == len(made)
    for row, own in zip(rows, made, strict=True):
        assert json.loads(row.pop("about")) == own["about"]
        assert row.pop("text_sha") == hashlib.sha256(own["text"].encode()).hexdigest()[:12]
        assert row.pop("tokens") == list(own["tokens"])
        assert row == {name: own[name] for name in row}
    assert {row["gates"] for row in table.to_pylist() if row["policy"] == "gate"} == {"f" * 12}
    assert {row["policy"] for row in table.to_pylist() if row["trained"]} == {"gate"}
    named = "gates trained run unit seed task family item question regime policy protection budget keep_ratio"
    assert {*named.split(), "score", "null", "bytes_held"} <= {*table.column_names}
    assert table.schema.metadata[b"clean"] == b"False"
    assert table.schema.metadata[b"identity_sha"] == b"0123456789abcdef"


def test_the_folders_of_kvpress(folder):
    names = {path.name for path in (folder / "exports/kvpress").iterdir()}
    assert len(names) == CELLS * 3
    # Compression is what was removed: keep_ratio 0.2 is 0.80.
    assert {
        *("ruler__1000__stub__snapkv__0.80", "ruler__1000__stub__snapkv__0.80__query_aware"),
        *("stub__1000__stub__no_press__0.00", "niah__1000__stub__gate__0.60"),
    } <= names
    where = folder / "exports/kvpress/ruler__1000__stub__snapkv__0.80"
    gated = where.with_name("ruler__1000__stub__gate__0.80")
    assert {path.name for path in where.iterdir()} == {"predictions.csv", "metrics.json", "config.yaml"}
    own = rows_of("ruler/vt", "snapkv", "context_only")
    with (where / "predictions.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert Counter(line["predicted_answer"] for line in lines) == Counter(row.text for row in own)
    assert [json.loads(line["answer"]) for line in lines] == [["right"]] * 2 * ITEMS_PER_TASK
    score = sum(row.score for row in own) / len(own)
    assert sum(float(line["score"]) for line in lines) == len(own) * score
    metrics = json.loads((where / "metrics.json").read_text())
    assert metrics == {"ruler/vt": {"ruler_all": round(100 * score, 2)}}
    config = yaml.safe_load((where / "config.yaml").read_text())
    assert (config["dataset"], config["press_name"], config["query_aware"]) == ("ruler", "snapkv", False)
    assert config["compression_ratio"] == 0.8 and config["retain"]["keep_ratio"] == pytest.approx(0.2)
    assert config["retain"]["memory"] == "freed" and config["retain"]["clean"] is False
    assert (config["retain"]["gates"], config["retain"]["trained"]) == ([], False)
    learned = yaml.safe_load((gated / "config.yaml").read_text())["retain"]
    assert (learned["gates"], learned["trained"]) == (["f" * 12], True)


def test_the_files_of_lm_eval(folder):
    where = folder / "exports/lm-eval/stub__gate__0.2__query_aware"
    time = "2026-01-02T03-04-05"
    assert {path.name for path in where.iterdir()} == {
        f"results_{time}.json",
        *(f"samples_{name}_{time}.jsonl" for name in ("copy", "pair", "ruler--vt", "niah--grid")),
    }
    results = json.loads((where / f"results_{time}.json").read_text())
    own = [row.score for row in rows_of("copy", "gate", "query_aware")]
    mean = sum(own) / len(own)
    error = (sum((score - mean) ** 2 for score in own) / (len(own) - 1) / len(own)) ** 0.5
    assert results["results"]["copy"] == {
        "alias": "copy",
        "exact_match,none": pytest.approx(mean),
        "exact_match_stderr,none": pytest.approx(error),
    }
    keys = "results group_subtasks configs versions n-shot higher_is_better n-samples config git_hash date"
    assert {*keys.split(), "model_name"} <= {*results}
    samples = [json.loads(line) for line in (where / f"samples_copy_{time}.jsonl").read_text().splitlines()]
    assert [one["doc_id"] for one in samples] == [*range(2 * ITEMS_PER_TASK)]
    assert sum(one["exact_match"] for one in samples) == sum(own)
    assert {one["resps"][0][0] for one in samples} == {"right", HOSTILE}
    assert all(one["filtered_resps"] == one["resps"][0] and one["filter"] == "none" for one in samples)
    assert len({one["doc_hash"] for one in samples}) == len(samples)


def test_names_of_files():
    assert file_name("meta-llama/Llama-3.1-8B") == "meta-llama--Llama-3.1-8B"
    assert file_name("snapkv+none") == "snapkv+none"
    hostile = file_name(f"../{HOSTILE}")
    assert "/" not in hostile and "<" not in hostile and hostile != file_name(f"..-{HOSTILE}")
    assert file_name("a b") != file_name("a?b")
    assert file_name("..").startswith("..-")
    for removed, regime, budget, name in (
        (0.75, "context_only", 0.25, "0.75"),
        (0.875, "decode", 0.125, "0.875__decode"),
        (0.9688, "query_aware", 128.0, "0.9688__tokens_per_head128__query_aware"),
    ):
        made = kvpress_name("ruler", "4096", "a/b", "snapkv", removed, regime=regime, budget=budget)
        assert made == f"ruler__4096__a--b__snapkv__{name}"


def test_the_command(folder, tmp_path, capsys):
    """Writing again writes the same."""

    def contents():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = contents()
    write_exports(Run(folder, make_manifest(clean=False), TASKS))
    assert contents() == before
    assert main([str(folder)]) == 0
    assert f"{CELLS * 4} folders" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 2
    assert "is no run of eval/compare.py" in capsys.readouterr().err
    lines = (folder / ITEMS).read_text().splitlines()
    (folder / ITEMS).write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(ValueError, match="the run is unfinished"):
        write_exports(Run(folder, make_manifest(), TASKS))
