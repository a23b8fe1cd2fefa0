"""Metrics: the score of one answer.

Reading order: `scorers` (by name), `overlap`, `found`, `scbench`.
"""
