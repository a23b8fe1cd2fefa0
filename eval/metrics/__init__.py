"""Metrics: the score of one answer.

Reading order: `scorers` (by name, and their means), `overlap`, `numbers`, `found`, `steps`,
`infinitebench`, `procedures`.
"""
