"""The picture of a study: level minus winner with its interval, a column a regime, a row a level.

Zero is the winner: what lies to the left of it is what the winner's choice is worth. Budgets are dots of one
row, and tables are set apart.
"""

from collections.abc import Sequence
from pathlib import Path

from retain.eval.report.plots import COLOURS, Dot, Panel, Rows, save_png
from retain.eval.stats.summary import ALL
from retain.eval.study.table import Entry

# Room of a row, shared by its budgets; and between two tables.
SPREAD, APART = 0.6, 1.67


def draw_study(entries: Sequence[Entry], path: Path, *, title: str) -> None:
    """Write `study.png` of the entries over all tasks."""
    own = [one for one in entries if one.family == ALL and one.made is not None]
    budgets = sorted({one.budget for one in own})
    heights: dict[tuple[str, str], float] = {}
    for one in own:
        if (one.table, one.level) not in heights:
            last = next(reversed(heights), None)
            step = 0.0 if last is None else 1.0 if last[0] == one.table else APART
            heights[one.table, one.level] = (heights[last] if last else 0.0) + step
    names = tuple((height, f"{table}: {level}") for (table, level), height in heights.items())
    panels: list[Panel] = []
    for regime in dict.fromkeys(one.regime for one in own):
        dots = []
        for one in own:
            if one.regime == regime and one.made is not None:
                place, i = budgets.index(one.budget), one.made.interval
                height = heights[one.table, one.level] + SPREAD * ((place + 0.5) / len(budgets) - 0.5)
                ends = (i.estimate, i.estimate) if i.undefined else (i.low, i.high)
                colour = COLOURS[place % len(COLOURS)]
                dots.append(Dot(height, i.estimate, *ends, one.level, colour, label=f"{one.budget:g}"))
        panels.append(Rows(regime, "level - winner, points", names, tuple(dots), rule=0.0))
    save_png([panels or [Rows("", "level - winner, points", (), ())]], path, title=title)
