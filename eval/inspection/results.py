"""Summarises a folder of results: its run, whether it is complete, and the scores at a glance.

Rows are `items.jsonl` (and `items-<rank>.jsonl`) or `items.parquet`. A run in progress, a killed one and one
of an older retain can all be looked at; verdicts are the report's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from retain.eval.report.plots import Lines, Panel, Series, looks_of
from retain.process.extras import require

__all__ = [
    "ITEMS_FILES",
    "Scores",
    "describe_results",
    "holds_results",
    "read_items",
    "read_lines",
    "read_mapping",
    "score_lines",
]

ITEMS_FILES = ("items.jsonl", "items.parquet")
MANIFEST = "manifest.json"
# By which a manifest is known to be a comparison's, since other programs write files of that name.
MANIFEST_KEYS = frozenset({"run", "config"})
# A keep_ratio of 1, or a budget of 1: the full cache.
FULL = 1.0
# Policies that a picture tells apart by colour and a line of words names.
SHOWN = 10


@dataclass(frozen=True)
class Scores:
    """Means of a run's rows, in 0..1: (regime, policy, budget) -> mean over tasks of each task's mean; the
    number of rows, their tasks, and the rows in which nothing was answered (None where rows do not say)."""

    mean: Mapping[tuple[str, str, float], float]
    rows: int
    tasks: tuple[str, ...]
    nulls: int | None

    @property
    def regimes(self) -> list[str]:
        """Regimes, sorted."""
        return sorted({regime for regime, _, _ in self.mean})

    def budgets(self, regime: str) -> list[float]:
        """Those that policies were given, the full cache apart."""
        return sorted({budget for own, _, budget in self.mean if own == regime and budget != FULL})

    def full(self, regime: str) -> float | None:
        """The full cache's mean: the ceiling."""
        found = [mean for (own, _, budget), mean in self.mean.items() if (own, budget) == (regime, FULL)]
        return found[0] if found else None

    def ranked(self, regime: str, budget: float) -> list[tuple[str, float]]:
        """Policies at one budget, the best first."""
        own = [(policy, mean) for (r, policy, b), mean in self.mean.items() if (r, b) == (regime, budget)]
        return sorted(own, key=lambda pair: (-pair[1], pair[0]))


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


def scores_of(rows: list[dict[str, Any]]) -> Scores:
    """Means of rows: of each task first, so that tasks count alike."""
    groups: dict[tuple[str, str, float], dict[str, list[float]]] = {}
    for row in rows:
        budget = float(row.get("budget", row.get("keep_ratio", FULL)))
        cell = (str(row.get("regime", "any")), str(row.get("policy", "?")), budget)
        own = groups.setdefault(cell, {}).setdefault(str(row.get("task", "?")), [])
        own.append(float(row.get("score", row.get("exact", 0.0))))
    mean = {cell: fmean(fmean(own) for own in tasks.values()) for cell, tasks in groups.items()}
    nulls = sum(bool(row["null"]) for row in rows) if any("null" in row for row in rows) else None
    return Scores(mean, len(rows), tuple(sorted({str(row.get("task", "?")) for row in rows})), nulls)


def describe_results(folder: Path) -> tuple[list[tuple[str, str]], Scores]:
    """Lines of words, and the means.

    Raises:
        ValueError: manifest or rows are damaged.
    """
    path = folder / MANIFEST
    manifest = read_mapping(path) if path.is_file() else {}

    def stated(name: str) -> str:
        return str(manifest.get(name, "not stated"))

    rows = read_items(folder)
    scores, config = scores_of(rows), manifest.get("config", {})
    units = manifest.get("samples", {}).get("units")
    done = len({row.get("unit") for row in rows})
    state = f"finished {manifest['finished']}" if "finished" in manifest else "not finished"
    state += f"; {done} of {units} units have rows" if units else f"; {done} units have rows"
    if not manifest:
        state = "unknown: no manifest.json says what made these rows"
    codes = manifest.get("code_states") or [manifest["code"]] if "code" in manifest else []
    made = [f"{str(one.get('commit'))[:12]} ({'clean' if one.get('clean') else 'scratch'})" for one in codes]
    versions = manifest.get("environment", {}).get("versions", {})
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if versions.get(name))
    nulls = "" if scores.nulls is None else f" ({scores.nulls:,} without an answer, counted as 0)"
    lines = [
        ("run", f"{stated('run')}, identity {stated('identity_sha')}"),
        ("state", f"{state}; started {stated('started')}"),
        ("code", ", ".join(made) or "not stated"),
        ("machine", f"{manifest.get('environment', {}).get('device', 'not stated')}; {shown}"),
        ("config", _config(config)),
        ("tasks", f"{len(scores.tasks)}: {', '.join(scores.tasks) or 'none yet'}"),
        ("rows", f"{scores.rows:,}{nulls}, in {len(scores.mean)} cells (regime x policy x budget)"),
    ]
    for regime in scores.regimes:
        if (full := scores.full(regime)) is not None:
            lines.append((regime, f"full cache {100 * full:.1f}"))
        for budget in scores.budgets(regime):
            best = scores.ranked(regime, budget)
            names = ", ".join(f"{policy} {100 * mean:.1f}" for policy, mean in best[:SHOWN])
            more = f" and {len(best) - SHOWN} below" if len(best) > SHOWN else ""
            lines.append((f"{regime} at {budget:g}", f"{names}{more}"))
    lines.append(("scores", "means over tasks, in per cent; which differences are firm is in report.md"))
    return lines, scores


def score_lines(scores: Scores) -> list[Panel]:
    """Score against budget, a panel a regime, the full cache dashed; the best `SHOWN` policies of each."""
    looks = looks_of(sorted({policy for _, policy, budget in scores.mean if budget != FULL}))
    panels: list[Panel] = []
    for regime in scores.regimes:
        budgets = scores.budgets(regime)
        best = [policy for policy, _ in scores.ranked(regime, budgets[-1])][:SHOWN] if budgets else []
        series = []
        for policy in best:
            own = [
                (b, 100 * mean)
                for (r, p, b), mean in sorted(scores.mean.items())
                if (r, p) == (regime, policy) and b in budgets
            ]
            series.append(Series(policy, looks[policy], *zip(*own, strict=True)))
        full = scores.full(regime)
        rules = () if full is None else ((100 * full, "full cache"),)
        label = "budget (below 1: kept / seen; else tokens a head)"
        ticks = tuple(budgets)
        panels.append(
            Lines(regime, label, "score, %", tuple(series), ticks, log_x=bool(budgets), rules=rules)
        )
    return panels or [Lines("no rows yet", "", "score, %", ())]


def _config(config: Mapping[str, Any]) -> str:
    """Short values of a config, in a line."""
    parts = []
    for name, value in config.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        if value not in (None, [], {}) and not isinstance(value, dict) and len(str(shown)) <= 60:
            parts.append(f"{name} {shown}")
    return "; ".join(parts) or "not stated"
