"""The picture of a study: level minus winner with its interval, a column a regime, a row a level.

In: the entries over all tasks. Out: a PNG. The one decision taken here: zero is the winner, so what lies to
the left of it is what the winner's choice is worth; budgets are dots of one row, and tables are set apart.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retain.eval.stats.summary import ALL
from retain.eval.study.table import Entry
from retain.process.extras import deferred

with deferred("eval", "matplotlib", what="a picture"):
    import matplotlib

COLOURS = ("#00224e", "#3b6fb6", "#d98e04", "#8a8a8a", "#7b3294", "#1b7837")
# Room of a row, shared by its budgets.
SPREAD = 0.6


def draw_study(entries: Sequence[Entry], path: Path, *, title: str) -> None:
    """Write `study.png`.

    Args:
        entries: Of a study; those over all tasks are drawn.
        path: Where to write.
        title: Above all panels.
    """
    matplotlib.use("Agg")
    from matplotlib import pyplot

    own = [one for one in entries if one.family == ALL and one.made is not None]
    regimes = list(dict.fromkeys(one.regime for one in own))
    rows = list(dict.fromkeys((one.table, one.level) for one in own))
    budgets = sorted({one.budget for one in own})
    figure, axes = pyplot.subplots(
        1,
        max(1, len(regimes)),
        figsize=(3.4 * max(1, len(regimes)) + 2.2, 0.3 * len(rows) + 1.6),
        sharey=True,
        squeeze=False,
    )
    places = _places(rows)
    for axis, regime in zip(axes[0], regimes, strict=False):
        for number, budget in enumerate(budgets):
            shown = [one for one in own if (one.regime, one.budget) == (regime, budget)]
            _draw_budget(axis, shown, places, number, len(budgets), f"{budget:g}")
        axis.axvline(0.0, color="black", linewidth=1)
        axis.grid(axis="x", alpha=0.3)
        axis.set_title(regime, fontsize=10)
        axis.set_xlabel("level - winner, points", fontsize=9)
    axes[0, 0].set_yticks([*places.values()], [f"{table}: {level}" for table, level in places], fontsize=8)
    axes[0, 0].invert_yaxis()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=max(1, len(labels)), fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    beside = path.with_name(path.stem + ".new.png")
    figure.savefig(beside, dpi=120)
    pyplot.close(figure)
    beside.replace(path)


def _places(rows: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Heights of rows: one apart, and two thirds more between tables."""
    places, height = {}, 0.0
    for number, row in enumerate(rows):
        if number:
            height += 1.0 if row[0] == rows[number - 1][0] else 1.67
        places[row] = height
    return places


def _draw_budget(
    axis: Any,
    shown: Sequence[Entry],
    places: Mapping[tuple[str, str], float],
    number: int,
    count: int,
    label: str,
) -> None:
    """The dots of one budget; the interval of what has none is not drawn."""
    shift = SPREAD * ((number + 0.5) / count - 0.5)
    colour = COLOURS[number % len(COLOURS)]
    for one in shown:
        assert one.made is not None
        interval = one.made.interval
        if not interval.undefined:
            height = places[one.table, one.level] + shift
            axis.plot([interval.low, interval.high], [height, height], color=colour, linewidth=1.4)
    estimates = [one.made.interval.estimate for one in shown if one.made is not None]
    heights = [places[one.table, one.level] + shift for one in shown]
    axis.plot(estimates, heights, "o", color=colour, markersize=3.5, label=label)
