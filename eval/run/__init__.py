"""Measures a comparison: contexts in, lines of a table out.

Reading order: `plan` (model, contexts, units), `measure` (the lines of a unit), `prefill` and `scores` (a
cache for each policy and budget from one reading), `answers`, `memory` (equal bytes), `table` (files); then
`checks`, which comes before all of it.
"""
