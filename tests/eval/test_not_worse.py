"""Not worse by a margin: its test against loops and exact sums, the family against Holm's method by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from retain.eval.not_worse import ONE_SIDED, SMALLEST, NotWorse, Step, not_worse, step_down

ALPHAS = (0.2, 0.05, 0.025, 0.001)


def spread_strata(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.choice([-100.0, 0.0, 0.0, 100.0, 50.0], size=size) for size in (31, 12, 57)]


def test_the_t_test_and_its_end_are_those_of_three_loops() -> None:
    """And of the spread that a loss of the whole margin would have."""
    strata, margin = spread_strata(), 4.0
    mean, variance, below = 0.0, 0.0, 0.0
    half = 100 / 2 / (3 * 12)

    def lost_by(margin: float) -> float:
        total = 0.0
        for values in strata:
            own = sum(values) / len(values)
            seen = sum((value - own) ** 2 for value in values) / (len(values) - 1)
            won = sum(value > 0 for value in values) / len(values)
            lost = max(sum(value < 0 for value in values) / len(values), won + margin / 100)
            lost = min(1.0, max(0.0, lost))
            total += max(seen, 1e4 * (won + lost - (lost - won) ** 2)) / len(values) / 9
        return math.sqrt(total)

    for values in strata:
        own = sum(values) / len(values)
        spread = sum((value - own) ** 2 for value in values) / (len(values) - 1)
        mean += own / 3
        variance += spread / len(values) / 9
        below += (spread / len(values)) ** 2 / 81 / (len(values) - 1)
    df = variance**2 / below
    made = not_worse(strata, margin)
    assert made.method == "t"
    p_t = stats.t.sf((mean + margin) / math.sqrt(variance), df)
    p_0 = stats.norm.sf((mean + margin - half) / lost_by(margin))
    assert p_t < p_0 == pytest.approx(made.p, rel=1e-9)
    for alpha in ALPHAS:
        own = mean - stats.t.ppf(1 - alpha, df) * math.sqrt(variance)
        end = made.end(alpha)
        assert end <= own + 1e-9
        if end < own - 1e-9:
            assert stats.norm.sf((mean - end - half) / lost_by(-end)) == pytest.approx(alpha, rel=1e-6)


def test_many_items_that_differ_are_judged_as_t_judges_them() -> None:
    """The floor is for what was not seen: where a half of all items differ it changes next to nothing."""
    rng = np.random.default_rng(3)
    strata = [rng.choice([-100.0, 0.0, 0.0, 100.0], size=2000) for _ in range(3)]
    made = not_worse(strata, 2.0)
    assert made.spread is not None
    assert made.tied is not None and made.tied.p < made.p
    alone = NotWorse(made.p, 2.0, "t", made.estimate, made.error, made.df)
    assert made.end(ONE_SIDED) == pytest.approx(alone.end(ONE_SIDED), abs=0.12)
    assert made.end(ONE_SIDED) <= alone.end(ONE_SIDED)


@pytest.mark.parametrize(("tasks", "items"), [(1, 60), (1, 210), (1, 300), (2, 210), (3, 70), (6, 210)])
@pytest.mark.parametrize("won", [0, 1, 5])
def test_one_more_lost_item_never_speaks_for_a_policy(tasks: int, items: int, won: int) -> None:
    """In one task, or in all of them in turn."""
    for spread in (False, True):
        values = np.zeros((tasks, items))
        values[0, items - won :] = 100.0
        found, ends = [], []
        for lost in range(9):
            if lost:
                task = (lost - 1) % tasks if spread else 0
                values[task, (lost - 1) // tasks if spread else lost - 1] = -100.0
            made = not_worse([*values], 2.0)
            found.append(made.p)
            ends.append([made.end(alpha) for alpha in (0.025, 0.025 / 24)])
        assert found == sorted(found)
        assert ends == sorted(ends, reverse=True)


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
            own = chance * float(stats.binom.pmf(losses, items - wins, lost / (1 - won)))
            if losses > wins + items * margin / 100:  # a larger loss than the margin never passes
                break
            if own < 1e-7:
                continue
            values = np.zeros(items)
            values[:wins], values[wins : wins + losses] = 100.0, -100.0
            p = not_worse([values], margin).p
            for alpha in alphas:
                passes[alpha] += own * (p < alpha)
    assert all(passes[alpha] <= 1.1 * alpha for alpha in alphas), passes


@pytest.mark.parametrize(("tasks", "lossy"), [(6, 6), (6, 1)])
def test_losses_spread_over_tasks_pass_no_more_often_than_alpha(tasks: int, lossy: int) -> None:
    """Drawn, 6 tasks of 210: t alone passes one in 170 at the level of a family of 24, not one in 960."""
    rng = np.random.default_rng(0)
    rates = np.zeros(tasks)
    rates[:lossy] = 0.02 * tasks / lossy
    found = [not_worse([*(-100.0 * (rng.random((tasks, 210)) < rates[:, None]))], 2.0).p for _ in range(1200)]
    assert np.mean(np.array(found) < 0.025) <= 0.04
    assert np.sum(np.array(found) < 0.025 / 24) <= 4


def test_it_still_shows_what_there_is_to_show() -> None:
    """Six tasks of 210: four items lost of 1,260 are no 2 points, at the level of a family of 24 either."""
    values = np.zeros((6, 210))
    values[:4, 0] = -100.0
    assert not_worse([*values], 2.0).p < 0.025 / 24


def test_no_loss_among_300_is_the_rule_of_three() -> None:
    made = not_worse([np.zeros(300)], 2.0)
    assert made.method == "no item lost"
    assert made.p == pytest.approx(math.exp(-6.0))
    assert made.end(0.05) == pytest.approx(-100 * 2.9957 / 300, rel=1e-4)
    # Tasks add up, and the smallest counts for all.
    two = not_worse([np.zeros(300), np.zeros(150)], 2.0)
    assert two.end(0.05) == pytest.approx(made.end(0.05))


def test_few_items_that_agree_show_nothing() -> None:
    made = not_worse([np.zeros(12)] * 3, 2.0)
    assert made.p == pytest.approx(math.exp(-0.72))
    assert made.end(ONE_SIDED) < -2.0


def test_unseen_losses_are_never_likelier_than_the_bound_says() -> None:
    sizes, margin = (40, 60), 2.0
    made = not_worse([np.zeros(size) for size in sizes], margin)
    chances = [
        (1 - first) ** sizes[0] * (1 - (2 * margin / 100 - first)) ** sizes[1]
        for first in np.linspace(0.0, 2 * margin / 100, 401)
    ]
    assert max(chances) <= made.p
    assert max(chances) > 0.8 * made.p  # and it is not idle


@pytest.mark.parametrize("won", [0.0, 0.01, 0.1, 0.3])
def test_a_policy_that_is_worse_by_the_margin_passes_without_a_loss_no_more_often_than_alpha(
    won: float,
) -> None:
    """Exact: one task of 120 items, each lost with probability `won + margin`, won with `won`."""
    size, margin = 120, 2.0
    lost = won + margin / 100
    passes = dict.fromkeys(ALPHAS, 0.0)
    for wins in range(size + 1):
        values = np.array([100.0] * wins + [0.0] * (size - wins))
        made = not_worse([values], margin)
        chance = math.comb(size, wins) * won**wins * (1 - won - lost) ** (size - wins)
        for alpha in ALPHAS:
            passes[alpha] += chance * (made.p < alpha)
    assert all(passes[alpha] <= alpha for alpha in ALPHAS)


def test_wins_help_where_nothing_was_lost() -> None:
    few = [np.array([100.0] * 3 + [0.0] * 37)]
    many = [np.array([100.0] * 20 + [0.0] * 20)]
    assert not_worse(many, 2.0).p < 1e-3 < 0.1 < not_worse(few, 2.0).p <= 1.0
    # A few that could be luck change nothing; where many count, half of alpha is spent on them.
    assert not_worse(few, 2.0).end(0.025) == pytest.approx(2.5 * math.log(0.025))
    made = not_worse(many, 2.0)
    own = made.estimate - float(stats.t.isf(0.0125, made.df)) * made.error
    assert made.end(0.025) == pytest.approx(2.5 * math.log(0.0125) + own)


@pytest.mark.parametrize(
    "strata",
    [spread_strata(), [np.zeros(90)] * 2, [np.array([0.0] * 70 + [100.0] * 20), np.zeros(90)]],
    ids=["t", "identical", "won"],
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


def test_no_p_is_said_to_be_smaller_than_floats_can_tell() -> None:
    assert not_worse([np.array([0.0, 100.0] * 50_000)], 40.0).p == SMALLEST


@pytest.mark.parametrize("strata", [[np.full(9, -5.0)], [np.array([-100.0]), np.zeros(30)]])
def test_losses_without_a_spread_leave_nothing_to_judge_by(strata: list[np.ndarray]) -> None:
    made = not_worse(strata, 2.0)
    assert (made.p, made.end(ONE_SIDED)) == (1.0, -math.inf)


def test_what_cannot_be_tested_is_refused() -> None:
    with pytest.raises(ValueError, match="margin of equivalence must be positive, got 0"):
        not_worse([np.zeros(4)], 0.0)
    with pytest.raises(ValueError, match="at least one stratum"):
        not_worse([], 2.0)


def made_of(p: float) -> NotWorse:
    """A t test at margin 2, standard error 1 and many degrees of freedom that has this p."""
    return NotWorse(p, 2.0, "t", float(stats.norm.isf(p)) - 2.0, 1.0, 1e9)


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
    values = [float(p) for p in 10 ** rng.uniform(-4.5, -0.5, size=9)]
    steps = step_down([made_of(p) for p in values])
    passed, levels = holm_by_hand(values, ONE_SIDED)
    assert 0 < len(passed) < 9
    assert [step.alpha for step in steps] == pytest.approx(levels)
    assert {place for place, step in enumerate(steps) if step.p < ONE_SIDED} == passed
    assert {place for place, step in enumerate(steps) if step.end > -2.0} == passed


def test_one_comparison_alone_is_the_95_percent_interval() -> None:
    strata = spread_strata()
    (step,) = step_down([not_worse(strata, 2.0)])
    alone = not_worse(strata, 2.0)
    assert step == Step(alone.p, 0.025, alone.end(0.025))
    assert step_down([]) == []


def test_a_failure_holds_back_what_would_have_passed_alone() -> None:
    steps = step_down([made_of(0.02), made_of(0.024)])
    assert [step.end > -2 for step in steps] == [False, False]
    assert [step.p for step in steps] == pytest.approx([0.04, 0.04])
