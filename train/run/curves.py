"""Draws a training run: loss and overlap over the steps, and held-out overlap of every head.

Overlap is drawn beside scores that cost no training (random, recency, value norm) and on a fixed scale from 0
to 1, so that two runs' pictures can be compared at a glance.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retain.gates.card import BASELINES

MISSING = (
    'there are no curves: matplotlib is not installed (pip install "retain-kv[train]", then python -m '
    "retain.train.run.card FOLDER); the numbers are in log.jsonl."
)
CURVES, HEADS = "curves.png", "heads.png"

COLORS = {"overlap_random": "#8c6d31", "overlap_recency": "#9467bd", "overlap_value_norm": "#7f7f7f"}


def draw_all(
    folder: Path, records: Sequence[Mapping[str, Any]], overlap_of: Mapping[str, Sequence[float]]
) -> tuple[list[str], str | None]:
    """Draws the records of `log.jsonl` and the held-out overlap (layer -> of each KV head) into a folder;
    returns names of the files, and a sentence if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        return [], MISSING
    drawn = []
    if any("loss" in record for record in records):
        draw_curves(records, folder / CURVES)
        drawn.append(CURVES)
    if overlap_of:
        draw_heads(overlap_of, folder / HEADS)
        drawn.append(HEADS)
    return drawn, None


def smoothed(values: Sequence[float], share: float = 0.05) -> list[float]:
    """Mean of the last `share` of the run at each step, at least of one value."""
    width = max(1, round(share * len(values)))
    windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def draw_curves(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws loss and overlap over the steps, each with the looks at held-out documents, overlap also with its
    baselines."""
    steps = [record for record in records if "loss" in record]
    looks = [record for record in records if "held_out" in record]
    with _figure(path, 1, 2, figsize=(11, 4.2)) as axes:
        for axis, name, color in zip(axes, ("loss", "overlap"), ("#c1272d", "#f28e2b"), strict=True):
            at = [(record["step"], float(record[name])) for record in steps if name in record]
            if at:
                numbers, values = zip(*at, strict=True)
                axis.plot(numbers, values, color=color, alpha=0.25, linewidth=0.8)
                axis.plot(numbers, smoothed(values), color=color, linewidth=1.8, label="training, smoothed")
            seen = [(look["step"], look["held_out"][name]) for look in looks if name in look["held_out"]]
            if seen:
                axis.plot(*zip(*seen, strict=True), color="black", marker="o", markersize=4, label="held out")
            axis.set(xlabel="step", title=name)
        for key, label in BASELINES.items():
            if looks and key in looks[0]["held_out"]:
                height = looks[0]["held_out"][key]
                axes[1].axhline(height, color=COLORS[key], linestyle="--", linewidth=1, label=label)
        axes[1].set(ylim=(0, 1), title="overlap with the target's top fifth")
        for axis in axes:
            axis.grid(alpha=0.25)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8, frameon=False)


def draw_heads(overlap_of: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draws held-out overlap of every layer and KV head, as a map with the numbers in it where they have
    room."""
    layers = sorted(overlap_of, key=int)
    heads = max(len(overlap_of[layer]) for layer in layers)
    rows = [[*overlap_of[layer], *[float("nan")] * (heads - len(overlap_of[layer]))] for layer in layers]
    size = (min(14, 3.2 + 0.55 * heads), min(16, 1.8 + 0.34 * len(layers)))
    with _figure(path, figsize=size) as axis:
        image = axis.imshow(rows, aspect="auto", vmin=0, vmax=1, cmap="viridis")
        axis.figure.colorbar(image, ax=axis)
        shown = len(layers) * heads <= 400
        for row, layer in enumerate(layers if shown else ()):
            for column, value in enumerate(overlap_of[layer]):
                color = "white" if value < 0.6 else "black"
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
        axis.set_yticks(range(len(layers)), layers, fontsize=8)
        axis.set_xticks(range(heads), [str(head) for head in range(heads)], fontsize=8)
        axis.set(xlabel="KV head", ylabel="layer", title="held-out overlap")


@contextmanager
def _figure(path: Path, *grid: int, **options: Any) -> Iterator[Any]:
    """The axes of a new figure, which is written beside its path and renamed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*grid, **options)
    yield axes
    figure.tight_layout()
    beside = path.with_name(path.stem + ".new.png")
    figure.savefig(beside, dpi=110)
    pyplot.close(figure)
    beside.replace(path)
