"""Panels of a run's scores: against budget, or of many policies as a ranking, and differences as a forest.

`scores.png` of chosen policies, for a page or a paper:

    python -m retain.eval.report.picture results/RUN --policies NAME [NAME ...] [--out FILE.png]
"""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from retain.eval.config import FULL
from retain.eval.report.plots import (
    COLOURS,
    UNKNOWN,
    VERDICTS,
    Dot,
    Lines,
    Look,
    Panel,
    Rows,
    Series,
    check_png,
    looks_of,
    save_png,
)
from retain.eval.report.run import MANY, Run, parser_of
from retain.eval.report.tables import families_of, half_of
from retain.eval.stats.comparisons import Judged, Place, budget_name, is_bound
from retain.eval.stats.summary import Cell, Scores, gather
from retain.process.command import command
from retain.registry import suggest

SHAPES = {"better": "^", "worse": "v", "equivalent": "s", "identical": "s"}


def draw(
    scores: Scores,
    path: Path,
    *,
    title: str,
    variants: Collection[str] = (),
    names: Sequence[str] | None = None,
) -> None:
    """Write a picture: a row of panels a regime, of all policies or of those named."""
    looks = looks_of(scores.policies if names is None else names)
    rows = [score_panels(scores, regime, looks, variants) for regime in scores.regimes]
    if len(looks) > MANY:
        title += "\nline: all budgets; orange: learned; grey: controls; hollow: variants; dashed: full cache"
    save_png(rows, path, title=title)


def score_panels(
    scores: Scores, regime: str, looks: Mapping[str, Look], variants: Collection[str] = ()
) -> list[Panel]:
    """Score against budget with bands, or of many policies a ranking; a panel a family and kind of budget.

    Bands are ±1.96 standard errors of the mean over tasks: how firm one line is. Whether two lines differ is
    a paired question, which tables answer. Shares and numbers of tokens do not share an axis.
    """
    kinds = {
        "keep_ratio (kept / seen)": [budget for budget in scores.budgets if budget < 1],
        "tokens per head": [budget for budget in scores.budgets if budget > 1],
    }
    panels: list[Panel] = []
    for family in families_of(scores):
        tasks = scores.tasks(family)
        title = f"{regime}, {family} ({len(tasks)} task{'s' * (len(tasks) > 1)})"
        full = Cell(regime, FULL, 1.0)
        ceiling = scores.mean(full, tasks) if full in scores.exact else None
        rules, reach = () if ceiling is None else ((ceiling, "full cache"),), (-3.0, 103.0)
        for kind, budgets in kinds.items():
            if not budgets:
                continue
            if len(looks) > MANY:
                middle = f"{title}, {budget_name(budgets[len(budgets) // 2])}"
                names, dots = _ranked(scores, regime, tasks, budgets, looks, variants)
                panels.append(Rows(middle, "score, %", names, dots, (-2.0, 102.0), ceiling))
            else:
                series = _series(scores, regime, tasks, budgets, looks)
                ticks = tuple(budgets)
                panels.append(Lines(title, kind, "score, %", series, ticks, reach, log_x=True, rules=rules))
        if not scores.budgets:
            panels.append(Lines(title, "no budget was measured", "score, %", (), y_range=reach, rules=rules))
    return panels


def _series(
    scores: Scores, regime: str, tasks: Sequence[str], budgets: Sequence[float], looks: Mapping[str, Look]
) -> tuple[Series, ...]:
    series = []
    for name, look in looks.items():
        cells = [cell for budget in budgets if (cell := Cell(regime, name, budget)) in scores.exact]
        if cells:
            means = [scores.mean(cell, tasks) for cell in cells]
            halves = [_known_half(scores, cell, tasks) for cell in cells]
            low = tuple(max(0.0, mean - half) for mean, half in zip(means, halves, strict=True))
            high = tuple(min(100.0, mean + half) for mean, half in zip(means, halves, strict=True))
            series.append(Series(name, look, tuple(cell.budget for cell in cells), tuple(means), low, high))
    return tuple(series)


def _known_half(scores: Scores, cell: Cell, tasks: Sequence[str]) -> float:
    """Half of the band, 0 where too few items say nothing of it."""
    half = half_of(scores, cell, tasks)
    return 0.0 if math.isnan(half) else half


def _ranked(
    scores: Scores,
    regime: str,
    tasks: Sequence[str],
    budgets: Sequence[float],
    looks: Mapping[str, Look],
    variants: Collection[str],
) -> tuple[tuple[tuple[int, str], ...], tuple[Dot, ...]]:
    """The best first, each a named row: the middle budget with its band, and a thin line over all budgets."""
    middle = budgets[len(budgets) // 2]
    names = [name for name in looks if Cell(regime, name, middle) in scores.exact]
    names.sort(key=lambda name: -scores.mean(Cell(regime, name, middle), tasks))
    dots = []
    for height, name in enumerate(names):
        cell, every = Cell(regime, name, middle), (Cell(regime, name, budget) for budget in budgets)
        means = [scores.mean(own, tasks) for own in every if own in scores.exact]
        mean, half = scores.mean(cell, tasks), _known_half(scores, cell, tasks)
        colour = COLOURS[1 if name in scores.learned else -1 if is_bound(name) else 0]
        about, reach = f"{name}: {mean:.1f} ± {half:.1f}", (min(means), max(means))
        ends = (max(0.0, mean - half), min(100.0, mean + half))
        dots.append(Dot(height, mean, *ends, about, colour, "o", name in variants, reach))
    return tuple(enumerate(names)), tuple(dots)


def forest_panels(judged: Sequence[Judged], margin: float) -> list[Panel]:
    """Differences from the best heuristic, a panel a place, all on one axis; verdicts differ in shape as well
    as in colour."""
    by_place: dict[Place, list[Judged]] = {}
    for one in judged:
        if one.policy != FULL and not one.result.interval.undefined:
            by_place.setdefault(one.place, []).append(one)
    drawn = [one.result.interval for lines in by_place.values() for one in lines]
    reach = 1.04 * max([2 * margin, *(max(abs(own.low), abs(own.high)) for own in drawn)])
    panels: list[Panel] = []
    for place, lines in by_place.items():
        lines.sort(key=lambda one: -one.result.estimate)
        dots = []
        for height, one in enumerate(lines):
            own, word = one.result.interval, one.result.verdict
            about = f"{one.policy}: {own.estimate:+.1f} [{own.low:+.1f}, {own.high:+.1f}], {word}"
            colour = VERDICTS.get(word, UNKNOWN)
            hollow = word == "inconclusive"
            dots.append(
                Dot(height, own.estimate, own.low, own.high, about, colour, SHAPES.get(word, "o"), hollow)
            )
        title = f"{place.regime}, {budget_name(place.budget)}, {place.family}"
        names = tuple(enumerate(one.policy for one in lines))
        label = f"minus {lines[0].baseline}, points"
        panels.append(Rows(title, label, names, tuple(dots), (-reach, reach), 0.0, margin))
    return panels


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Draw chosen policies of a run, each a line, in the order in which they are named."""
    parser = parser_of("Draw score against budget for some policies of a run.")
    parser.add_argument("--policies", nargs="+", required=True, help="lines of the run")
    parser.add_argument("--out", type=Path, help="a PNG; default: chosen.png in the folder")
    given = parser.parse_args(arguments)
    out = given.out or given.folder / "chosen.png"
    check_png(out)
    run = Run.read(given.folder)
    there = {row["policy"] for row in run.rows}
    unknown = [f"{name!r}{suggest(name, sorted(there))}" for name in given.policies if name not in there]
    if unknown:
        raise ValueError(
            f"not measured in {given.folder}: {'; '.join(unknown)}. Measured: {', '.join(sorted(there))}."
        )
    order = {name: place for place, name in enumerate((FULL, *given.policies))}
    rows = sorted((row for row in run.rows if row["policy"] in order), key=lambda row: order[row["policy"]])
    draw(gather(rows, run.tasks), out, title=run.title)
    print(f"Picture: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
