"""Diagnosis without a benchmark: coverage, losses, divergence and cost on any text.

Reading order: `command`, `measures`, `documents`, `record`; `perplexity`, `teacher_forced`, `gate_cost`,
`capacity` (warnings against wrong answers), `head_classes`, `families` (gate families side by side).
"""
