"""Corrections: what stays makes up for what goes, when entries are evicted.

Reading order: `merge` (evicted values are averaged into the kept entries whose keys are most like theirs),
`cuts` (the ragged rows of a layer are cut and corrected).
"""
