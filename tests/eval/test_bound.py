"""The bound of a mean difference, against loops and exact sums."""

import math

import numpy as np
import pytest
from scipy import stats

from retain.eval.stats.bound import p_at_most, p_within
from retain.eval.stats.interval import macro_mean


def spread_strata(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.choice([-100.0, 0.0, 0.0, 100.0, 50.0], size=size) for size in (31, 12, 57)]


def weighed(strata: list[np.ndarray], value: float, draws: int = 60_000) -> float:
    """The p of `p_at_most`, by drawing its weights: three loops and a coin for each item."""
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
    assert p_at_most(strata, value) == pytest.approx(
        wanted, abs=4 * math.sqrt(wanted * (1 - wanted) / 60_000)
    )


@pytest.mark.parametrize(
    ("items", "lost", "rate"),
    [
        (1, 0, 0.3),
        (2, 1, 0.6),
        (50, 0, 0.02),
        (300, 3, 0.02),
        (1000, 100, 0.1),
        (1260, 4, 0.02),
        (20_000, 0, 0.02),
        (300, 30, 0.0005),
        (300, 1, 0.5),
    ],
)
def test_of_lost_and_tied_items_it_is_the_exact_binomial_bound(items: int, lost: int, rate: float) -> None:
    values = np.repeat([-100.0, 0.0], [lost, items - lost])
    assert p_at_most([values], -100 * rate) == pytest.approx(
        stats.binom.cdf(lost, items, rate), rel=1e-7, abs=1e-12
    )


def test_of_many_items_that_differ_it_is_t() -> None:
    """The item that is added matters where little was seen: at 6,000 items a p of 0.025 is one of 0.026."""
    rng = np.random.default_rng(3)
    strata = [rng.choice([-100.0, 0.0, 0.0, 100.0], size=2000) for _ in range(3)]
    error = math.sqrt(sum(one.var(ddof=1) / one.size for one in strata)) / 3
    p = p_at_most(strata, macro_mean(strata) - 1.96 * error)
    assert 0.025 < p < 0.03


@pytest.mark.parametrize(("items", "rate"), [(50, 0.02), (100, 0.02), (150, 0.02), (200, 0.02), (300, 0.01)])
def test_rare_large_losses_among_small_jitter_are_rarely_called_equivalent(items: int, rate: float) -> None:
    """Exact, but for the jitter: of each number of items that lost everything, one draw of the others. At the
    true difference as the margin t, or a bootstrap, says equivalent of a third of the runs of 50."""
    rng, margin = np.random.default_rng(items), 100 * rate
    wrong = 0.0
    for lost in range(6):
        values = np.append(rng.uniform(-1, 1, items - lost), np.full(lost, -100.0))
        if p_within([values], margin) < 0.05:
            wrong += float(stats.binom.pmf(lost, items, rate))
    assert wrong <= 0.05


def test_equivalent_is_still_said_where_items_show_it() -> None:
    """Jitter alone, or losses and wins that cancel: 160 items rule out a rate of 2 %, 1,260 cancel to 2."""
    rng = np.random.default_rng(0)
    assert p_within([rng.uniform(-1, 1, 160)], 2.0) < 0.05 < p_within([rng.uniform(-1, 1, 140)], 2.0)
    assert p_within([np.repeat([-100.0, 0.0, 100.0], [60, 1140, 60])], 2.0) < 0.05
    # Six tasks of 210: four items lost of 1,260 are no 2 points, at the level of a family of 24 either.
    values = np.zeros((6, 210))
    values[:4, 0] = -100.0
    assert p_at_most([*values], -2.0) < 0.025 / 24


@pytest.mark.parametrize("items", [70, 210, 400])
@pytest.mark.parametrize("won", [0.0, 0.01, 0.1])
def test_a_policy_that_is_worse_by_the_margin_passes_no_more_often_than_alpha(items: int, won: float) -> None:
    """Exact, over all numbers of wins and losses that have a chance; also at the level of a family of 24."""
    margin, alphas = 2.0, (0.025, 0.025 / 8, 0.025 / 24)
    lost = won + margin / 100
    passes = dict.fromkeys(alphas, 0.0)
    for wins in range(items + 1):
        chance = float(stats.binom.pmf(wins, items, won))
        if chance < 1e-6:
            continue
        for losses in range(items + 1 - wins):
            both = chance * float(stats.binom.pmf(losses, items - wins, lost / (1 - won)))
            if losses > wins + items * margin / 100:  # a larger loss than the margin never passes
                break
            if both < 1e-7:
                continue
            values = np.zeros(items)
            values[:wins], values[wins : wins + losses] = 100.0, -100.0
            p = p_at_most([values], -margin)
            for alpha in alphas:
                passes[alpha] += both * (p < alpha)
    assert all(passes[alpha] <= 1.1 * alpha for alpha in alphas), passes
