"""Compares every policy with the best heuristic of its regime, budget and task family.

Comparisons of learned policies, controls and the full cache with the best heuristic are the declared primary
ones: all of one regime, over its budgets and task families, are one Holm family, fixed by the config before
anything is measured.

The baseline heuristic is chosen by the same scores, and a maximum is biased upwards (the winner's curse):
even of equal heuristics one comes out best, and tests of the others against it are wrong far more often than
they say. So heuristics and their variants get a difference and its interval and no verdict but "below (or
above) the best heuristic". For a learned policy or control "better" is conservative for the same reason, and
"worse" leans against it: it means worse than the best of several, picked on these items.

A comparison that shows nothing is called unknown, with the difference that this many items could have shown;
it is never called "the same".
"""

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from retain.eval.config import CONTROLS, FULL
from retain.eval.stats.ceilings import Discrimination, discriminate
from retain.eval.stats.paired_result import PairedResult
from retain.eval.stats.power import smallest_difference
from retain.eval.stats.significance import Verdict, standard_error
from retain.eval.stats.summary import (
    ALPHA,
    FAMILIES,
    Cell,
    Scores,
    best_heuristic,
    compare,
    compare_family,
    measured_beforehand,
    preset_of,
)

# Bounds and controls are no methods: they are judged, and never called best.
BOUNDS = (FULL, *CONTROLS)


@dataclass(frozen=True)
class Place:
    """One regime, budget and task family."""

    regime: str
    budget: float
    family: str


@dataclass(frozen=True)
class Judged:
    """One policy minus the best heuristic at one place, in points.

    Attributes:
        place: Where.
        policy, baseline: The two sides.
        result: Interval, tests, verdict within its Holm family; of what is not judged the verdict is
            "identical" or "unjudged", and there is no family.
        detectable: Smallest true difference that this many items would show in four runs of five, at the
            level that its Holm family leaves one comparison; None where too few differ for any.
        family_size: Comparisons that are adjusted together; 0 of what is not judged.
    """

    place: Place
    policy: str
    baseline: str
    result: PairedResult
    detectable: float | None
    family_size: int


def budget_name(budget: float) -> str:
    """Name a budget: "keep_ratio 0.2", "128 tokens per head", "full cache"."""
    if budget == 1:
        return "full cache"
    return f"keep_ratio {budget:g}" if budget < 1 else f"{budget:g} tokens per head"


def is_bound(policy: str) -> bool:
    """Whether a label of tables names the full cache or a control, under any protection."""
    return preset_of(policy) in BOUNDS


def is_judged(policy: str, trained: Collection[str] = ()) -> bool:
    """Whether a policy gets a verdict against the best heuristic: learned ones, controls, the full cache.

    Args:
        policy: Label of tables.
        trained: Labels of which the run's rows say that something trained or measured beforehand belongs to
            them (`Scores.trained`): variants, whose names say nothing. Presets are known by their names.
    """
    return is_bound(policy) or policy in trained or preset_of(policy) in measured_beforehand()


def word_of(result: PairedResult) -> str:
    """The verdict in tables; for unjudged policies only the side of the best heuristic."""
    if result.verdict != "unjudged":
        return result.verdict
    return f"{'below' if result.estimate <= 0 else 'above'} the best heuristic"


def fewest_items(family_size: int) -> int:
    """Least number of items that can show anything in a family of this size: the smallest exact p of n
    differing items is `2 / 2^n`, and must be below `ALPHA / family_size` with one item to spare, `ceil(log2(2
    * family_size / ALPHA)) + 1`."""
    return math.ceil(math.log2(2 * family_size / ALPHA)) + 1


def can_reach(num_nonzero: int, family_size: int) -> bool:
    """Whether the exact test of so many differing items can pass its family: `2 / 2^n < ALPHA / M`."""
    return 2.0 ** (1 - num_nonzero) < ALPHA / family_size


def _measured(scores: Scores) -> list[tuple[str, float]]:
    """Every regime and budget that any cell was measured at."""
    places = {(cell.regime, cell.budget) for cell in scores.exact}
    return [own for own in itertools.product(scores.regimes, scores.budgets) if own in places]


def places(scores: Scores) -> list[Place]:
    """Every regime, budget and task family that was measured."""
    families = [family for family in FAMILIES if scores.tasks(family)]
    return [Place(*own, family) for own in _measured(scores) for family in families]


def discriminations(scores: Scores) -> list[tuple[Place, Discrimination]]:
    """Whether each task tells policies apart, at every regime and budget; `family` of a place is the task."""
    return [
        (Place(regime, budget, task), discriminate(scores, regime, task, budget))
        for regime, budget in _measured(scores)
        if Cell(regime, FULL, 1.0) in scores.exact
        for task in scores.families
    ]


def judge(scores: Scores, *, margin: float, resamples: int) -> list[Judged]:
    """Compare every policy, the full cache included, with the best heuristic of each place; judged ones come
    first.

    Args:
        scores: Of the run.
        margin: Largest difference that does not matter, in points.
        resamples: Of sign flips; more where a family is so large that fewer could not pass.
    """
    every = places(scores)
    made: list[Judged] = []
    for regime in scores.regimes:
        tested: list[tuple[Place, Cell, Cell]] = []
        shown: list[tuple[Place, Cell, Cell]] = []
        for place in every:
            baseline = best_heuristic(scores, regime, place.budget, place.family)
            if place.regime != regime or baseline is None:
                continue
            for policy in scores.policies:
                cell = Cell(regime, policy, 1.0 if policy == FULL else place.budget)
                if policy != baseline and cell in scores.exact:
                    kind = tested if is_judged(policy, scores.trained) else shown
                    kind.append((place, cell, Cell(regime, baseline, place.budget)))
        pairs = [(cell, other, place.family) for place, cell, other in tested]
        settled = compare_family(scores, pairs, margin=margin, resamples=resamples)
        for (place, cell, other), one in zip(tested, settled, strict=True):
            assert one is not None
            detectable = _detectable(scores, cell, other, place.family, one.result, len(tested))
            made.append(Judged(place, cell.policy, other.policy, one.result, detectable, len(tested)))
        for place, cell, other in shown:
            one = compare(scores, cell, other, place.family, margin=margin, resamples=resamples)
            assert one is not None
            word: Verdict = "identical" if one.interval.identical else "unjudged"
            made.append(Judged(place, cell.policy, other.policy, replace(one.result, verdict=word), None, 0))
    return sorted(made, key=lambda one: every.index(one.place))


def _detectable(
    scores: Scores, cell: Cell, baseline: Cell, family: str, result: PairedResult, family_size: int
) -> float | None:
    own, other = (scores.strata(one, scores.tasks(family)) for one in (cell, baseline))
    differences = [a - b for a, b in zip(own, other, strict=True)]
    count = sum(len(values) for values in differences)
    sd = standard_error(differences) * math.sqrt(count)
    if count < fewest_items(family_size) or not can_reach(result.sign_flip.num_nonzero, family_size):
        return None
    if not 0 < sd < math.inf:  # nothing varies, or a task has one item
        return None
    return smallest_difference(count, sd=sd, alpha=ALPHA / family_size)
