"""Diagnosis without a benchmark: coverage, losses, divergence and cost on any text.

Reading order: `documents`, `teacher_forced` (one prefill, a fork for each policy), `measures`; on these
`command` with `record`, `perplexity`, `capacity` (warnings against wrong answers) and `families` (gate
families side by side); by themselves `gate_cost`, `query_centres`, and `head_importance` and `layer_errors`,
on which `head_tables` (tables that policies read).
"""
