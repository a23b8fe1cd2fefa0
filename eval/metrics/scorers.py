"""Lists metrics by name, as cards name them.

A metric takes a prediction and its right answers and gives a score from 0 to 1. They stand in six files:
shared words and characters (`overlap`), named things (`found`), numbers and formulas (`numbers`), steps
(`steps`), those of InfiniteBench and SCBench (`infinitebench`) and of LongProc (`procedures`).
"""

from collections.abc import Mapping

from retain.eval.metrics import found, infinitebench, numbers, overlap, procedures, steps
from retain.eval.metrics.overlap import Metric, first_line

__all__ = ["METRICS", "Metric", "first_line"]

_MODULES = (found, infinitebench, numbers, overlap, procedures, steps)
METRICS: Mapping[str, Metric] = {metric.__name__: metric for module in _MODULES for metric in module.METRICS}
