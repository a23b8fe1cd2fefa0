"""A run in a dozen plain lines: right answers by policy and budget, and the bytes that they were given from.

python -m retain.eval.report.brief results/RUN
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retain.eval.config import FULL
from retain.eval.run.results_store import read_rows
from retain.eval.stats.comparisons import budget_name
from retain.process.command import command

# When a question comes, by regime.
ASKED = {"context_only": "each asked after the eviction", "query_aware": "each read before the eviction"}


def brief(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines: one a policy, in the order of the run, the full cache first; an answer is right if all that
    was asked for is in it."""
    regimes = dict.fromkeys(row["regime"] for row in rows)
    if len(regimes) > 1:
        return [
            line for regime in regimes for line in brief([row for row in rows if row["regime"] == regime])
        ]
    tasks, (regime,) = dict.fromkeys(row["task"] for row in rows), regimes
    budgets = sorted({row["budget"] for row in rows if row["policy"] != FULL})
    wide = max(len(row["policy"]) for row in rows)
    asked = sum(row["policy"] == FULL for row in rows)
    lines = [
        f"{asked} questions ({', '.join(tasks)}), {ASKED.get(regime, regime)}; right answers:",
        " " * (wide + 2) + "".join(f"{budget_name(budget):>20}" for budget in budgets),
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = []
        for budget in (1.0,) if policy == FULL else budgets:
            own = [row for row in rows if row["policy"] == policy and row["budget"] == budget]
            right = sum(bool(row["exact"]) for row in own)
            mib = sum(row["bytes_held"] for row in own) / max(1, len(own)) / 2**20
            cells.append(f"{right} of {len(own)}, {mib:4.1f} MiB")
        lines.append(f"  {policy:<{wide}}" + "".join(f"{cell:>20}" for cell in cells))
    return lines


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a run's lines, and where its report is."""
    parser = argparse.ArgumentParser(
        prog="python -m retain.eval.report.brief", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("run", type=Path, help="folder of a run, results/RUN")
    folder = parser.parse_args(arguments).run
    print("\n".join(brief(read_rows(folder))))
    print(f"Picture: {folder / 'scores.png'}; report: {folder / 'report.html'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
