"""Statistics of paired scores: intervals, tests and verdicts.

Reading order: `clusters` (what is independent), `significance` (interval and verdict), `not_worse` (one-sided
bounds), `paired_tests`, `paired_result` (all of a comparison), `power`, `summary` (of a whole run),
`comparisons` (in words), `ceilings`.
"""
