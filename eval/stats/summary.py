"""Summarises the rows of a run: scores by cell, and paired comparisons.

A cell is (regime, policy, budget). Its scores are kept per task as arrays over the same (seed, item) pairs in
the same order for every cell, so that a difference of two cells is a subtraction. If every seed has items of
its own each pair is a cluster; if all seeds answer the same items (`Task.seeded` is False) the item is, and
its seeds are averaged before anything is tested. Everything is in points of 100.

Comparisons are fixed before any number is seen, and every verdict is that of a declared family
(`compare_family`): the interval excludes 0 and the Holm-adjusted test passes.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from retain.eval.stats.paired_result import PairedResult, adjust, compare_paired
from retain.eval.stats.significance import Interval, Verdict, macro_mean
from retain.eval.tasks.suite import Task
from retain.presets import policies

FAMILIES = ("seen", "held-out")
ALL = "all"  # tasks of both families
ALPHA = 0.05


@cache
def measured_beforehand() -> frozenset[str]:
    """Presets that need something trained or measured: gates, weights of heads."""
    return frozenset(one.name for one in policies() if {"gates", "weights"} & one.needs)


@cache
def with_gates() -> frozenset[str]:
    """Presets that take gates."""
    return frozenset(one.name for one in policies() if "gates" in one.needs)


@cache
def heuristics() -> tuple[str, ...]:
    """Presets that need nothing trained or measured beforehand, in their order; no variants or controls, and
    none that evicts nothing."""
    evicting = [one.name for one in policies()]
    return tuple(name for name in evicting if name not in ("full", *measured_beforehand()))


def preset_of(label: str) -> str:
    """The policy that a label of tables names, under any protection."""
    return label.partition("+")[0]


class Cell(NamedTuple):
    """One line of a table at one budget: below 1 a keep_ratio, from 2 on tokens per head; the full cache's
    is 1."""

    regime: str
    policy: str
    budget: float


@dataclass(frozen=True)
class Memory:
    """Memory of a cell, per item: entries and bytes, and the realised kept / seen; bytes of its gates."""

    kept_entries: float
    bytes_held: float
    bytes_full: float
    lowest_ratio: float
    highest_ratio: float
    gate_bytes: int


@dataclass(frozen=True)
class Scores:
    """All scores of a run, aligned.

    Attributes:
        exact: Per cell and task, exact match of each (seed, item), 0 to 100; of an item with several
            questions, their mean.
        partial: The same for the share of the answer found.
        memory: Per cell.
        seeds: Per task, the seed of each value.
        clusters: Per task, the cluster of each value, 0 to C - 1: values of one are averaged.
        families: Per task, "seen" or "held-out"; in the order of the report's columns.
        judged: As `exact`, of the score that each task is judged by: all means and comparisons are made
            of it.
        nulls: Per cell and task that has any, (seed, item, question) of every empty answer, each of score 0.
        attended: Per cell and task, `Row.attended_ratio` of every answer; only where all rows say so.
        trained: Policies that something trained or measured beforehand belongs to, as rows say
            (`Row.trained`); rows of earlier runs say it by the bytes of their gates.
        gated: Those of them that gates belong to, as rows say (`Row.gates`, `Row.gate_bytes`).
    """

    exact: Mapping[Cell, Mapping[str, np.ndarray]]
    partial: Mapping[Cell, Mapping[str, np.ndarray]]
    memory: Mapping[Cell, Memory]
    seeds: Mapping[str, np.ndarray]
    clusters: Mapping[str, np.ndarray]
    families: Mapping[str, str]
    judged: Mapping[Cell, Mapping[str, np.ndarray]]
    nulls: Mapping[tuple[Cell, str], tuple[tuple[int, int, int], ...]]
    attended: Mapping[tuple[Cell, str], tuple[float, ...]] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    gated: frozenset[str] = frozenset()

    @property
    def learned(self) -> list[str]:
        """Policies that take gates, in the order of the rows: variants and other protections too. Presets are
        also known by name, for rows of older runs."""
        return [own for own in self.policies if own in self.gated or preset_of(own) in with_gates()]

    @property
    def regimes(self) -> list[str]:
        """Regimes measured, in the order of the rows."""
        return list(dict.fromkeys(cell.regime for cell in self.exact))

    @property
    def policies(self) -> list[str]:
        """Policies measured, in the order of the rows."""
        return list(dict.fromkeys(cell.policy for cell in self.exact))

    @property
    def budgets(self) -> list[float]:
        """All but the full cache's: keep_ratios, then tokens per head, each ascending."""
        return sorted({cell.budget for cell in self.exact if cell.budget != 1})

    def tasks(self, family: str) -> list[str]:
        """Tasks of a family, or all."""
        return [task for task, own in self.families.items() if family in (own, ALL)]

    def strata(self, cell: Cell, tasks: Iterable[str]) -> list[np.ndarray]:
        """Scores of a cell, one array per task, one number per cluster: means, intervals and tests are made
        of them."""
        made = []
        for task in tasks:
            values, counts = self.judged[cell][task], np.bincount(self.clusters[task])
            if not (counts == 1).all():
                values = np.bincount(self.clusters[task], weights=values) / counts
            made.append(values)
        return made

    def num_items(self, tasks: Iterable[str]) -> int:
        """Clusters of these tasks."""
        return sum(int(self.clusters[task].max()) + 1 for task in tasks)

    def mean(self, cell: Cell, tasks: Sequence[str]) -> float:
        """Mean over tasks of the mean score."""
        return float(macro_mean(*self.strata(cell, tasks)))

    def seed_means(self, cell: Cell, tasks: Sequence[str]) -> dict[int, float]:
        """Mean over tasks, for each seed apart."""
        seeds = sorted({int(seed) for task in tasks for seed in self.seeds[task]})
        parts = {s: [self.judged[cell][task][self.seeds[task] == s] for task in tasks] for s in seeds}
        return {s: float(macro_mean(*strata)) for s, strata in parts.items() if all(len(x) for x in strata)}


@dataclass(frozen=True)
class Comparison:
    """Policy minus baseline at one regime and budget, over the tasks of one family, in points.

    Where one of the two is the full cache, the budget is the other's.
    """

    policy: str
    baseline: str
    regime: str
    budget: float
    family: str
    result: PairedResult

    @property
    def interval(self) -> Interval:
        """Of the difference."""
        return self.result.interval

    @property
    def verdict(self) -> Verdict:
        """In the family that it was compared in."""
        return self.result.verdict


# Of what takes seconds in a large run only.
_bar = partial(tqdm, leave=False, delay=2)


def gather(rows: Iterable[Mapping[str, Any]], tasks: Sequence[str] | Mapping[str, Task] = ()) -> Scores:
    """Sort rows into aligned scores, in an order that does not depend on which unit finished first.

    Args:
        rows: Of `items.jsonl`.
        tasks: In the order of the report's columns; others follow by name. Of tasks, and not only names, it
            is known whether every seed has items of its own; names are taken to have.

    Raises:
        ValueError: If there are no rows, or a cell lacks items that another cell of its regime and task has.
    """
    found, families = _sorted_rows(rows, tasks)
    places = {task: sorted(next(iter(found.values())).get(task, {})) for task in families}
    for cell, own in found.items():
        for task in families:
            if sorted(own.get(task, {})) != places[task]:
                raise ValueError(
                    f"{cell} has {len(own.get(task, {}))} items of task {task!r} where another cell has "
                    f"{len(places[task])}: the run is unfinished. Run eval/compare.py again, same config."
                )

    def column(*names: str) -> dict[Cell, dict[str, np.ndarray]]:
        """Per cell and task, means over an item's questions of the first of these fields that a row has."""

        def mean(questions: Mapping[int, Mapping[str, Any]]) -> float:
            scores = [next(row[name] for name in names if name in row) for row in questions.values()]
            return sum(100.0 * float(score) for score in scores) / len(scores)

        return {
            cell: {task: np.array([mean(own[task][place]) for place in places[task]]) for task in families}
            for cell, own in _bar(found.items(), desc=f"{names[0]} of cells", unit="cell")
        }

    def clusters_of(task: str) -> np.ndarray:
        fixed = isinstance(tasks, Mapping) and task in tasks and not tasks[task].seeded
        labels = [item if fixed else (seed, item) for seed, item in places[task]]
        number = {label: count for count, label in enumerate(dict.fromkeys(labels))}
        return np.array([number[label] for label in labels])

    memory, nulls, attended = {}, {}, {}
    trained, gated = set(), set()
    for cell, own in _bar(found.items(), desc="memory of cells", unit="cell"):
        answers = {task: [row for item in own[task].values() for row in item.values()] for task in own}
        for task, given in answers.items():
            ratios = [row.get("attended_ratio") for row in given]
            if None not in ratios:
                attended[cell, task] = tuple(float(ratio) for ratio in ratios if ratio is not None)
            empty = [(row["seed"], row["item"], row["question"]) for row in given if row.get("null", False)]
            if empty:
                nulls[cell, task] = tuple(sorted(empty))
        every = [row for given in answers.values() for row in given]
        memory[cell] = _memory(every)
        if any(row.get("trained") or row.get("gate_bytes") for row in every):
            trained.add(cell.policy)
        if any(row.get("gates") or row.get("gate_bytes") for row in every):
            gated.add(cell.policy)
    return Scores(
        exact=column("exact"),
        partial=column("partial"),
        memory=memory,
        seeds={task: np.array([seed for seed, _ in places[task]]) for task in families},
        clusters={task: clusters_of(task) for task in families},
        families=families,
        judged=column("score", "exact"),
        nulls=nulls,
        attended=attended,
        trained=frozenset(trained),
        gated=frozenset(gated),
    )


Items = dict[tuple[int, int], dict[int, Mapping[str, Any]]]


def _sorted_rows(
    rows: Iterable[Mapping[str, Any]], tasks: Iterable[str]
) -> tuple[dict[Cell, dict[str, Items]], dict[str, str]]:
    """Rows by cell (in the order of regimes), task, (seed, item) and question; the family of each task, in
    the order of the report's columns."""
    found: dict[Cell, dict[str, Items]] = {}
    families: dict[str, str] = {}
    for row in rows:
        # Rows of earlier runs knew one question, one kind of budget and one kind of score.
        cell = Cell(row["regime"], row["policy"], float(row.get("budget", row["keep_ratio"])))
        items = found.setdefault(cell, {}).setdefault(row["task"], {})
        items.setdefault((row["seed"], row["item"]), {})[row.get("question", 0)] = row
        families[row["task"]] = row["family"]
    if not found:
        raise ValueError(
            "There are no rows to report. Run eval/compare.py until at least one unit is finished."
        )
    names = [*(task for task in tasks if task in families), *sorted(set(families) - set(tasks))]
    ordered = {task: families[task] for family in FAMILIES for task in names if families[task] == family}
    return {cell: found[cell] for cell in sorted(found, key=lambda cell: cell.regime)}, ordered


def _memory(rows: Sequence[Mapping[str, Any]]) -> Memory:
    names = ("kept_entries", "seen_entries", "bytes_held", "bytes_full")
    kept, seen, held, full = np.array([[row[name] for name in names] for row in rows], dtype=np.float64).T
    ratio = kept / seen
    gates = max(row.get("gate_bytes", 0) for row in rows)
    return Memory(kept.mean(), held.mean(), full.mean(), ratio.min(), ratio.max(), gates)


def compare(
    scores: Scores, cell: Cell, baseline: Cell, family: str, *, margin: float, resamples: int
) -> Comparison | None:
    """Compare two cells on the tasks of a family, as a comparison by itself; None if a cell or the family was
    not measured."""
    if not _is_measured(scores, cell, baseline, family):
        return None
    own, other = (scores.strata(one, scores.tasks(family)) for one in (cell, baseline))
    result = compare_paired(own, other, margin=margin, alpha=ALPHA, resamples=resamples)
    budget = baseline.budget if cell.budget == 1 else cell.budget
    return Comparison(cell.policy, baseline.policy, cell.regime, budget, family, result)


def compare_family(
    scores: Scores, pairs: Sequence[tuple[Cell, Cell, str]], *, margin: float, resamples: int
) -> list[Comparison | None]:
    """Compare cells in pairs, each on the tasks of a family, and judge them together: one declared Holm
    family.

    Args:
        scores: Of the run.
        pairs: Cell, baseline and task family of each comparison, fixed by the config.
        margin: Largest difference that does not matter, in points.
        resamples: Of sign flips; more where a family is so large that fewer could not pass.

    Returns:
        One for each pair; None where it was not measured, which counts for nothing.
    """
    enough = max(resamples, math.ceil(4 * len(pairs) / ALPHA))
    shown = _bar(pairs, desc="paired tests", unit="test")
    made = [compare(scores, *pair, margin=margin, resamples=enough) for pair in shown]
    measured = {place: one for place, one in enumerate(made) if one is not None}
    if not measured:
        return made
    settled = adjust({place: one.result for place, one in measured.items()}, declared=list(measured))
    return [None if one is None else replace(one, result=settled[place]) for place, one in enumerate(made)]


def best_of(scores: Scores, names: Iterable[str], regime: str, budget: float, family: str) -> str | None:
    """The policy with the highest mean over a family's tasks, the first of several; None if none was
    measured."""
    tasks = scores.tasks(family)
    cells = [Cell(regime, name, budget) for name in names]
    measured = [cell for cell in cells if tasks and cell in scores.judged]
    return max(measured, key=lambda cell: scores.mean(cell, tasks)).policy if measured else None


def best_heuristic(scores: Scores, regime: str, keep_ratio: float, family: str) -> str | None:
    """The best of the presets that need nothing trained; None without heuristics or tasks."""
    names = [name for name in heuristics() if name not in scores.trained]
    return best_of(scores, names, regime, keep_ratio, family)


def learned_against_each(
    scores: Scores, *, margin: float, resamples: int, leave_out: Collection[str] = ()
) -> list[Comparison]:
    """Every learned policy minus every other policy, per regime, keep_ratio and family; all of one regime are
    one Holm family. Of two learned ones the later in the run's order minus the earlier.

    `leave_out` names policies that are neither side of a comparison, under any protection (variants).
    """
    learned = _not_left_out(scores.learned, leave_out)
    others = [name for name in _not_left_out(scores.policies, leave_out) if name not in learned]
    sides = [(own, other) for place, own in enumerate(learned) for other in (*others, *learned[:place])]
    made: list[Comparison | None] = []
    for regime in scores.regimes:
        pairs = [
            (Cell(regime, own, ratio), Cell(regime, other, 1.0 if other == "full" else ratio), family)
            for ratio in scores.budgets
            for own, other in sides
            for family in FAMILIES
        ]
        pairs = [pair for pair in pairs if _is_measured(scores, *pair)]
        made += compare_family(scores, pairs, margin=margin, resamples=resamples)
    return [one for one in made if one is not None]


def _not_left_out(labels: Iterable[str], leave_out: Collection[str]) -> list[str]:
    return [label for label in labels if preset_of(label) not in leave_out]


def _is_measured(scores: Scores, cell: Cell, baseline: Cell, family: str) -> bool:
    return bool(scores.tasks(family)) and cell in scores.exact and baseline in scores.exact
