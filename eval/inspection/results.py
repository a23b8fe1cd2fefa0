"""Summarises a folder of results: its run, whether it is complete, and the scores at a glance.

Rows are `items.jsonl` (and `items-<rank>.jsonl`) or `items.parquet`. A run in progress, a killed one and one
of an older retain can all be looked at. The first lines, and the picture, of a run whose rows are complete
are those of its report.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from retain.eval.config import CompareConfig
from retain.eval.report.picture import score_panels
from retain.eval.report.plots import Lines, Panel, Series, looks_of
from retain.eval.report.run import Run
from retain.eval.tasks.suites import tasks_of
from retain.process.extras import require

ITEMS_FILES = ("items.jsonl", "items.parquet")
MANIFEST = "manifest.json"
# Other programs write files of that name.
MANIFEST_KEYS = frozenset({"run", "config"})
# A keep_ratio of 1, or a budget of 1: the full cache.
FULL = 1.0
# Policies that a picture tells apart by colour and a line of words names.
SHOWN = 10


# Regime -> budget -> policy -> mean over tasks of each task's mean, in %; the best policy first.
Means = dict[str, dict[float, dict[str, float]]]
# Rows of a picture, drawn where it is asked for.
Panels = Callable[[], list[list[Panel]]]


def read_items(folder: Path) -> list[dict[str, Any]]:
    """All whole rows of a folder; a line that a kill cut is left out.

    Raises:
        ValueError: A line is something else than a row; or a parquet file is all that there is, and it is
            damaged, or its reader is not installed.
    """
    rows = [row for path in sorted(folder.glob("items*.jsonl")) for row in read_lines(path)]
    parquet = folder / "items.parquet"
    if not rows and parquet.is_file():
        require("eval", "pyarrow", what=str(parquet))
        from pyarrow.parquet import read_table

        try:
            rows = read_table(parquet).to_pylist()
        except (OSError, ValueError) as error:
            raise ValueError(f"{parquet} does not read as Parquet ({error}): it is damaged.") from None
    return rows


def read_lines(path: Path, needed: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a line that a kill cut is left out.

    Raises:
        ValueError: A line is whole, but no object, or lacks one of the keys `needed`.
    """
    lines = []
    # A line that is cut inside a letter is no UTF-8; and a text in JSON may hold line separators of Unicode.
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        try:
            read = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            continue
        missing = [name for name in needed if name not in read] if isinstance(read, dict) else []
        if not isinstance(read, dict) or missing:
            found = f"has no {missing[0]!r}" if missing else f"is {line!r:.60}"
            raise ValueError(f"{path}, line {number}, {found}, where an object was wanted: it is damaged.")
        lines.append(read)
    return lines


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML file, known by its name.

    Raises:
        ValueError: It is not readable, or holds something else than names and values.
    """
    kind, wanted = ("JSON", "an object was") if path.suffix == ".json" else ("YAML", "names and values were")
    try:
        text = path.read_text(encoding="utf-8")
        read = json.loads(text) if kind == "JSON" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        cause = " ".join(str(error).split())
        raise ValueError(f"{path} is not readable {kind} ({cause:.200}): it is damaged.") from None
    if not isinstance(read, dict):
        raise ValueError(f"{path} holds {read!r:.60}, where {wanted} wanted: it is damaged.")
    return read


def holds_results(folder: Path) -> bool:
    """Whether there are rows, or the manifest of a comparison that has none yet."""
    if any((folder / name).is_file() for name in ITEMS_FILES):
        return True
    try:
        return (folder / MANIFEST).is_file() and read_mapping(folder / MANIFEST).keys() >= MANIFEST_KEYS
    except ValueError:
        return False


def means_of(rows: list[dict[str, Any]]) -> Means:
    """Means of rows: of each task first, so that tasks count alike."""
    groups: dict[tuple[str, float, str], dict[str, list[float]]] = {}
    for row in rows:
        budget = float(row.get("budget", row.get("keep_ratio", FULL)))
        tasks = groups.setdefault((str(row.get("regime", "any")), budget, str(row.get("policy", "?"))), {})
        score = 100 * float(row.get("score", row.get("exact", 0.0)))
        tasks.setdefault(str(row.get("task", "?")), []).append(score)
    mean = {cell: fmean(map(fmean, tasks.values())) for cell, tasks in groups.items()}
    means: Means = {}
    for regime, budget, policy in sorted(mean, key=lambda cell: (cell[0], cell[1], -mean[cell], cell[2])):
        means.setdefault(regime, {}).setdefault(budget, {})[policy] = mean[regime, budget, policy]
    return means


def compared(
    folder: Path, manifest: Mapping[str, Any], rows: list[dict[str, Any]], means: Means
) -> tuple[list[tuple[str, str]], Panels]:
    """The sentences and the picture of the run's report; of rows that make none yet, why, and their means."""
    defaults = {"suite": "", "margin_points": CompareConfig.margin_points}
    config = {**defaults, "resamples": CompareConfig.resamples, **(manifest.get("config") or {})}
    try:
        run = Run(folder, {**manifest, "config": config}, tasks_of({**manifest, "config": config}), rows)
        said = [(one.regime, one.plain.removeprefix(f"{one.regime}: ")) for one in run.sentences]
    except KeyError as error:  # rows of the first versions
        return [("undecided", f"rows do not say their {error.args[0]}")], lambda: [score_lines(means)]
    except ValueError as error:
        return [("undecided", str(error))], lambda: [score_lines(means)]
    looks = looks_of(run.drawn)
    return said, lambda: [score_panels(run.scores, regime, looks) for regime in run.scores.regimes]


def describe_results(folder: Path) -> tuple[list[tuple[str, str]], Panels]:
    """Lines of words, and the picture.

    Raises:
        ValueError: Manifest or rows are damaged.
    """
    path = folder / MANIFEST
    manifest = read_mapping(path) if path.is_file() else {}

    run, identity, started = (manifest.get(name, "not stated") for name in ("run", "identity_sha", "started"))
    rows = read_items(folder)
    means, tasks = means_of(rows), sorted({str(row.get("task", "?")) for row in rows})
    units = manifest.get("samples", {}).get("units")
    done = len({row.get("unit") for row in rows})
    state = f"finished {manifest['finished']}" if "finished" in manifest else "not finished"
    state += f"; {done}{f' of {units}' if units else ''} units have rows"
    if not manifest:
        state = "unknown: no manifest.json says what made these rows"
    codes = manifest.get("code_states") or ([manifest["code"]] if "code" in manifest else [])
    made = [f"{str(one.get('commit'))[:12]} ({'clean' if one.get('clean') else 'scratch'})" for one in codes]
    versions = manifest.get("environment", {}).get("versions", {})
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if versions.get(name))
    nulls = sum(bool(row.get("null")) for row in rows)
    unanswered = f" ({nulls:,} without an answer, counted as 0)" if any("null" in row for row in rows) else ""
    cells = sum(len(policies) for budgets in means.values() for policies in budgets.values())
    said, panels = compared(folder, manifest, rows, means)
    lines = [
        *said,
        ("run", f"{run}, identity {identity}"),
        ("state", f"{state}; started {started}"),
        ("code", ", ".join(made) or "not stated"),
        ("machine", f"{manifest.get('environment', {}).get('device', 'not stated')}; {shown}"),
        ("config", listed(dict(manifest.get("config") or {}), 60)),
        ("tasks", f"{len(tasks)}: {', '.join(tasks) or 'none yet'}"),
        ("rows", f"{len(rows):,}{unanswered}, in {cells} cells (regime x policy x budget)"),
    ]
    for regime, budgets in means.items():
        for ceiling in _ceiling(budgets):
            lines.append((f"{regime} at 1", f"full cache {ceiling:.1f}"))
        for budget, ranked in budgets.items():
            names = ", ".join(f"{policy} {mean:.1f}" for policy, mean in [*ranked.items()][:SHOWN])
            more = f" and {len(ranked) - SHOWN} below" if len(ranked) > SHOWN else ""
            if budget != FULL:
                lines.append((f"{regime} at {budget:g}", f"{names}{more}"))
    lines.append(("scores", "means over tasks, in per cent; every difference is in report.md"))
    return lines, panels


def score_lines(means: Means) -> list[Panel]:
    """Score against budget, a panel a regime, the full cache dashed; the best `SHOWN` policies of each."""
    panels: list[Panel] = []
    every = [policies for own in means.values() for budget, policies in own.items() if budget != FULL]
    looks = looks_of(sorted({name for policies in every for name in policies}))
    for regime, budgets in means.items():
        ticks = tuple(budget for budget in budgets if budget != FULL)
        series = []
        for policy in [*budgets[ticks[-1]]][:SHOWN] if ticks else []:
            own = [(budget, budgets[budget][policy]) for budget in ticks if policy in budgets[budget]]
            series.append(Series(policy, looks[policy], *zip(*own, strict=True)))
        rules = tuple((ceiling, "full cache") for ceiling in _ceiling(budgets))
        label = "budget (below 1: kept / seen; else tokens a head)"
        panels.append(Lines(regime, label, "score, %", tuple(series), ticks, log_x=bool(ticks), rules=rules))
    return panels or [Lines("no rows yet", "", "score, %", ())]


def _ceiling(budgets: Mapping[float, Mapping[str, float]]) -> list[float]:
    """The full cache's mean, where it was measured."""
    return [*budgets.get(FULL, {}).values()][:1]


def listed(mapping: Any, longest: int | None = None, *, otherwise: str = "not stated") -> str:
    """A mapping in a line; `longest`: without mappings inside of it, and without values of more letters."""
    if mapping and not isinstance(mapping, dict):
        return str(mapping)
    parts = []
    for name, value in (mapping or {}).items():
        if value in (None, {}, []) or (longest and isinstance(value, dict)):
            continue
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        if isinstance(value, dict):
            items = ", ".join(f"{key} {own}" for key, own in value.items())
            shown = f"{len(value)} of them" if len(value) > 4 else items
        elif isinstance(value, list):
            shown = ", ".join(map(str, value))
        shown = (shown[:16] if name == "sha256" else shown).replace("\n", "\\n")
        if longest is None or len(shown) <= longest:
            parts.append(f"{name} {shown}")
    return "; ".join(parts) or otherwise


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs of them joined."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(own[0][1], own[-1][1]) for own in (list(run) for _, run in runs)]
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)
