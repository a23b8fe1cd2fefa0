"""A run's rows for other people's tools: `items.parquet`, and the folders that kvpress and lm-eval write.

    python -m retain.eval.report.exports results/RUN

In the run's folder: `items.parquet` (one tidy row per answer);
`exports/kvpress/<dataset>__<data_dir>__<model>__<press>__<ratio>[...]/` with `predictions.csv`,
`metrics.json` and `config.yaml`; `exports/lm-eval/<model>__<policy>.../` with `results_<time>.json` and
`samples_<task>_<time>.jsonl`.

What those layouts have no word for stands under a key of its own (`retain`). What they have a word for keeps
that meaning: `compression_ratio` is the share that was *removed*. The time in a file's name is when the run
finished, so that writing an export again writes the same files.
"""

import argparse
import csv
import hashlib
import io
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from retain.eval.config import FULL
from retain.eval.run.results_store import read_manifest, read_references, read_rows
from retain.eval.stats.significance import standard_error
from retain.eval.stats.summary import Cell, Scores, gather
from retain.eval.tasks.suite import Task
from retain.eval.tasks.suites import tasks_of
from retain.process.command import command
from retain.process.extras import require
from retain.process.provenance import write_text

PARQUET = "items.parquet"
EXPORTS = "exports"
# Columns of predictions.csv: kvpress writes its data set's own, in no fixed order; these are always there.
PREDICTIONS = (
    *("task", "seed", "item", "question_index", "answer", "predicted_answer", "score", "compression_ratio"),
    *("num_generated", "null"),
)


@dataclass(frozen=True)
class Exported:
    """A run as its exports read it: the manifest, the suite's tasks, scores, and what was asked."""

    folder: Path
    manifest: Mapping[str, Any]
    tasks: Mapping[str, Task]
    scores: Scores
    asked: Mapping[Any, Mapping[str, Any]]

    @property
    def model(self) -> str:
        """Name of the model."""
        config = self.manifest["config"]
        return str((config["suite"] == "text" and config.get("model")) or config["suite"])

    @property
    def device(self) -> str:
        """That it ran on."""
        return str(self.manifest.get("device", self.manifest["environment"]["device"]))

    @property
    def commits(self) -> list[str]:
        """Of the code that made its rows."""
        return [state["commit"] for state in self.manifest.get("code_states", [])]

    def metric(self, task: str) -> str:
        """What a task is judged by."""
        named = self.manifest.get("tasks", {}).get(task, {}).get("metric")
        return str(named or (self.tasks[task].metric if task in self.tasks else "score")).replace(" ", "_")

    def right(self, row: Mapping[str, Any]) -> str:
        """Right answers as JSON; of tasks in token ids, the ids."""
        wanted = self.asked.get(_key(row), {})
        right = list(wanted.get("references") or ()) or [" ".join(map(str, wanted.get("gold_ids", ())))]
        return json.dumps(right, ensure_ascii=False)


def write_exports(folder: Path, manifest: Mapping[str, Any], tasks: Mapping[str, Task]) -> list[Path]:
    """Write everything; what an earlier call wrote is written again, equal.

    Args:
        folder: `results/<run>`, which holds the rows.
        manifest: Of the run.
        tasks: The suite's tasks.

    Returns:
        The parquet file, then every folder.

    Raises:
        ValueError: If pyarrow is not installed, or the run is unfinished.
    """
    rows = [{"budget": row["keep_ratio"], "score": row["exact"], **row} for row in read_rows(folder)]
    asked = {_key(one): one for one in read_references(folder)}
    run = Exported(folder / EXPORTS, manifest, tasks, gather(rows, tasks), asked)
    made = [write_parquet(rows, folder / PARQUET, manifest)]
    cells: dict[Cell, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=_key):
        cells.setdefault(Cell(row["regime"], row["policy"], float(row["budget"])), []).append(row)
    for cell, own in cells.items():
        made += [*_kvpress(run, cell, own), _lm_eval(run, cell, own)]
    return made


def write_parquet(rows: Sequence[Mapping[str, Any]], path: Path, manifest: Mapping[str, Any]) -> Path:
    """Write one tidy row per answer; `about` is JSON, `text_sha` the start of the text's sha256.

    Raises:
        ValueError: If pyarrow is not installed.
    """
    require("eval", "pyarrow", what=PARQUET)
    import pyarrow
    from pyarrow import parquet

    columns = {
        pyarrow.string(): "run unit task family regime policy base_policy gates protection tokens_sha text "
        "text_sha about",
        pyarrow.int64(): "seed item question num_prompt num_generated kept_entries seen_entries peak_entries "
        "bytes_held bytes_full gate_bytes",
        pyarrow.float64(): "budget keep_ratio score exact partial needles_kept",
        pyarrow.bool_(): "null ended trained",
        pyarrow.list_(pyarrow.int64()): "tokens",
    }
    kinds = {name: kind for kind, names in columns.items() for name in names.split()}
    states = manifest.get("code_states", [])
    notes = {
        "identity_sha": str(manifest.get("identity_sha", "")),
        "commits": ", ".join(str(state["commit"]) for state in states),
        "clean": str(all(state["clean"] for state in states)),
    }
    schema = pyarrow.schema([*kinds.items()], metadata=notes)
    tidy = [
        {
            **{name: row.get(name) for name in kinds},
            "run": row.get("run", manifest["config"]["run"]),
            "about": json.dumps(row.get("about") or {}, sort_keys=True),
            "text_sha": hashlib.sha256((row.get("text") or "").encode()).hexdigest()[:12],
        }
        for row in rows
    ]
    beside = path.with_name(path.name + ".new")
    parquet.write_table(pyarrow.Table.from_pylist(tidy, schema=schema), beside, compression="zstd")
    beside.replace(path)
    return path


def file_name(text: str) -> str:
    """A name as a part of a file's name: "/" is "--" as elsewhere; what no file system likes is "_", and
    then the start of a hash keeps different names different."""
    plain = re.sub(r"[^A-Za-z0-9._+:-]", "_", text.replace("/", "--"))
    if plain == text.replace("/", "--") and plain.strip("."):
        return plain
    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def kvpress_name(
    dataset: str, data_dir: str, model: str, policy: str, removed: float, *, regime: str, budget: float
) -> str:
    """Name of a folder: two digits of the share removed, more where two say another number."""
    ratio = f"{removed:.2f}" if math.isclose(round(removed, 2), removed, abs_tol=1e-9) else f"{removed:.4g}"
    press = "no_press" if policy == FULL else policy
    parts = [*map(file_name, (dataset, data_dir, model, press)), ratio]
    if budget > 1:
        parts.append(f"tokens_per_head{budget:g}")
    if regime != "context_only":
        parts.append(regime)
    return "__".join(part for part in parts if part)


def _kvpress(run: Exported, cell: Cell, rows: Sequence[Mapping[str, Any]]) -> Iterator[Path]:
    """One folder for each group of tasks ("ruler" of "ruler/vt"), as for one data set there."""
    config = run.manifest["config"]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        group = row["task"].partition("/")[0] if "/" in row["task"] else config["suite"]
        groups.setdefault(group, []).append(row)
    for dataset, own in groups.items():
        kept = fmean(row["kept_entries"] / row["seen_entries"] for row in own)
        removed = round(1 - cell.budget, 12) if cell.budget <= 1 else 1 - kept
        names = (dataset, str(config["context_tokens"]), run.model, cell.policy, removed)
        where = run.folder / "kvpress" / kvpress_name(*names, regime=cell.regime, budget=cell.budget)
        where.mkdir(parents=True, exist_ok=True)
        text = io.StringIO()
        writer = csv.DictWriter(text, PREDICTIONS, lineterminator="\n", restval="", extrasaction="ignore")
        writer.writeheader()
        for row in own:
            more = {"answer": run.right(row), "predicted_answer": _answer(row), "compression_ratio": removed}
            writer.writerow({**row, **more, "question_index": row.get("question", 0)})
        write_text(where / "predictions.csv", text.getvalue())
        metrics = {
            task: {run.metric(task): round(run.scores.mean(cell, [task]), 2)}
            for task in dict.fromkeys(row["task"] for row in own)
        }
        write_text(where / "metrics.json", json.dumps(metrics, indent=2) + "\n")
        settings = {
            "dataset": dataset,
            "data_dir": str(config["context_tokens"]),
            "model": run.model,
            "device": run.device,
            "press_name": "no_press" if cell.policy == FULL else cell.policy,
            "compression_ratio": removed,
            "fraction": 1.0,
            "max_context_length": config["context_tokens"],
            "query_aware": cell.regime == "query_aware",
            "seeds": list(config["seeds"]),
            "retain": _retain(run, cell, own),
        }
        write_text(where / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        yield where


def _lm_eval(run: Exported, cell: Cell, rows: Sequence[Mapping[str, Any]]) -> Path:
    """One folder for each cell, as for one model there."""
    model = f"{run.model}__{cell.policy}__{cell.budget:g}__{cell.regime}"
    where = run.folder / "lm-eval" / file_name(model)
    where.mkdir(parents=True, exist_ok=True)
    time = str(run.manifest.get("finished", "unfinished"))[:19].replace(":", "-")
    by_task: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(row)
    metric = {task: run.metric(task) for task in by_task}
    version = {task: run.manifest.get("tasks", {}).get(task, {}).get("version", 1) for task in by_task}
    results: dict[str, Any] = {
        "results": {
            task: {
                "alias": task,
                f"{metric[task]},none": run.scores.mean(cell, [task]) / 100,
                f"{metric[task]}_stderr,none": _error(run.scores.strata(cell, [task])),
            }
            for task in by_task
        },
        "group_subtasks": {task: [] for task in by_task},
        "configs": {
            task: {
                "task": task,
                "output_type": "generate_until",
                "metric_list": [{"metric": metric[task], "aggregation": "mean", "higher_is_better": True}],
                "num_fewshot": 0,
                "metadata": {"version": version[task]},
            }
            for task in by_task
        },
        "versions": version,
        "n-shot": dict.fromkeys(by_task, 0),
        "higher_is_better": {task: {metric[task]: True} for task in by_task},
        "n-samples": {task: {"original": len(own), "effective": len(own)} for task, own in by_task.items()},
        "config": {
            "model": "retain",
            "model_args": {"pretrained": run.model, "policy": cell.policy, "budget": cell.budget},
            "batch_size": run.manifest["config"].get("batch_items"),
            "device": run.device,
        },
        "git_hash": run.commits[-1] if run.commits else None,
        "date": run.manifest.get("finished"),
        "model_name": model,
        "model_name_sanitized": file_name(model),
        "retain": _retain(run, cell, rows),
    }
    write_text(where / f"results_{time}.json", json.dumps(results, indent=2) + "\n")
    for task, own in by_task.items():
        lines = [_sample(run, place, row, metric[task]) for place, row in enumerate(own)]
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        write_text(where / f"samples_{file_name(task)}_{time}.jsonl", text)
    return where


def _error(strata: Sequence[np.ndarray]) -> float | str:
    """Standard error in [0, 1]; of a single item what lm-evaluation-harness writes where it has none."""
    error = standard_error(strata) / 100
    return error if math.isfinite(error) else "N/A"


def _sample(run: Exported, place: int, row: Mapping[str, Any], metric: str) -> dict[str, Any]:
    wanted = run.asked.get(_key(row), {})
    question, context = " ".join(map(str, wanted.get("question_ids", ()))), wanted.get("context_sha", "")
    doc = {name: row.get(name) for name in ("seed", "item", "question", "about")} | {"context_sha": context}
    answer, target = _answer(row), run.right(row)
    return {
        "doc_id": place,
        "doc": doc,
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": question}},
        "resps": [[answer]],
        "filtered_resps": [answer],
        "filter": "none",
        "metrics": [metric],
        "doc_hash": _sha(json.dumps(doc, sort_keys=True)),
        "prompt_hash": _sha(f"{context} {question}"),
        "target_hash": _sha(target),
        metric: row["score"],
    }


def _retain(run: Exported, cell: Cell, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What neither layout has a word for."""
    return {
        "regime": cell.regime,
        "policy": cell.policy,
        "budget": cell.budget,
        "keep_ratio": fmean(row["kept_entries"] / row["seen_entries"] for row in rows),
        "bytes_held": fmean(row["bytes_held"] for row in rows),
        "bytes_full": fmean(row["bytes_full"] for row in rows),
        "memory": "freed",
        "gates": sorted({row["gates"] for row in rows if row.get("gates")}),
        "trained": any(row.get("trained") for row in rows),
        "nulls": sum(bool(row.get("null")) for row in rows),
        "identity_sha": run.manifest.get("identity_sha"),
        "commits": run.commits,
        "clean": all(state["clean"] for state in run.manifest.get("code_states", [])),
    }


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["seed"], row["task"], row["item"], row.get("question", 0)


def _answer(row: Mapping[str, Any]) -> str:
    return str(row.get("text") or " ".join(map(str, row.get("tokens", ()))))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the exports of a folder again."""
    parser = argparse.ArgumentParser(description="Write items.parquet and the exports of a run.")
    parser.add_argument("folder", type=Path, help="results/<run>")
    given = parser.parse_args(arguments)
    manifest = read_manifest(given.folder)
    made = write_exports(given.folder, manifest, tasks_of(manifest))
    print(f"{made[0]} and {len(made) - 1} folders in {given.folder / EXPORTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
