"""Draws a training run: loss and overlap over the steps, and held-out overlap of every head.

Overlap is drawn beside scores that cost no training (random, recency, value norm) and on a fixed scale from 0
to 1, so that two runs' pictures can be compared at a glance.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MISSING = (
    'there are no curves: matplotlib is not installed (pip install "retain[train]", then python -m '
    "retain.train.run.card FOLDER); the numbers are in log.jsonl."
)
CURVES, HEADS = "curves.png", "heads.png"

BASELINES = {
    "overlap_random": ("random", "#8c6d31"),
    "overlap_recency": ("recency", "#9467bd"),
    "overlap_value_norm": ("value norm", "#7f7f7f"),
}
# What is no term of the loss.
_NOT_TERMS = ("step", "loss", "overlap", "lr", "grad_norm", "documents", "tokens", "seconds", "held_out")


def draw_all(
    folder: Path, records: Sequence[Mapping[str, Any]], overlap_of: Mapping[str, Sequence[float]]
) -> tuple[list[str], str | None]:
    """Draw what there is to draw.

    Args:
        folder: where the pictures go.
        records: of `log.jsonl`.
        overlap_of: layer -> held-out overlap of each KV head; may be empty.

    Returns:
        names of the files; and a sentence, if matplotlib is missing.
    """
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
    return [
        sum(values[max(0, i + 1 - width) : i + 1]) / len(values[max(0, i + 1 - width) : i + 1])
        for i in range(len(values))
    ]


def draw_curves(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss with its terms, overlap with its baselines, and the learning rate with the gradient's norm.

    Args:
        records: of `log.jsonl`: one a step, and one for each look at the held-out documents.
        path: of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    steps = [record for record in records if "loss" in record]
    looks = [record for record in records if "held_out" in record]
    at = [record["step"] for record in steps]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.2))
    terms = [
        name
        for name, value in steps[0].items()
        if name not in _NOT_TERMS and isinstance(value, int | float) and not isinstance(value, bool)
    ]
    terms = [name for name in terms if any(record.get(name) for record in steps)]
    loss = [record["loss"] for record in steps]
    left.plot(at, loss, color="#c1272d", alpha=0.25, linewidth=0.8)
    left.plot(at, smoothed(loss), color="#c1272d", linewidth=1.8, label="loss (mean of 5 % of the run)")
    if len(terms) > 1:
        for name in terms:
            left.plot(
                at, smoothed([record.get(name, float("nan")) for record in steps]), linewidth=1, label=name
            )
    seen = [(record["step"], record["held_out"]["loss"]) for record in looks if "loss" in record["held_out"]]
    if seen:
        left.plot(*zip(*seen, strict=True), color="black", marker="o", markersize=4, label="held out")
    left.set(xlabel="step", title="loss")
    if all("overlap" in record for record in steps):
        overlap = [record["overlap"] for record in steps]
        middle.plot(at, overlap, color="#f28e2b", alpha=0.25, linewidth=0.8)
        middle.plot(at, smoothed(overlap), color="#f28e2b", linewidth=1.8, label="training")
    seen = [(r["step"], r["held_out"]["overlap"]) for r in looks if "overlap" in r["held_out"]]
    if seen:
        middle.plot(*zip(*seen, strict=True), color="black", marker="o", markersize=4, label="held out")
    for key, (label, color) in BASELINES.items():
        if looks and key in looks[0]["held_out"]:
            middle.axhline(looks[0]["held_out"][key], color=color, linestyle="--", linewidth=1, label=label)
    middle.set(xlabel="step", ylim=(0, 1), title="overlap with the target's top fifth")
    rates = [float(record["lr"]) for record in steps if "lr" in record]
    norms = [float(record["grad_norm"]) for record in steps if "grad_norm" in record]
    if len(norms) == len(steps):
        right.plot(at, norms, color="#1f77b4", linewidth=0.9, label="gradient norm, before clipping")
        if max(norms) > 0:
            right.set_yscale("log")
    right.set(xlabel="step", title="gradient norm and learning rate")
    if len(rates) == len(steps):
        twin = right.twinx()
        (line,) = twin.plot(at, rates, color="#2ca02c", linewidth=1.2, label="learning rate")
        twin.set_ylim(bottom=0)
        right.add_line(Line2D([], [], color=line.get_color(), label="learning rate (right axis)"))
    for axis in (left, middle, right):
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    _save(figure, path)


def draw_heads(overlap_of: Mapping[str, Sequence[float]], path: Path) -> None:
    """Held-out overlap of every layer and KV head, as a map with the numbers in it where they have room.

    Args:
        overlap_of: layer -> overlap of each head.
        path: of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = sorted(overlap_of, key=int)
    heads = max(len(overlap_of[layer]) for layer in layers)
    rows = [[*overlap_of[layer], *[float("nan")] * (heads - len(overlap_of[layer]))] for layer in layers]
    figure, axis = pyplot.subplots(figsize=(min(14, 3.2 + 0.55 * heads), min(16, 1.8 + 0.34 * len(layers))))
    image = axis.imshow(rows, aspect="auto", vmin=0, vmax=1, cmap="viridis")
    if len(layers) * heads <= 400:
        for row, own in enumerate(rows):
            for column, value in enumerate(own):
                if value == value:
                    color = "white" if value < 0.6 else "black"
                    axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    axis.set_yticks(range(len(layers)), layers, fontsize=8)
    axis.set_xticks(range(heads), [str(head) for head in range(heads)], fontsize=8)
    axis.set(xlabel="KV head", ylabel="layer", title="held-out overlap")
    figure.colorbar(image, ax=axis)
    figure.tight_layout()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    beside = path.with_name(path.stem + ".new.png")
    figure.savefig(beside, dpi=110)
    pyplot.close(figure)
    beside.replace(path)
