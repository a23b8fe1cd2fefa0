"""Statistics of paired scores: intervals, tests and verdicts.

Reading order: `significance` (interval and verdict), `not_worse` (one-sided bounds), `paired_tests`,
`paired_result` (all of a comparison), `power`, `summary` (of a whole run, and what is independent in it),
`comparisons` (in words), `ceilings`.
"""
