"""Diagnosis without a benchmark: coverage, losses, divergence and cost on any text.

Reading order: `documents`, `teacher_forced` (one prefill, a fork for each policy), `measures`; on these
`command` with `record`, and `perplexity`; by itself `head_importance`, on
which `head_weights` (a number for each head, which policies read).
"""
