"""Diagnosis without a benchmark: coverage, losses, divergence and cost on any text.

Reading order: `documents`, `teacher_forced` (one prefill, a fork for each policy), `measures`; on these
`command` with `record`, and `perplexity`; by themselves `query_centres`, and `head_importance` and
`layer_errors`, on which `head_tables` (tables that policies read).
"""
