"""Compares every policy with the best heuristic of its regime, budget and task family, in numbers and words.

`Judged` has the difference with interval, tests and verdict, `Paragraph` one such place in words. Comparisons
of learned policies, controls and the full cache with the best heuristic are the declared primary ones: all of
one regime, over its budgets and task families, are one Holm family, fixed by the config before anything is
measured.

The baseline heuristic is chosen by the same scores, and a maximum is biased upwards (the winner's curse):
even of equal heuristics one comes out best, and tests of the others against it are wrong far more often than
they say. So heuristics and their variants get a difference and its interval and no verdict but "below (or
above) the best heuristic". For a learned policy or control "better" is conservative for the same reason, and
"worse" leans against it: it means worse than the best of several, picked on these items.

A comparison that shows nothing is called unknown, with the difference that this many items could have shown;
it is never called "the same".
"""

import math
from collections.abc import Collection, Sequence
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
WORDS = ("better", "equivalent", "identical", "worse", "inconclusive", "unjudged")
# Behind what a heuristic is said to be of the best one.
_CHOSEN = " (chosen on these items)"
# A paragraph names this many policies of a verdict; the table names all.
NAMED = 8


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
        policy, baseline: What is compared.
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


@dataclass(frozen=True)
class Said:
    """One verdict of a paragraph: the word, its sentence, and the policies with their numbers."""

    word: str
    sentence: str
    policies: tuple[tuple[str, str], ...]
    more: int


@dataclass(frozen=True)
class Paragraph:
    """A place in words."""

    title: str
    sentences: tuple[str, ...]
    said: tuple[Said, ...]


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


def fewest(family_size: int) -> int:
    """Least number of items that can show anything in a family of this size: the smallest exact p of n
    differing items is `2 / 2^n`, and must be below `ALPHA / family_size` with one item to spare, `ceil(log2(2
    * family_size / ALPHA)) + 1`."""
    return math.ceil(math.log2(2 * family_size / ALPHA)) + 1


def can_reach(num_nonzero: int, family_size: int) -> bool:
    """Whether the exact test of so many differing items can pass its family: `2 / 2^n < ALPHA / M`."""
    return 2.0 ** (1 - num_nonzero) < ALPHA / family_size


def places(scores: Scores) -> list[Place]:
    """Every regime, budget and task family that was measured."""
    return [
        Place(regime, budget, family)
        for regime in scores.regimes
        for budget in scores.budgets
        for family in FAMILIES
        if scores.tasks(family)
        and any(cell.regime == regime and cell.budget == budget for cell in scores.exact)
    ]


def apart(scores: Scores) -> list[tuple[Place, Discrimination]]:
    """Whether each task tells policies apart, at every regime and budget; `family` of a place is the task."""
    return [
        (Place(regime, budget, task), discriminate(scores, regime, task, budget))
        for regime in scores.regimes
        for budget in scores.budgets
        for task in scores.families
        if Cell(regime, FULL, 1.0) in scores.exact
        and any((cell.regime, cell.budget) == (regime, budget) for cell in scores.exact)
    ]


def judge(scores: Scores, *, margin: float, resamples: int) -> list[Judged]:
    """Compare every policy, the full cache included, with the best heuristic of each place; judged ones come
    first.

    Args:
        scores: Of the run.
        margin: Largest difference that does not matter, in points.
        resamples: Of sign flips; more where a family is so large that fewer could not pass.
    """
    made: list[Judged] = []
    for regime in scores.regimes:
        every = _declared(scores, regime)
        pairs = [own for own in every if is_judged(own[1], scores.trained)]
        cells = [(*_cells(*own), own[0].family) for own in pairs]
        settled = compare_family(scores, cells, margin=margin, resamples=resamples)
        for (place, policy, baseline), one in zip(pairs, settled, strict=True):
            assert one is not None
            detectable = _detectable(scores, place, policy, baseline, one.result, len(pairs))
            made.append(Judged(place, policy, baseline, one.result, detectable, len(pairs)))
        for place, policy, baseline in every:
            if is_judged(policy, scores.trained):
                continue
            shown = compare(
                scores, *_cells(place, policy, baseline), place.family, margin=margin, resamples=resamples
            )
            assert shown is not None
            word: Verdict = "identical" if shown.interval.identical else "unjudged"
            made.append(Judged(place, policy, baseline, replace(shown.result, verdict=word), None, 0))
    order = {place: number for number, place in enumerate(places(scores))}
    return sorted(made, key=lambda one: order[one.place])


def paragraphs(scores: Scores, judged: Sequence[Judged]) -> list[Paragraph]:
    """Write what is known and unknown at every place."""
    made = []
    for place in places(scores):
        tasks = scores.tasks(place.family)
        own = [one for one in judged if one.place == place]
        cells = [cell for cell in scores.exact if (cell.regime, cell.budget) == (place.regime, place.budget)]
        means = {cell.policy: scores.mean(cell, tasks) for cell in cells if not is_bound(cell.policy)}
        full = Cell(place.regime, FULL, 1.0)
        ceiling = scores.mean(full, tasks) if full in scores.exact else None
        items = scores.num_items(tasks)
        title = (
            f"{place.regime}, {budget_name(place.budget)}: {_tasks_named(place.family, len(tasks))}, "
            f"{items} items"
        )
        sentences = []
        if means:
            top = max(means, key=lambda name: means[name])
            tied = [name for name in means if means[name] == means[top]]
            names = " and ".join(tied) if len(tied) < 4 else f"{len(tied)} policies"
            of_full = "" if ceiling is None else f", where the full cache has {ceiling:.1f}"
            sentences.append(f"Highest mean: {names}, {means[top]:.1f}{of_full}.")
        baseline = best_heuristic(scores, place.regime, place.budget, place.family)
        if baseline is None:
            sentences.append("No heuristic was measured here, so nothing is compared.")
        else:
            sentences.append(
                f"Best heuristic, which the others are compared with: {baseline}, {means[baseline]:.1f}."
            )
        made.append(Paragraph(title, tuple(sentences), tuple(_said(own, baseline or ""))))
    return made


def _said(judged: Sequence[Judged], baseline: str) -> list[Said]:
    made = []
    for word in WORDS:
        own = [one for one in judged if one.result.verdict == word and one.policy != FULL]
        own.sort(key=lambda one: -one.result.estimate)
        if not own:
            continue
        margin = own[0].result.margin
        sentence = {
            "better": f"Better than {baseline}",
            "worse": f"Worse than {baseline}",
            "equivalent": f"Equivalent to {baseline}: shown to lie within ±{margin:g} points",
            "identical": f"Identical to {baseline}: the same score on every item",
            "inconclusive": f"Not known whether it differs from {baseline}: after adjustment these "
            f"items show neither a difference nor that it lies within ±{margin:g} points",
            "unjudged": f"Not judged: {len(own)} more, among which {baseline} was chosen on these items",
        }[word]
        made.append(
            Said(
                *(word, sentence, tuple((one.policy, _in_short(one)) for one in own[:NAMED])),
                more=max(0, len(own) - NAMED),
            )
        )
    return made


def numbers(one: Judged) -> str:
    """Format estimate, interval and the adjusted p of the verdict; for an unknown, what could be shown."""
    r = one.result
    text = f"{r.estimate:+.1f} {r.interval.spelled()}"
    if r.verdict in ("better", "worse"):
        return f"{text}, {_p(r.holm_p)}"
    if r.verdict == "equivalent":
        return f"{text}, outside the margin: {_p(r.holm_within_p)}"
    if r.verdict == "unjudged":
        return f"{text}, {word_of(r)}{_CHOSEN}"
    if r.verdict == "inconclusive" and one.detectable is not None:
        return f"{text}, {_p(r.holm_p)}; these items could show {one.detectable:.1f}"
    if r.verdict == "inconclusive" and not can_reach(r.interval.num_nonzero, one.family_size):
        count = r.interval.num_nonzero
        differ = f"{count} item{'s differ' if count != 1 else ' differs'}"
        return f"{text}, {_p(r.holm_p)}; {differ}: too few for a family of {one.family_size}"
    return text


def _in_short(one: Judged) -> str:
    """Format the numbers of an unjudged policy."""
    return numbers(one).removesuffix(_CHOSEN)


def _p(value: float | None) -> str:
    if value is None:
        return "p not adjusted"
    return "Holm p < 0.001" if value < 0.001 else f"Holm p = {value:.3f}"


def _tasks_named(family: str, count: int) -> str:
    return f"{count} {family} task{'s' if count > 1 else ''}"


def _declared(scores: Scores, regime: str) -> list[tuple[Place, str, str]]:
    """Place, policy and baseline of every comparison of a regime."""
    found = []
    for place in places(scores):
        if place.regime != regime:
            continue
        baseline = best_heuristic(scores, regime, place.budget, place.family)
        for policy in scores.policies:
            cell = Cell(regime, policy, 1.0 if policy == FULL else place.budget)
            if baseline is not None and policy != baseline and cell in scores.exact:
                found.append((place, policy, baseline))
    return found


def _cells(place: Place, policy: str, baseline: str) -> tuple[Cell, Cell]:
    own = Cell(place.regime, policy, 1.0 if policy == FULL else place.budget)
    return own, Cell(place.regime, baseline, place.budget)


def _detectable(
    scores: Scores, place: Place, policy: str, baseline: str, result: PairedResult, family_size: int
) -> float | None:
    tasks = scores.tasks(place.family)
    own, other = (scores.strata(cell, tasks) for cell in _cells(place, policy, baseline))
    differences = [a - b for a, b in zip(own, other, strict=True)]
    count = sum(len(values) for values in differences)
    spread = standard_error(differences) * math.sqrt(count)
    if count < fewest(family_size) or not can_reach(result.sign_flip.num_nonzero, family_size):
        return None
    if not 0 < spread < math.inf:  # nothing varies, or a task has one item
        return None
    return smallest_difference(count, sd=spread, alpha=ALPHA / family_size)
