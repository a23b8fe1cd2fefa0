"""Not worse by a margin: its test against loops and exact sums, the family against Holm's method by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from retain.eval.stats.not_worse import ONE_SIDED, SMALLEST, NotWorse, not_worse, step_down, within
from retain.eval.stats.paired_tests import holm
from tests.refused import refused


def spread_strata(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.choice([-100.0, 0.0, 0.0, 100.0, 50.0], size=size) for size in (31, 12, 57)]


def weighed(strata: list[np.ndarray], value: float, draws: int = 60_000) -> float:
    """The p of `NotWorse.p_of`, by drawing its weights: three loops and a coin for each item."""
    rng = np.random.default_rng(1)
    sums = np.zeros(draws)
    for stratum in strata:
        for difference in stratum:
            sums += rng.exponential(size=draws) * (difference - value) / (len(strata) * len(stratum))
    least = min(len(stratum) for stratum in strata)
    sums += rng.exponential(size=draws) * (-100.0 - value) / (len(strata) * least)
    return float((sums <= 0).mean())


@pytest.mark.parametrize("value", [-14.0, -6.0, 1.0])
def test_p_is_that_of_drawn_weights(value: float) -> None:
    """On either side of the mean, with ties, three strata of unlike sizes, and values of their own."""
    strata = [*spread_strata(), np.linspace(-3.0, 3.0, 7)]
    wanted = weighed(strata, value)
    assert 0.01 < wanted < 0.99
    assert not_worse(strata, 2.0).p_of(value) == pytest.approx(
        wanted, abs=4 * math.sqrt(wanted * (1 - wanted) / 60_000)
    )


@pytest.mark.parametrize(
    ("items", "lost"),
    [(1, 0), (2, 1), (50, 0), (300, 0), (300, 1), (300, 3), (300, 30), (1000, 100), (1260, 4), (20_000, 0)],
)
def test_of_lost_and_tied_items_it_is_the_exact_binomial_bound_at_either_end_of_p(
    items: int, lost: int
) -> None:
    values = np.repeat([-100.0, 0.0], [lost, items - lost])
    for rate in (0.0005, 0.003, 0.01, 0.02, 0.03, 0.1, 0.12, 0.5, 0.6):
        wanted = stats.binom.cdf(lost, items, rate)
        assert not_worse([values], 100 * rate).p == pytest.approx(wanted, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize(("items", "rate"), [(50, 0.02), (100, 0.02), (150, 0.02), (200, 0.02), (300, 0.01)])
def test_rare_large_losses_beside_small_jitter_are_rarely_called_equivalent(items: int, rate: float) -> None:
    """Exact, but for the jitter: of each number of items that lost everything, one draw of the others. At the
    true difference as the margin t, or a bootstrap, says equivalent of a third of the runs of 50."""
    rng, margin = np.random.default_rng(items), 100 * rate
    wrong = 0.0
    for lost in range(6):
        values = np.append(rng.uniform(-1, 1, items - lost), np.full(lost, -100.0))
        if within([values], margin) < 0.05:
            wrong += float(stats.binom.pmf(lost, items, rate))
    assert wrong <= 0.05


def test_equivalent_is_still_said_where_items_show_it() -> None:
    """Jitter alone, or losses and wins that cancel: 160 items rule out a rate of 2 %, 1,260 cancel to 2."""
    rng = np.random.default_rng(0)
    assert within([rng.uniform(-1, 1, 160)], 2.0) < 0.05 < within([rng.uniform(-1, 1, 140)], 2.0)
    assert within([np.repeat([-100.0, 0.0, 100.0], [60, 1140, 60])], 2.0) < 0.05
    # Six tasks of 210: four items lost of 1,260 are no 2 points, at the level of a family of 24 either.
    values = np.zeros((6, 210))
    values[:4, 0] = -100.0
    assert not_worse([*values], 2.0).p < 0.025 / 24


@pytest.mark.parametrize(
    "strata",
    [spread_strata(), [np.zeros(90)] * 2, [np.array([0.0] * 70 + [100.0] * 20), np.zeros(90)]],
    ids=["spread", "identical", "won"],
)
def test_end_and_p_never_disagree(strata: list[np.ndarray]) -> None:
    for margin in (0.5, 2.0, 10.0, 25.0):
        made = not_worse(strata, margin)
        assert SMALLEST <= made.p <= 1
        if made.p < 1:
            assert made.end(made.p) == pytest.approx(-margin, abs=1e-6)
            assert made.end(min(1.0, made.p * 1.1)) > -margin > made.end(made.p * 0.9)
        else:
            assert made.end(0.999) <= -margin


@pytest.mark.parametrize(
    ("strata", "margin", "p", "end"),
    [
        ([np.array([0.0, 100.0] * 50_000)], 40.0, SMALLEST, None),
        ([np.full(9, -100.0)], 2.0, 1.0, -100.0),
        ([np.full(9, -5.0)], 2.0, None, None),
        ([np.array([-100.0]), np.zeros(30)], 2.0, None, None),
    ],
    ids=[
        "no smaller p than floats can tell",
        "everything lost",
        "losses without a spread",
        "one of one lost",
    ],
)
def test_ends_of_the_scale(
    strata: list[np.ndarray], margin: float, p: float | None, end: float | None
) -> None:
    made = not_worse(strata, margin)
    assert made.p == p if p is not None else made.p > 0.99
    if p != SMALLEST:
        assert made.end(ONE_SIDED) == end if end is not None else made.end(ONE_SIDED) < -30.0


def test_what_cannot_be_tested_is_refused() -> None:
    refused("margin of equivalence must be positive, got 0", not_worse, [np.zeros(4)], 0.0)
    refused("at least one stratum", not_worse, [], 2.0)
    refused("not_worse needs finite numbers", not_worse, [np.array([0.0, np.nan])], 2.0)
    with pytest.raises(ValueError, match="got 1.0 where an item lost 30. Pass the width of the scale"):
        within([np.array([0.0, 30.0])], 0.02, 1.0)


def made_of(p: float) -> NotWorse:
    """A test at margin 2 of so many items without a loss that it has this p, nearly: as said by itself."""
    return not_worse([np.zeros(max(1, round(math.log(p) / math.log(0.98))))], 2.0)


def holm_by_hand(values: list[float], alpha: float) -> tuple[set[int], list[float]]:
    """What passes, and at which level each was looked at."""
    left, passed, levels = list(range(len(values))), set(), [0.0] * len(values)
    while left:
        least = min(left, key=lambda place: values[place])
        level = alpha / len(left)
        if values[least] >= level:
            for place in left:
                levels[place] = level
            break
        passed.add(least)
        levels[least] = level
        left.remove(least)
    return passed, levels


@pytest.mark.parametrize("seed", range(6))
def test_the_family_is_holms_and_its_ends_say_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tests = [made_of(p) for p in 10 ** rng.uniform(-4.5, -0.5, size=9)]
    values, steps = [test.p for test in tests], step_down(tests)
    passed, levels = holm_by_hand(values, ONE_SIDED)
    assert 0 < len(passed) < 9
    assert [step.p for step in steps] == holm(values).tolist()
    assert [step.alpha for step in steps] == pytest.approx(levels)
    assert {place for place, step in enumerate(steps) if step.p < ONE_SIDED} == passed
    assert {place for place, step in enumerate(steps) if step.end > -2.0} == passed
    assert step_down([]) == []
