"""What a cell could have shown: the full cache's score beside it, and whether it tells policies apart.

In: the scores of a run. Out: for each regime, task and budget a `Discrimination`, and `cells.json`, one entry
for every cell and task. The one decision taken here: whether a cell discriminates is said from its own
numbers, by a rule that is stated and tested. A task on which the full cache fails, or on which every policy
does alike, is marked, so that nobody reads "no difference" off a task that could not have shown one.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from retain.eval.record import read_rows
from retain.eval.summary import Cell, Scores, gather
from retain.eval.tasks import Task
from retain.provenance import write_json

CELLS = "cells.json"
# Two-sided; of a spread, over all pairs that it was picked from.
LEVEL = 0.05


@dataclass(frozen=True)
class Discrimination:
    """Whether one task tells policies apart at one regime and budget. Scores in points of 100.

    Attributes:
        yes: Whether it does.
        why: In words, if it does not.
        ceiling: Mean of the full cache.
        best, worst: Of the full cache and all policies, those with the highest and the lowest mean.
        spread: The one's mean minus the other's.
        noise: What a spread must exceed.
    """

    yes: bool
    why: str
    ceiling: float
    best: str
    worst: str
    spread: float
    noise: float


def discriminate(scores: Scores, regime: str, task: str, budget: float) -> Discrimination:
    """Say whether a task tells policies apart at one regime and budget.

    With `x_p,i` the score of policy p on cluster i of n, the full cache among the k policies, it does where

        mean(x_full) > z_1 sd(x_full) / sqrt(n)                 the full cache is above its floor, and
        mean(x_best - x_worst) > z_m sd(x_best - x_worst) / sqrt(n)       the spread is beyond its noise,

    `z_m` being the normal quantile of `1 - LEVEL / (2 m)`, `m = k (k - 1) / 2` the pairs that best and worst
    were picked from, and sd with n - 1. With one cluster nothing is known of the noise, and the answer is no.

    Args:
        scores: Of the run.
        regime, task, budget: Of the cell; its policies are those that were measured there.

    Raises:
        ValueError: If the full cache, or every policy, was not measured there.
    """
    full = Cell(regime, "full", 1.0)
    cells = [cell for cell in scores.judged if (cell.regime, cell.budget) == (regime, budget)]
    if full not in scores.judged or task not in scores.judged[full] or not cells:
        known = ", ".join(f"{own:g}" for own in scores.budgets)
        raise ValueError(
            f"task {task!r} was not measured in regime {regime!r} at budget {budget:g}: there are tasks "
            f"{', '.join(scores.families)}, regimes {', '.join(scores.regimes)}, budgets {known}."
        )
    own = {cell.policy: scores.strata(cell, [task])[0] for cell in (full, *cells)}
    means = {name: float(values.mean()) for name, values in own.items()}
    best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    ceiling, spread = means["full"], means[best] - means[worst]
    pairs = max(1, len(own) * (len(own) - 1) // 2)
    floor, noise = noise_of(own["full"], 1), noise_of(own[best] - own[worst], pairs)
    if not math.isfinite(floor):
        why = "a single item says nothing of its own noise"
    elif not ceiling > floor:
        why = (
            f"the full cache scores {ceiling:.1f}, no more than its own noise ({floor:.1f}): nothing can fall"
        )
    elif not spread > noise:
        why = f"best and worst differ by {spread:.1f}, no more than their noise ({noise:.1f})"
    else:
        why = ""
    return Discrimination(not why, why, ceiling, best, worst, spread, noise)


def noise_of(values: np.ndarray, pairs: int) -> float:
    """Half the width of the normal interval of a mean, shared out over so many pairs; infinite where there
    is one value."""
    if len(values) < 2:
        return math.inf
    z = float(norm.ppf(1 - LEVEL / (2 * pairs)))
    return z * float(values.std(ddof=1)) / math.sqrt(len(values))


def cells_of(
    rows: Sequence[Mapping[str, Any]], tasks: Sequence[str] | Mapping[str, Task]
) -> list[dict[str, Any]]:
    """Every cell and task of a run: score, ceiling, flag, memory, nulls.

    Args:
        rows: Of `items.jsonl`.
        tasks: In the order of the report's columns.
    """
    scores = gather(rows, tasks)
    labels = {row["policy"]: (row["base_policy"], row["protection"]) for row in rows}
    bytes_of = {row["policy"]: row["gate_bytes"] for row in rows}
    ratios: dict[tuple[Cell, str], list[float]] = {}
    for row in rows:
        cell = Cell(row["regime"], row["policy"], float(row["budget"]))
        ratios.setdefault((cell, row["task"]), []).append(row["kept_entries"] / row["seen_entries"])
    made: dict[tuple[str, str, float], Discrimination] = {}
    entries = []
    for cell in scores.judged:
        for task in scores.families:
            place = (cell.regime, task, cell.budget)
            if cell.budget != 1 and place not in made:
                made[place] = discriminate(scores, *place)
            told = made.get(place)
            own = ratios[cell, task]
            base, protection = labels[cell.policy]
            entries.append(
                {
                    "regime": cell.regime,
                    "policy": cell.policy,
                    "base_policy": base,
                    "protection": protection,
                    "budget": cell.budget,
                    "task": task,
                    "score": float(scores.judged[cell][task].mean()),
                    "items": scores.num_items([task]),
                    "nulls": [list(where) for where in scores.nulls.get((cell, task), ())],
                    "ceiling": float(scores.judged[Cell(cell.regime, "full", 1.0)][task].mean()),
                    "discriminative": None if told is None else told.yes,
                    "discrimination": None if told is None else asdict(told),
                    "keep_ratio": {"lowest": min(own), "mean": sum(own) / len(own), "highest": max(own)},
                    "bytes_held": scores.memory[cell].bytes_held,
                    "gate_bytes": bytes_of[cell.policy],
                }
            )
    return entries


def write_cells(folder: Path, tasks: Sequence[str] | Mapping[str, Task]) -> Path:
    """Write `cells.json` of a finished run.

    Raises:
        ValueError: If the run is unfinished.
    """
    path = folder / CELLS
    # Infinity (one cluster: nothing is known of the noise) is no JSON.
    cells = json.loads(json.dumps(cells_of(read_rows(folder), tasks)), parse_constant=lambda _: None)
    write_json(path, cells)
    return path
