"""Computes the largest predicted risk that an eviction can afford; `retain.Cache` warns above it.

The limit is the price that usual documents pay where they begin to fail: the threshold at which the held-out
documents keep `AFFORDABLE` of the entries that are not protected. No answers are needed for it. A document
that pays more is fuller than they are, or its budget is smaller still.

That one number was read off an earlier form of the shipped policy on one reference model, where warnings and
failures agreed best at limits near the threshold at it. With the shipped policy, on three models (`python -m
retain.eval.diagnose.capacity --scopes model`, 2026-11-22), 57 to 69 % of the wrong answers to usual tasks and
87 to 100 % of those in contexts that fill up with facts came with a warning, where 22 to 38 % of all did.
Much of that the keep_ratio alone would have said; of failures for another reason (one key among many values,
a count of words) the price says little. For another model the study says whether it holds there, and
`retain.budget.capacity.Guard(limit=...)` takes another limit.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from retain.gates.calibrate import threshold_at

# Share of the unprotected entries that usual documents can still do with.
AFFORDABLE = 0.04


def limit_record(
    curve: Mapping[str, Sequence[float]], unit: str, *, affordable: float = AFFORDABLE
) -> dict[str, Any] | None:
    """The record `calibration.capacity` of an artifact; None where no limit on risk means anything.

    `limit = threshold(affordable)`, the threshold on the calibrated score at which the held-out documents
    kept that share of the unprotected entries; ValueError: the curve (of `threshold_curve`) does not reach so
    far.
    """
    if unit != "risk":
        return None
    limit = threshold_at(curve["keep_ratio"], curve["threshold"], affordable)
    if not (0 < limit < math.inf):
        return None
    return {"limit": limit, "keep_ratio": affordable, "unit": unit}
