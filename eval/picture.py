"""The picture of a run: score against keep_ratio, one line a policy, the full cache dashed.

One panel per regime and family. The one decision taken here: the ratios are spaced evenly on a log axis,
since a cache half the size is one step whatever the size was.
"""

from pathlib import Path
from typing import Any

import matplotlib

from retain.eval.significance import standard_error
from retain.eval.summary import FAMILIES, Cell, Scores

# Learned policies stand out; heuristics are cool, controls grey. Policies not named here take matplotlib's
# own.
LOOKS: dict[str, dict[str, Any]] = {
    "fused": {"color": "#c1272d", "linewidth": 2.4, "marker": "o"},
    "gate": {"color": "#f28e2b", "linewidth": 2.4, "marker": "s"},
    "snapkv": {"color": "#1f77b4", "marker": "^"},
    "defensive": {"color": "#2ca02c", "marker": "v"},
    "defensive_layer": {"color": "#98df8a", "marker": "<"},
    "h2o": {"color": "#17becf", "marker": "D"},
    "recency": {"color": "#9467bd", "marker": "x"},
    "random": {"color": "#8c6d31", "marker": "+"},
    "token_identity": {"color": "#7f7f7f", "linestyle": ":", "marker": "."},
    "oracle": {"color": "#444444", "linestyle": "-.", "marker": "*"},
}


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
    figure, axes = pyplot.subplots(
        *shape, figsize=(5.2 * shape[1] + 1.8, 3.6 * shape[0] + 0.6), sharey=True, squeeze=False
    )
    ratios = scores.keep_ratios
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
                places = [cell.keep_ratio for cell in cells]
                look: dict[str, Any] = {"linewidth": 1.5, "markersize": 5, **LOOKS.get(policy, {})}
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
                axis.set_xlabel("keep_ratio (kept / seen)")
            if column == 0:
                axis.set_ylabel("exact match, %")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout(rect=(0, 0, 1 - 1.6 / figure.get_figwidth(), 1))
    beside = path.with_name(path.stem + ".new.png")
    figure.savefig(beside, dpi=120)
    pyplot.close(figure)
    beside.replace(path)
