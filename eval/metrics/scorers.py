"""Lists metrics by name.

A card names a metric; metrics take a prediction and its right answers and give a score from 0 to 1. They
stand in four files: shared words and characters (`overlap`), named things (`found`), numbers and formulas
(`numbers`), steps (`steps`).

A name means one computation. If two programs call two computations by one name, both are here under two
names, so that a table's column is unambiguous.
"""

from collections.abc import Mapping

from retain.eval.metrics import found, numbers, overlap, steps
from retain.eval.metrics.overlap import Metric, first_line

__all__ = ["METRICS", "Metric", "first_line"]

METRICS: Mapping[str, Metric] = {
    metric.__name__: metric for metric in (*found.METRICS, *numbers.METRICS, *overlap.METRICS, *steps.METRICS)
}
