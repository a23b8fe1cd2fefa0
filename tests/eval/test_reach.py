"""At how many bytes a policy reaches a share of the full cache's score."""

import math

import numpy as np
import pytest

from retain.eval.config import FULL
from retain.eval.studies.reach import Curve, curves_of, shown, table


def curve(scores, held, full=100.0):
    """One stratum of four items, which score alike."""
    strata = tuple((np.array([[score, full]] * 4),) for score in scores)
    return Curve(strata, tuple(held))


def test_a_level_is_reached_on_a_line_over_the_logarithm_of_bytes():
    made = curve([80.0, 90.0, 100.0], [0.1, 0.2, 0.4])
    assert made.reached(0.95) == pytest.approx(0.2 * 2**0.5)
    assert made.reached(0.9) == pytest.approx(0.2)
    assert made.reached(0.5) == 0.0 and shown(0.0, made) == "< 10.0"
    assert shown(curve([80.0, 90.0], [0.1, 0.2]).reached(0.95), made) == "> 40.0"


def test_a_level_that_is_lost_again_is_not_reached():
    made = curve([96.0, 90.0, 97.0], [0.1, 0.2, 0.4])
    assert 0.2 < made.reached(0.95) < 0.4
    assert math.isinf(curve([96.0, 97.0, 90.0], [0.1, 0.2, 0.4]).reached(0.95))


def row(policy, budget, item, score, held):
    base = {"seed": 0, "task": "single", "question": 0, "regime": "context_only", "family": "seen"}
    return {**base, "policy": policy, "budget": budget, "item": item, "score": score} | {
        "bytes_held": held,
        "bytes_full": 1000,
    }


def test_of_several_runs_a_line_has_all_budgets_and_the_items_of_all():
    rows = [row(FULL, 1.0, item, 1.0, 1000) for item in range(4)]
    rows += [row("a", 0.2, item, float(item > 0), 190) for item in range(4)]
    rows += [row("a", 0.1, item, float(item > 1), 95) for item in range(2)]
    made = curves_of(rows)["context_only", "seen", "a"]
    assert made.bytes_held == (0.095, 0.19)
    assert [strata[0][:, 0].tolist() for strata in made.strata] == [[0.0, 0.0], [0.0, 100.0]]
    assert "| a | > 19.0 [" in table({("context_only", "seen", "a"): made}, [0.95], 20)
