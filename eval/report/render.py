"""Writes the report of a run: `report.md`, `report.html` and `scores.png`, from its table alone.

retain report results/RUN
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from retain.eval.report.page import page_of
from retain.process.command import command
from retain.process.extras import require
from retain.process.provenance import write_text

REPORT, PAGE = "report.md", "report.html"


class Report(NamedTuple):
    """A report that was written: its beginning, for a terminal (the answer in words, and the table of
    scores), and the paths of `report.md` and `report.html`."""

    answer: str
    path: Path
    page: Path


def write_report(folder: Path) -> Report:
    """Writes the report of a finished run into its folder, `results/RUN`.

    Raises:
        ValueError: The folder holds no finished run, or `baseline` was not measured.
    """
    require("eval", "matplotlib", "pandas", "scipy", what="a report")
    from retain.eval.report.picture import draw
    from retain.eval.report.table import read
    from retain.eval.report.text import PICTURE, answer_of, rest_of
    from retain.eval.stats.scores import checked, comparisons, scores

    table = read(folder)
    config, frame = table.config, checked(table.frame)
    summary = scores(frame)
    compared = comparisons(
        frame,
        margin=config.get("margin_points", 2.0),
        resamples=config.get("resamples", 5000),
        baseline=config.get("baseline"),
    )
    answer = answer_of(table, summary, compared)
    text = "\n\n".join((answer, PICTURE, rest_of(table, summary, compared))) + "\n"
    draw(summary, folder / "scores.png")
    write_text(folder / REPORT, text)
    write_text(folder / PAGE, page_of(text, f"Comparison {config['run']}", folder))
    return Report(answer, folder / REPORT, folder / PAGE)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report of a run again, and print its answer."""
    parser = argparse.ArgumentParser(description="Write the report of a run again; no model is needed.")
    parser.add_argument("folder", type=Path, help="folder of a run, results/RUN")
    report = write_report(parser.parse_args(arguments).folder)
    print(f"{report.answer}\n\nReport: {report.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
