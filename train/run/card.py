"""Writes the training card, `README.md` of an artifact: a Hugging Face model card, with the run's curves.

Every number is read from the run's files (`gates.json`, `log.jsonl`), and what a file does not hold is not in
the card; so a card can be made again at any time. Overlap is drawn with scores that cost no training (random,
recency, value norm) and on a fixed scale from 0 to 1, so that two runs' pictures can be compared at a glance.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retain.gates.artifact import read_metadata
from retain.gates.card import BASELINES, CARD, card_of
from retain.process.disk import write_new
from retain.process.extras import require
from retain.train.run.checkpoint import read_log

CURVES = "curves.png"
TITLE = "loss, and overlap where there is one, against the step"
COLORS = {"overlap_random": "#8c6d31", "overlap_recency": "#9467bd", "overlap_value_norm": "#7f7f7f"}


def write_card(folder: Path | str, *, command: str = "") -> Path:
    """Draws the curves, writes the card into the folder of a finished run, and returns its path. The
    `command` that started it is that of the artifact where none is given. ValueError: there is no artifact.
    """
    folder = Path(folder)
    metadata, records = read_metadata(folder), read_log(folder)
    pictures = {}
    if any("loss" in record for record in records):
        draw_curves(records, folder / CURVES)
        pictures = {CURVES: TITLE}
    card = card_of(metadata, records, command=command, pictures=pictures, place=str(folder))
    path = folder / CARD
    os.replace(write_new(path, f"{card}\n".encode()), path)
    return path


def draw_curves(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws loss and overlap over the steps, each with the looks at held-out documents, overlap also with its
    baselines."""
    with require("train", "matplotlib", what="the card of a run"):
        from matplotlib.figure import Figure

    steps = [record for record in records if "loss" in record]
    looks = [record for record in records if "held_out" in record]
    figure = Figure(figsize=(11, 4.2), layout="tight")
    axes = figure.subplots(1, 2)
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
        axis.grid(alpha=0.25)
    for key, label in BASELINES.items():
        if looks and key in looks[0]["held_out"]:
            height = looks[0]["held_out"][key]
            axes[1].axhline(height, color=COLORS[key], linestyle="--", linewidth=1, label=label)
    axes[1].set(ylim=(0, 1), title="overlap with the target's top fifth")
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def smoothed(values: Sequence[float], share: float = 0.05) -> list[float]:
    """Mean of the last `share` of the run at each step, at least of one value."""
    width = max(1, round(share * len(values)))
    windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
