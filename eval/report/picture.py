"""The picture of a run: score against budget, one line a policy, the full cache dashed; or, of many
policies, a ranking. Of chosen ones, for a page or a paper:

    python -m retain.eval.report.picture results/RUN --policies NAME [NAME ...] [--out FILE.png]

Lines: one panel per regime and family. Ranking: one panel per regime. The one decision taken here: the ratios
are spaced evenly on a log axis, since a cache half the size is one step whatever the size was; and where
there are more policies than colours, their names do the telling apart.
"""

import argparse
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from retain.eval.config import FULL
from retain.eval.inspection.budget_picture import check_png
from retain.eval.report.html_page import tasks_of
from retain.eval.run.results_store import read_manifest, read_rows
from retain.eval.stats.significance import standard_error
from retain.eval.stats.summary import ALL, FAMILIES, Cell, Scores, gather, preset_of
from retain.process.command import status_of
from retain.process.extras import deferred
from retain.registry import suggest

with deferred("eval", "matplotlib", what="a picture"):
    import matplotlib

# Learned policies stand out; heuristics are cool, controls grey. A policy under another protection looks as
# under its own, but hollow and dashed; policies not named here take matplotlib's own.
LOOKS: dict[str, dict[str, Any]] = {
    "fused": {"color": "#c1272d", "linewidth": 2.4, "marker": "o"},
    "gate": {"color": "#f28e2b", "linewidth": 2.4, "marker": "s"},
    "snapkv": {"color": "#1f77b4", "marker": "^"},
    "defensive": {"color": "#2ca02c", "marker": "v"},
    "defensivekv": {"color": "#98df8a", "marker": "<"},
    "defensive_layer": {"color": "#bcbd22", "linestyle": "--", "marker": ">"},
    "h2o": {"color": "#17becf", "marker": "D"},
    "keydiff": {"color": "#e377c2", "marker": "P"},
    "cake": {"color": "#006d2c", "marker": "h"},
    "lava": {"color": "#8c564b", "marker": "d"},
    "recency": {"color": "#9467bd", "marker": "x"},
    "random": {"color": "#8c6d31", "marker": "+"},
    "token_identity": {"color": "#7f7f7f", "linestyle": ":", "marker": "."},
    "oracle": {"color": "#444444", "linestyle": "-.", "marker": "*"},
}

DASHES = ("--", (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))


def draw(scores: Scores, path: Path, *, title: str) -> None:
    """Write `scores.png`.

    Bands are +-1.96 standard errors of the mean over tasks, clipped to 0..100; they show how firm a line is.
    Whether two lines differ is a paired question, answered by the tables of the report.

    Args:
        scores: Of the run.
        path: Where to write.
        title: Above all panels.
    """
    matplotlib.use("Agg")
    from matplotlib import pyplot

    families = [family for family in FAMILIES if scores.tasks(family)]
    shape = (len(scores.regimes), len(families))
    beside = max(1.6, 0.5 + 0.075 * max(map(len, scores.policies)))  # inches for the legend
    figure, axes = pyplot.subplots(
        *shape, figsize=(5.2 * shape[1] + beside + 0.2, 3.6 * shape[0] + 0.6), sharey=True, squeeze=False
    )
    ratios = scores.budgets
    others = [*dict.fromkeys(name.partition("+")[2] for name in scores.policies if "+" in name)]
    for row, regime in enumerate(scores.regimes):
        for column, family in enumerate(families):
            axis, tasks = axes[row, column], scores.tasks(family)
            for policy in scores.policies:
                cells = [Cell(regime, policy, ratio) for ratio in ratios]
                cells = [cell for cell in cells if cell in scores.exact]
                if not cells:
                    continue
                means = [scores.mean(cell, tasks) for cell in cells]
                halves = [1.96 * standard_error(scores.strata(cell, tasks)) for cell in cells]
                places = [cell.budget for cell in cells]
                look: dict[str, Any] = {"linewidth": 1.5, "markersize": 5, **_look(policy, others)}
                (line,) = axis.plot(places, means, label=policy, **look)
                low = [max(0.0, mean - half) for mean, half in zip(means, halves, strict=True)]
                high = [min(100.0, mean + half) for mean, half in zip(means, halves, strict=True)]
                axis.fill_between(places, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
            full = Cell(regime, "full", 1.0)
            if full in scores.exact:
                axis.axhline(
                    scores.mean(full, tasks), color="black", linestyle="--", linewidth=1, label="full cache"
                )
            axis.set_xscale("log")
            axis.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
            axis.minorticks_off()
            axis.set_ylim(-3, 103)
            axis.grid(alpha=0.25)
            axis.set_title(
                f"{regime}, {family} families ({len(tasks)} task{'s' * (len(tasks) > 1)})", fontsize=10
            )
            if row == shape[0] - 1:
                mixed = any(ratio > 1 for ratio in ratios)
                axis.set_xlabel(
                    "budget: keep_ratio, tokens per head" if mixed else "keep_ratio (kept / seen)"
                )
            if column == 0:
                axis.set_ylabel("score, %")
    # A control has a line only where prefills are shared: no panel alone knows all.
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    labels = [name for name in (*scores.policies, "full cache") if name in lines]
    figure.legend([lines[name] for name in labels], labels, loc="center right", fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout(rect=(0, 0, 1 - beside / figure.get_figwidth(), 1))
    _save(figure, path)


def _look(policy: str, others: Sequence[str]) -> Mapping[str, Any]:
    """As in `LOOKS`; dashed in a way of its own under each of the other protections."""
    own, protection = LOOKS.get(preset_of(policy), {}), policy.partition("+")[2]
    if not protection:
        return own
    return own | {"linestyle": DASHES[others.index(protection) % len(DASHES)], "markerfacecolor": "white"}


def draw_ranking(scores: Scores, path: Path, *, title: str, variants: Collection[str] = ()) -> None:
    """Write `scores.png` of many policies: a row each, sorted by the mean over all tasks at the middle
    budget.

    The large dot is the middle ratio with +-1.96 standard errors, the line reaches from the lowest to the
    highest ratio. Variants are hollow.

    Args:
        scores: Of the run.
        path: Where to write.
        title: Above all panels.
        variants: Names of policies that are no presets.
    """
    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks, ratios = scores.tasks(ALL), scores.budgets
    middle = ratios[len(ratios) // 2]
    names = [name for name in scores.policies if name != "full"]
    figure, axes = pyplot.subplots(
        1,
        len(scores.regimes),
        figsize=(6.4 * len(scores.regimes), 0.19 * len(names) + 1.6),
        squeeze=False,
    )
    for axis, regime in zip(axes[0], scores.regimes, strict=True):
        own = [name for name in names if Cell(regime, name, middle) in scores.exact]
        own.sort(key=lambda name: scores.mean(Cell(regime, name, middle), tasks))
        for place, name in enumerate(own):
            cells = [Cell(regime, name, ratio) for ratio in ratios]
            means = [scores.mean(cell, tasks) for cell in cells if cell in scores.exact]
            cell = Cell(regime, name, middle)
            color = "#c1272d" if name in scores.learned else "#8a8a8a" if name in variants else "#1f5f99"
            fill = "white" if name in variants else color
            axis.plot([min(means), max(means)], [place, place], color=color, linewidth=1, alpha=0.45)
            half = 1.96 * standard_error(scores.strata(cell, tasks))
            half = half if math.isfinite(half) else 0.0  # nothing is known of a single item's error
            axis.errorbar(
                scores.mean(cell, tasks),
                place,
                xerr=half,
                fmt="o",
                color=color,
                markerfacecolor=fill,
                markersize=5,
                elinewidth=2.2,
            )
        full = Cell(regime, "full", 1.0)
        if full in scores.exact:
            axis.axvline(scores.mean(full, tasks), color="black", linestyle="--", linewidth=1)
        axis.set_yticks(range(len(own)), own, fontsize=8)
        for label, name in zip(axis.get_yticklabels(), own, strict=True):
            label.set_color("#777777" if name in variants else "black")
        axis.set_ylim(-0.8, len(own) - 0.2)
        axis.set_xlim(-2, 102)
        axis.grid(axis="x", alpha=0.3)
        axis.set_xlabel("score, %")
        axis.set_title(f"{regime}, mean over {len(tasks)} tasks", fontsize=10)
    reach = f"dot: budget {middle:g}; line: {ratios[0]:g} to {ratios[-1]:g}; dashed: full cache"
    figure.suptitle(f"{title}\n{reach}; red: learned, hollow: variants", fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    beside = path.with_name(path.stem + ".new.png")
    figure.savefig(beside, dpi=120)
    pyplot.close(figure)
    beside.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw chosen policies of a run, each a line, in the order in which they are named."""
    parser = argparse.ArgumentParser(description="Draw score against budget for some policies of a run.")
    parser.add_argument("folder", type=Path, help="results/<run>")
    parser.add_argument("--policies", nargs="+", required=True, help="lines of the run")
    parser.add_argument("--out", type=Path, help="a PNG; default: chosen.png in the folder")
    given = parser.parse_args(arguments)
    out = given.out or given.folder / "chosen.png"
    try:
        check_png(out)
        manifest, rows = read_manifest(given.folder), read_rows(given.folder)
        there = {row["policy"] for row in rows}
        unknown = [f"{name!r}{suggest(name, sorted(there))}" for name in given.policies if name not in there]
        if unknown:
            raise ValueError(
                f"not measured in {given.folder}: {'; '.join(unknown)}. Measured: {', '.join(sorted(there))}."
            )
        drawn = {name: place for place, name in enumerate((FULL, *given.policies))}
        rows = sorted((row for row in rows if row["policy"] in drawn), key=lambda row: drawn[row["policy"]])
        title = f"{manifest['config']['run']}: score at equal memory, mean over tasks"
        draw(gather(rows, tasks_of(manifest)), out, title=title)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"Picture: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))
