"""Lists metrics by name, as cards name them.

A metric takes a prediction and its right answers and gives a score from 0 to 1. They stand in four files:
shared words and characters (`overlap`), named things (`found`), numbers and formulas (`numbers`), steps
(`steps`).
"""

from collections.abc import Mapping

from retain.eval.metrics import found, numbers, overlap, steps
from retain.eval.metrics.overlap import Metric, first_line

__all__ = ["METRICS", "Metric", "first_line"]

METRICS: Mapping[str, Metric] = {
    metric.__name__: metric for metric in (*found.METRICS, *numbers.METRICS, *overlap.METRICS, *steps.METRICS)
}
