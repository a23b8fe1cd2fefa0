"""Tells for each regime, task and budget whether a comparison could show a difference at all.

A `Discrimination` puts the full cache's score beside the cell's and marks tasks on which the full cache
fails, on which all policies score alike, or whose answers were given before anything was evicted. The rule is
fixed and tested. `cells.json` has one entry for every cell and task.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retain.eval.config import CONTROLS, FULL
from retain.eval.run.results_store import read_rows
from retain.eval.stats.summary import Cell, Scores, gather, preset_of
from retain.eval.tasks.suite import Task
from retain.process.extras import deferred
from retain.process.provenance import write_json

with deferred("eval", "scipy", "scipy.stats", what="a comparison's statistics"):
    from scipy.stats import norm

CELLS = "cells.json"
# Two-sided; of a spread, over all pairs that it was picked from.
LEVEL = 0.05
# Lines of a table that are no method: the full cache, controls, chance.
NO_METHODS = (FULL, *CONTROLS, "random")


@dataclass(frozen=True)
class Discrimination:
    """Whether one task tells policies apart at one regime and budget. Scores in points of 100.

    Policies are those that were measured there, but for the full cache, the controls, and `random`, under
    any protection: that a method differs from a control or from chance does not say that methods differ.

    Attributes:
        yes: Whether it tells policies apart.
        why: In words, if it does not.
        ceiling: Mean of the full cache.
        best, worst: The policies with the highest and the lowest mean; empty where there is none.
        spread, noise: The one's mean minus the other's, and the noise that it must exceed.
        falls: Whether the worst policy falls below the full cache, so that eviction costs something here.
        fall, fall_noise: The full cache's mean minus the worst policy's, and the noise that it must exceed.
    """

    yes: bool
    why: str
    ceiling: float
    best: str
    worst: str
    spread: float
    noise: float
    falls: bool
    fall: float
    fall_noise: float


def discriminate(scores: Scores, regime: str, task: str, budget: float) -> Discrimination:
    """Say whether a task tells policies apart at one regime and budget, and whether they fall at all.

    With `x_p,i` the score of policy p on cluster i of n, k policies (see `Discrimination`), and

        above:   mean(x_full) > z_1 sd(x_full) / sqrt(n)                      the full cache is above 0
        apart:   mean(x_best - x_worst) > z_m sd(x_best - x_worst) / sqrt(n)  the spread is beyond its noise
        below:   mean(x_full - x_worst) > z_k sd(x_full - x_worst) / sqrt(n)  the fall is beyond its noise

    a task tells policies apart where it is above and apart, and something had been evicted by the last
    forward that gave a token of an answer; they fall where it is above and below. `z_m` is the normal
    quantile of `1 - LEVEL / (2 m)`, `m = k (k - 1) / 2` the pairs that best and worst were picked from, k
    the policies that the worst was; sd with n - 1. With one cluster nothing is known of the noise, and the
    answer to both is no, as it is without a policy; one policy has none that it could be told from.

    Raises:
        ValueError: If the full cache, or everything else, was not measured there.
    """
    full = Cell(regime, FULL, 1.0)
    cells = [cell for cell in scores.judged if (cell.regime, cell.budget) == (regime, budget)]
    if full not in scores.judged or task not in scores.judged[full] or not cells:
        known = ", ".join(f"{own:g}" for own in scores.budgets)
        raise ValueError(
            f"task {task!r} was not measured in regime {regime!r} at budget {budget:g}: there are tasks "
            f"{', '.join(scores.families)}, regimes {', '.join(scores.regimes)}, budgets {known}."
        )
    (whole,) = scores.strata(full, [task])
    methods = [cell for cell in cells if preset_of(cell.policy) not in NO_METHODS]
    own = {cell.policy: scores.strata(cell, [task])[0] for cell in methods}
    means = {name: float(values.mean()) for name, values in own.items()}
    ceiling, floor = float(whole.mean()), noise_of(whole, 1)
    best = max(means, key=means.__getitem__, default="")
    worst = min(means, key=means.__getitem__, default="")
    spread, noise, fall, fall_noise = 0.0, math.inf, 0.0, math.inf
    if own:
        fall, fall_noise = ceiling - means[worst], noise_of(whole - own[worst], len(own))
    if len(own) > 1:
        spread = means[best] - means[worst]
        noise = noise_of(own[best] - own[worst], len(own) * (len(own) - 1) // 2)
    if not ceiling > floor:
        why = (
            f"the full cache scores {ceiling:.1f}, no more than its own noise ({floor:.1f}): nothing can fall"
        )
    elif all(set(scores.attended.get((cell, task), ())) == {1.0} for cell in cells):
        why = "nothing had gone when the answer was given: all of it was computed before the first eviction"
        if regime == "decode":
            why += " (in this regime a first token always is, so a one-token answer shows nothing)"
    elif len(own) < 2:
        why = f"{len(own) or 'no'} policy was measured beside controls: there is nothing to tell apart"
    elif not spread > noise:
        why = f"best and worst differ by {spread:.1f}, no more than their noise ({noise:.1f})"
    else:
        why = ""
    falls = ceiling > floor and fall > fall_noise
    return Discrimination(
        not why, why, ceiling, best, worst, spread, noise, falls=falls, fall=fall, fall_noise=fall_noise
    )


def noise_of(values: np.ndarray, pairs: int) -> float:
    """Half the width of the normal interval of a mean, divided over so many pairs; infinite for a single
    value."""
    if len(values) < 2:
        return math.inf
    z = float(norm.ppf(1 - LEVEL / (2 * pairs)))
    return z * float(values.std(ddof=1)) / math.sqrt(len(values))


def cells_of(
    rows: Sequence[Mapping[str, Any]], tasks: Sequence[str] | Mapping[str, Task]
) -> list[dict[str, Any]]:
    """Describe every cell and task of a run: score, ceiling, flags, memory, evidence of answers, nulls.

    Args:
        rows: Of `items.jsonl`.
        tasks: In the order of the report's columns.
    """
    scores = gather(rows, tasks)
    of_policy = {row["policy"]: row for row in rows}
    of_task: dict[tuple[Cell, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        cell = Cell(row["regime"], row["policy"], float(row["budget"]))
        of_task.setdefault((cell, row["task"]), []).append(row)
    made: dict[tuple[str, str, float], Discrimination] = {}
    entries = []
    for cell in scores.judged:
        for task in scores.families:
            place = (cell.regime, task, cell.budget)
            if cell.budget != 1 and place not in made:
                made[place] = discriminate(scores, *place)
            told_apart, own, named = made.get(place), of_task[cell, task], of_policy[cell.policy]
            entries.append(
                {
                    "regime": cell.regime,
                    "policy": cell.policy,
                    "base_policy": named["base_policy"],
                    "protection": named["protection"],
                    "budget": cell.budget,
                    "task": task,
                    "score": float(scores.judged[cell][task].mean()),
                    "items": scores.num_items([task]),
                    "nulls": [list(where) for where in scores.nulls.get((cell, task), ())],
                    "ceiling": float(scores.judged[Cell(cell.regime, FULL, 1.0)][task].mean()),
                    "discriminative": None if told_apart is None else told_apart.yes,
                    "falls": None if told_apart is None else told_apart.falls,
                    "discrimination": None if told_apart is None else asdict(told_apart),
                    "keep_ratio": _range([row["kept_entries"] / row["seen_entries"] for row in own]),
                    "attended_ratio": _range(scores.attended.get((cell, task), ())),
                    "bytes_held": scores.memory[cell].bytes_held,
                    "bytes_beside": sum(row.get("bytes_beside", 0) for row in own) / len(own),
                    "gate_bytes": named["gate_bytes"],
                }
            )
    return entries


def _range(values: Sequence[float]) -> dict[str, float] | None:
    """Range of a cell's answers; None if unknown."""
    if not values:
        return None
    return {"lowest": min(values), "mean": sum(values) / len(values), "highest": max(values)}


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
