"""Statistics of paired scores.

Reading order: `scores` (from the table of a run), `paired` (tests and verdicts of a family), `interval`,
`bound`.
"""
