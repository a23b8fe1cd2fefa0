"""Coverage of the intervals, and of "equivalent" where it is wrong, by runs whose true difference is known.

Sparse differences, small strata, and rare large losses beside small jitter.
"""

from collections.abc import Callable

import numpy as np
import pytest

from retain.eval.stats.not_worse import within
from retain.eval.stats.significance import paired_interval

# Differences that are not ties, and their mean.
KINDS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "normal": (lambda rng, n: rng.normal(0.0, 1.0, n), 0.0),
    "+1": (lambda rng, n: np.ones(n), 1.0),
    "exponential": (lambda rng, n: rng.exponential(1.0, n), 1.0),
}


@pytest.mark.parametrize(
    ("kind", "sizes", "ties"),
    [
        ("normal", (30,), 0.8),
        ("normal", (100,), 0.9),
        ("exponential", (100,), 0.9),
        ("normal", (4, 40, 150), 0.0),
        ("+1", (4, 40, 150), 0.8),
    ],
)
def test_intervals_cover_where_ties_are_many_and_strata_small(kind, sizes, ties):
    rng, (draw, mean), covered = np.random.default_rng(0), KINDS[kind], 0
    for _ in range(250):
        made = paired_interval([np.where(rng.random(n) < ties, 0.0, draw(rng, n)) for n in sizes])
        covered += made.low <= mean * (1 - ties) <= made.high
    assert covered / 250 >= 0.93


@pytest.mark.parametrize(
    ("sizes", "rates"),
    [((50,), (0.02,)), ((100,), (0.02,)), ((200,), (0.02,)), ((210,) * 3, (0.06, 0.0, 0.0))],
)
def test_a_difference_of_the_margin_is_rarely_called_equivalent(sizes, rates):
    """A share of the items loses 100 points, the others differ by U(-1, 1); the true difference is minus the
    margin. The interval alone, as TOST, says equivalent of many of the runs of 50."""
    rng, margin = np.random.default_rng(0), 100 * sum(rates) / len(rates)
    called, inside = 0, 0
    for _ in range(60):
        strata = [
            np.where(rng.random(n) < rate, -100.0, rng.uniform(-1.0, 1.0, n))
            for n, rate in zip(sizes, rates, strict=True)
        ]
        made = paired_interval(strata)
        within_margin = -margin < made.low and made.high < margin
        inside += within_margin
        called += within_margin and within(strata, margin) < 0.05
    assert called / 60 <= 0.05
    assert inside > 6 or sizes != (50,)
