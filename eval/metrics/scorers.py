"""Lists metrics by name, as cards name them.

A metric takes a prediction and its right answers and gives a score from 0 to 1. They stand in three files:
shared words and characters (`overlap`), named things (`found`), and those of SCBench (`scbench`).
"""

from collections.abc import Mapping

from retain.eval.metrics import found, overlap, scbench
from retain.eval.metrics.overlap import Metric, first_line

__all__ = ["METRICS", "Metric", "first_line"]

METRICS: Mapping[str, Metric] = {
    metric.__name__: metric for module in (found, overlap, scbench) for metric in module.METRICS
}
