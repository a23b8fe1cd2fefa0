"""At how many bytes each policy of finished comparisons reaches a share of the full cache's score.

    python -m retain.eval.studies.reach results/smaller [results/smaller_rest ...] [--levels 95 99]

Of each line, its mean over tasks at every budget is a curve over the bytes that it held, as a share of the
full cache's (the rows' own counts, not the budget). It reaches a level at the fewest bytes from which on
every larger budget is at the level too, on a straight line between two budgets over the logarithm of bytes.
Intervals are percentiles over resamples of items, drawn within each task of each model; what lies below the
smallest budget or is not reached at the largest is said as such. Of several runs a line has the budgets of
all, and the items that all of these asked.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from retain.eval.config import FULL
from retain.eval.run.results_store import read_rows
from retain.process.command import command

# Share of resamples on either side of an interval.
TAIL = 0.025


@dataclass(frozen=True)
class Curve:
    """Scores of one line in one regime and family of tasks, item by item beside the full cache's.

    Args:
        strata: of each budget, in ascending order of bytes: an array a (model, task), `[items, 2]`: score of
            the line and of the full cache, in points of 100.
        bytes_held: of each budget, the mean share of the full cache's bytes.
    """

    strata: tuple[tuple[np.ndarray, ...], ...]
    bytes_held: tuple[float, ...]

    @cached_property
    def _stacked(self) -> list[np.ndarray]:
        """An array a (model, task), `[budgets, items, 2]`."""
        return [np.stack(budgets) for budgets in zip(*self.strata, strict=True)]

    def reached(self, level: float, draw: np.random.Generator | None = None) -> float:
        """Share of bytes at which a level is reached; 0 if at the smallest budget already, infinity if never.

        Args:
            level: share of the full cache's mean.
            draw: resamples items; None: the items as they are.
        """
        picked = self._stacked
        if draw is not None:
            picked = [own[:, draw.integers(own.shape[1], size=own.shape[1])] for own in picked]
        line, full = np.mean([own.mean(1) for own in picked], axis=0).T
        ratios = np.divide(line, full, out=np.ones_like(line), where=full > 0)
        first = len(ratios)
        while first and ratios[first - 1] >= level:
            first -= 1
        if first == len(ratios):
            return float("inf")
        if not first:
            return 0.0
        below, above = ratios[first - 1], ratios[first]
        part = (level - below) / (above - below)
        low, high = np.log(self.bytes_held[first - 1]), np.log(self.bytes_held[first])
        return float(np.exp(low + part * (high - low)))


def curves_of(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], Curve]:
    """Curves by regime, family and line, of the items on which a line was measured at all of its budgets."""
    full: dict[tuple[Any, ...], float] = {}
    cells: dict[tuple[str, str, str], dict[float, dict[tuple[Any, ...], Mapping[str, Any]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in rows:
        asked = row["seed"], row["task"], row["item"], row["question"]
        if row["policy"] == FULL:
            full[row["regime"], *asked] = 100 * row["score"]
        else:
            cells[row["regime"], row["family"], row["policy"]][row["budget"]][asked] = row
    curves = {}
    for (regime, family, policy), budgets in sorted(cells.items()):
        shared = sorted(set.intersection(*(set(own) for own in budgets.values())))
        parts = []
        for own in budgets.values():
            strata: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
            for asked in shared:
                strata[asked[:2]].append((100 * own[asked]["score"], full[regime, *asked]))
            share = float(np.mean([own[asked]["bytes_held"] / own[asked]["bytes_full"] for asked in shared]))
            parts.append((share, tuple(np.array(pairs) for pairs in strata.values())))
        parts.sort(key=lambda part: part[0])
        curves[regime, family, policy] = Curve(
            tuple(arrays for _, arrays in parts), tuple(share for share, _ in parts)
        )
    return curves


def shown(share: float, curve: Curve) -> str:
    """A share of bytes in percent, or on which side of the budgets it lies."""
    if share == 0.0:
        return f"< {100 * curve.bytes_held[0]:.1f}"
    return f"> {100 * curve.bytes_held[-1]:.1f}" if np.isinf(share) else f"{100 * share:.1f}"


def table(curves: Mapping[tuple[str, str, str], Curve], levels: Sequence[float], resamples: int) -> str:
    """A line a policy: bytes in percent of the full cache's, with intervals, by regime, family and level."""
    places = sorted({(regime, family) for regime, family, _ in curves})
    columns = [(regime, family, level) for regime, family in places for level in levels]
    head = ["policy", *(f"{regime}, {family}, {100 * level:g} %" for regime, family, level in columns)]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * len(columns)]
    for policy in dict.fromkeys(policy for _, _, policy in curves):
        row = [policy]
        for regime, family, level in columns:
            curve = curves.get((regime, family, policy))
            if curve is None:
                row.append("-")
                continue
            draw = np.random.default_rng(0)
            drawn = np.array([curve.reached(level, draw) for _ in range(resamples)])
            # Of what may be infinite no mean is taken between two resamples.
            low, high = np.quantile(drawn, [TAIL, 1 - TAIL], method="nearest")
            bounds = f"{shown(low, curve)}, {shown(high, curve)}"
            row.append(f"{shown(curve.reached(level), curve)} [{bounds}]")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of finished comparisons."""
    parser = argparse.ArgumentParser(description="Bytes at which policies reach a share of the full cache.")
    parser.add_argument("folders", type=Path, nargs="+", help="results/<run>; several are read as one")
    parser.add_argument("--levels", type=float, nargs="+", default=(95, 99), help="percent of the full cache")
    parser.add_argument("--resamples", type=int, default=2000, help="of items, for the intervals")
    given = parser.parse_args(arguments)
    curves = curves_of([row for folder in given.folders for row in read_rows(folder)])
    print("Bytes held, in percent of the full cache's [95 % interval over items]")
    print(table(curves, [level / 100 for level in given.levels], given.resamples))
    return 0


if __name__ == "__main__":
    sys.exit(main())
