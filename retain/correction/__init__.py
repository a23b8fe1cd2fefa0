"""Corrections: what stays makes up for what goes, at the moment when entries are evicted.

Reading order: `merge` (evicted values are averaged into the kept entries whose keys are most like theirs),
`refit` (kept values and log weights are fitted to what queries of the prompt got of all entries), `cuts` (the
ragged rows of a layer are cut and corrected).
"""

from retain.correction.merge import Merge
from retain.correction.refit import Refit

Correction = Merge | Refit
