"""Metrics: the score of one answer."""

from retain.eval.metrics.by_row import METRICS

__all__ = ["METRICS"]
