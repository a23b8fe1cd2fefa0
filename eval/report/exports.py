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

import csv
import hashlib
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from retain.eval.config import FULL
from retain.eval.report.run import Run, parser_of
from retain.eval.run.results_store import asked_as
from retain.eval.stats.significance import standard_error
from retain.eval.stats.summary import Cell
from retain.process.command import command
from retain.process.extras import require
from retain.process.provenance import write_json, write_text

PARQUET = "items.parquet"
EXPORTS = "exports"
# Columns of predictions.csv: kvpress writes its data set's own, in no fixed order; these are always there.
PREDICTIONS = (
    *("task", "seed", "item", "question_index", "answer", "predicted_answer", "score", "compression_ratio"),
    *("num_generated", "null"),
)
Row = Mapping[str, Any]


def write_exports(run: Run) -> list[Path]:
    """Writes everything; files that an earlier call wrote are written again, equal.

    Returns:
        The parquet file, then every folder.

    Raises:
        ValueError: If pyarrow is not installed, or the run is unfinished.
    """
    # An unfinished run is refused before anything is written.
    assert run.cells.keys() == run.scores.exact.keys()
    made = [_parquet(run)]
    for cell in run.cells:
        made += [*_kvpress(run, cell), _lm_eval(run, cell)]
    return made


def _model(run: Run) -> str:
    """Name of the model."""
    return str((run.config["suite"] == "text" and run.config.get("model")) or run.config["suite"])


def _metric(run: Run, task: str) -> str:
    """Name of the metric of a task."""
    named = run.manifest.get("tasks", {}).get(task, {}).get("metric")
    return str(named or (run.tasks[task].metric if task in run.tasks else "score")).replace(" ", "_")


def _right(run: Run, row: Row) -> str:
    """Right answers as JSON; of tasks in token ids, the ids."""
    wanted = run.asked.get(asked_as(row), {})
    right = list(wanted.get("references") or ()) or [" ".join(map(str, wanted.get("gold_ids", ())))]
    return json.dumps(right, ensure_ascii=False)


def _notes(run: Run, cell: Cell, rows: Sequence[Row]) -> dict[str, Any]:
    """Facts that neither layout has a word for."""
    return {
        **cell._asdict(),
        "keep_ratio": _keep_ratio(rows),
        "bytes_held": fmean(row["bytes_held"] for row in rows),
        "bytes_full": fmean(row["bytes_full"] for row in rows),
        "memory": "freed",
        "gates": sorted({row["gates"] for row in rows if row.get("gates")}),
        "trained": any(row.get("trained") for row in rows),
        "nulls": sum(bool(row.get("null")) for row in rows),
        "identity_sha": run.manifest.get("identity_sha"),
        "commits": [state["commit"] for state in run.states],
        "clean": all(state["clean"] for state in run.states),
    }


def _parquet(run: Run) -> Path:
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
    notes = {
        "identity_sha": str(run.manifest.get("identity_sha", "")),
        "commits": ", ".join(str(state["commit"]) for state in run.states),
        "clean": str(all(state["clean"] for state in run.states)),
    }
    tidy = [
        {
            **{name: row.get(name) for name in kinds},
            "run": row.get("run", run.config["run"]),
            "about": json.dumps(row.get("about") or {}, sort_keys=True),
            "text_sha": _sha(row.get("text") or "")[:12],
        }
        for row in run.rows
    ]
    table = pyarrow.Table.from_pylist(tidy, schema=pyarrow.schema([*kinds.items()], metadata=notes))
    beside = run.folder / f"{PARQUET}.new"
    parquet.write_table(table, beside, compression="zstd")
    return beside.replace(run.folder / PARQUET)


def file_name(text: str) -> str:
    """A name as a part of a file's name: "/" is "--" as elsewhere; what no file system likes is "_", and
    then the start of a hash keeps different names different."""
    plain = re.sub(r"[^A-Za-z0-9._+:-]", "_", text.replace("/", "--"))
    if plain == text.replace("/", "--") and plain.strip("."):
        return plain
    return f"{plain}-{_sha(text)[:6]}"


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


def _kvpress(run: Run, cell: Cell) -> Iterator[Path]:
    """One folder for each group of tasks ("ruler" of "ruler/vt"), as for one data set there."""
    config = run.config
    rows, model = run.cells[cell], _model(run)
    groups = _grouped(
        rows, lambda row: row["task"].partition("/")[0] if "/" in row["task"] else config["suite"]
    )
    for dataset, own in groups.items():
        removed = round(1 - cell.budget, 12) if cell.budget <= 1 else 1 - _keep_ratio(own)
        names = (dataset, str(config["context_tokens"]), model, cell.policy, removed)
        name = kvpress_name(*names, regime=cell.regime, budget=cell.budget)
        where = run.folder / EXPORTS / "kvpress" / name
        where.mkdir(parents=True, exist_ok=True)
        text = io.StringIO()
        writer = csv.DictWriter(text, PREDICTIONS, lineterminator="\n", restval="", extrasaction="ignore")
        writer.writeheader()
        for row in own:
            more: dict[str, Any] = {"answer": _right(run, row), "predicted_answer": _answer(row)}
            more |= {"compression_ratio": removed, "question_index": row.get("question", 0)}
            writer.writerow({**row, **more})
        write_text(where / "predictions.csv", text.getvalue())
        metrics = {
            task: {_metric(run, task): round(run.scores.mean(cell, [task]), 2)}
            for task in dict.fromkeys(row["task"] for row in own)
        }
        write_json(where / "metrics.json", metrics)
        settings = {
            "dataset": dataset,
            "data_dir": str(config["context_tokens"]),
            "model": model,
            "device": run.device,
            "press_name": "no_press" if cell.policy == FULL else cell.policy,
            "compression_ratio": removed,
            "fraction": 1.0,
            "max_context_length": config["context_tokens"],
            "query_aware": cell.regime in ("query_aware", "served"),
            "seeds": list(config["seeds"]),
            "retain": _notes(run, cell, own),
        }
        write_text(where / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        yield where


def _lm_eval(run: Run, cell: Cell) -> Path:
    """One folder for each cell, as for one model there."""
    model = f"{_model(run)}__{cell.policy}__{cell.budget:g}__{cell.regime}"
    where = run.folder / EXPORTS / "lm-eval" / file_name(model)
    where.mkdir(parents=True, exist_ok=True)
    time = str(run.manifest.get("finished", "unfinished"))[:19].replace(":", "-")
    by_task = _grouped(run.cells[cell], lambda row: row["task"])
    metric = {task: _metric(run, task) for task in by_task}
    # In [0, 1]; of a single item the word that lm-evaluation-harness writes there.
    errors = {task: standard_error(run.scores.strata(cell, [task])) / 100 for task in by_task}
    version = {task: run.manifest.get("tasks", {}).get(task, {}).get("version", 1) for task in by_task}
    results: dict[str, Any] = {
        "results": {
            task: {
                "alias": task,
                f"{metric[task]},none": run.scores.mean(cell, [task]) / 100,
                f"{metric[task]}_stderr,none": errors[task] if math.isfinite(errors[task]) else "N/A",
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
            "model_args": {"pretrained": _model(run), "policy": cell.policy, "budget": cell.budget},
            "batch_size": run.config.get("batch_items"),
            "device": run.device,
        },
        "git_hash": run.states[-1]["commit"] if run.states else None,
        "date": run.manifest.get("finished"),
        "model_name": model,
        "model_name_sanitized": file_name(model),
        "retain": _notes(run, cell, run.cells[cell]),
    }
    write_json(where / f"results_{time}.json", results)
    for task, own in by_task.items():
        lines = [_sample(run, place, row, metric[task]) for place, row in enumerate(own)]
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        write_text(where / f"samples_{file_name(task)}_{time}.jsonl", text)
    return where


def _sample(run: Run, place: int, row: Row, metric: str) -> dict[str, Any]:
    wanted = run.asked.get(asked_as(row), {})
    question, context = " ".join(map(str, wanted.get("question_ids", ()))), wanted.get("context_sha", "")
    doc = {name: row.get(name) for name in ("seed", "item", "question", "about")} | {"context_sha": context}
    answer, target = _answer(row), _right(run, row)
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


def _grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by a key, in their order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _keep_ratio(rows: Iterable[Row]) -> float:
    return fmean(row["kept_entries"] / row["seen_entries"] for row in rows)


def _answer(row: Row) -> str:
    return str(row.get("text") or " ".join(map(str, row.get("tokens", ()))))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the exports of a folder again."""
    given = parser_of("Write items.parquet and the exports of a run.").parse_args(arguments)
    made = write_exports(Run.read(given.folder))
    print(f"{made[0]} and {len(made) - 1} folders in {given.folder / EXPORTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
