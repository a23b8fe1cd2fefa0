"""Draws the score of every policy against the share of the cache that it holds."""

from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure
from pandas import DataFrame

from retain.eval.config import FULL
from retain.eval.report.table import line_words, where_words
from retain.eval.stats.scores import WHERE

# So many policies have colours that differ clearly; more take a map of twenty.
CLEAR = 8
MARKERS = "os^Dv*PX"


def draw(scores: "DataFrame", path: Path) -> None:
    """Write a PNG: a panel a (when, question), a line a policy, each in one colour on all panels.

    Args:
        scores: Of all lines (`retain.eval.stats.scores.scores`). Bars are 1.96 standard errors: how firm one
            score is. Whether two policies differ is a paired question, which tables answer.
        path: Of the picture.
    """
    groups = list(scores.groupby(WHERE, sort=False))
    lines = [line for line in dict.fromkeys(scores["line"]) if line != FULL]
    colours = colormaps["Dark2" if len(lines) <= CLEAR else "tab20"]
    shown = Figure(figsize=(1.0 + 3.6 * len(groups), 5.0), layout="constrained")
    panels = shown.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for panel, ((when, question), group) in zip(panels, groups, strict=True):
        for number, line in enumerate(lines):
            points = group[group["line"] == line].sort_values("keep_ratio")
            bars = (1.96 * points["error"]).where(points["error"] < 1e9, 0.0)
            how = {"color": colours(number % colours.N), "marker": MARKERS[number % len(MARKERS)]}
            panel.errorbar(points["keep_ratio"], points["score"], bars, elinewidth=0.8, label=line, **how)
        for score in group.loc[group["line"] == FULL, "score"]:
            panel.axhline(score, color="black", linestyle="--", label=line_words(FULL))
        ratios = group[group["line"] != FULL].groupby("budget")["keep_ratio"].mean()
        ticks = sorted({float(f"{ratio:.2g}") for ratio in ratios})
        panel.margins(x=0.12)
        panel.set(xscale="log", xlabel="share of the cache held")
        panel.set_xticks(ticks, [f"{100 * tick:g} %" for tick in ticks], minor=False)
        panel.set_xticks([], minor=True)
        panel.set_title(where_words(when, question).replace("; ", ";\n"), fontsize=10)
        panel.grid(color="#e0e0e0")
    panels[0].set_ylabel("score, points of 100")
    handles, labels = panels[0].get_legend_handles_labels()
    columns = max(1, round(1.6 * len(groups)))
    shown.legend(handles, labels, loc="outside lower center", frameon=False, ncols=columns)
    shown.savefig(path, dpi=110)
