"""Who beats whom, in words that say no more than the numbers beside them.

In: the scores of a run. Out: every policy minus the best heuristic of its regime, budget and task family,
with interval, tests and verdict (`Judged`), and for each such place a paragraph (`Paragraph`).

The one decision taken here: what is adjusted together. All comparisons of one regime, over all its budgets,
policies and task families, are one Holm family, which is fixed by the config before anything is measured
(only which heuristic is the baseline is read from the scores, and that choice favours the heuristic). A
comparison that shows nothing is called unknown, with the difference that this many items could have shown;
it is never called "the same".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retain.eval.ceilings import Discrimination, discriminate
from retain.eval.config import CONTROLS, FULL
from retain.eval.paired_result import PairedResult, adjust, compare_paired
from retain.eval.power import smallest_difference
from retain.eval.significance import standard_error
from retain.eval.summary import FAMILIES, Cell, Scores, best_heuristic

ALPHA = 0.05
# Bounds and controls are no methods: they are judged, and never called best.
BOUNDS = (FULL, *CONTROLS)
WORDS = ("better", "equivalent", "identical", "worse", "inconclusive")
# Below this many items a spread says nothing about what could have been shown.
FEWEST = 8
# A paragraph names this many policies of a verdict; the table names all.
NAMED = 8


@dataclass(frozen=True)
class Place:
    """Where a question is decided: one regime, budget and task family."""

    regime: str
    budget: float
    family: str


@dataclass(frozen=True)
class Judged:
    """One policy minus the best heuristic at one place, in points.

    Attributes:
        place: Where.
        policy, baseline: What is compared.
        result: Interval, tests, verdict within its Holm family.
        detectable: Smallest true difference that this many items would show in four runs of five, at the
            level that its Holm family leaves one comparison; None where nothing differs.
    """

    place: Place
    policy: str
    baseline: str
    result: PairedResult
    detectable: float | None


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
    """In words: "keep_ratio 0.2", "128 tokens per head", "full cache"."""
    if budget == 1:
        return "full cache"
    return f"keep_ratio {budget:g}" if budget < 1 else f"{budget:g} tokens per head"


def is_bound(policy: str) -> bool:
    """Whether a label of tables names the full cache or a control, under whatever protection."""
    return policy.partition("+")[0] in BOUNDS


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
    """Whether each task tells policies apart, at every regime and budget; a place's `family` is the task."""
    return [
        (Place(regime, budget, task), discriminate(scores, regime, task, budget))
        for regime in scores.regimes
        for budget in scores.budgets
        for task in scores.families
        if Cell(regime, FULL, 1.0) in scores.exact
        and any((cell.regime, cell.budget) == (regime, budget) for cell in scores.exact)
    ]


def judge(scores: Scores, *, margin: float, resamples: int) -> list[Judged]:
    """Every policy, the full cache among them, minus the best heuristic of each place.

    Args:
        scores: Of the run.
        margin: Largest difference that would not matter, in points.
        resamples: Of intervals and sign flips; more where a family is so large that fewer could not pass.
    """
    made: list[Judged] = []
    for regime in scores.regimes:
        pairs = _declared(scores, regime)
        enough = max(resamples, math.ceil(4 * len(pairs) / ALPHA))
        results = {}
        for place, policy, baseline in pairs:
            own, other = _strata(scores, place, policy), _strata(scores, place, baseline)
            tasks = [task for task, x in zip(scores.tasks(place.family), own, strict=True) for _ in x]
            results[place, policy] = compare_paired(
                [value for x in own for value in x],
                [value for x in other for value in x],
                margin=margin,
                strata=tasks,
                alpha=ALPHA,
                resamples=enough,
            )
        if not results:
            continue
        for (key, result), (place, policy, baseline) in zip(adjust(results).items(), pairs, strict=True):
            assert key == (place, policy)
            made.append(
                Judged(
                    *(place, policy, baseline, result),
                    detectable=_detectable(scores, place, policy, baseline, len(pairs)),
                )
            )
    return made


def paragraphs(scores: Scores, judged: Sequence[Judged]) -> list[Paragraph]:
    """What is known, and what is not, at every place."""
    made = []
    for place in places(scores):
        tasks = scores.tasks(place.family)
        own = [one for one in judged if one.place == place]
        cells = [cell for cell in scores.exact if (cell.regime, cell.budget) == (place.regime, place.budget)]
        means = {cell.policy: scores.mean(cell, tasks) for cell in cells if not is_bound(cell.policy)}
        full = Cell(place.regime, FULL, 1.0)
        ceiling = scores.mean(full, tasks) if full in scores.exact else None
        items = sum(len(scores.seeds[task]) for task in tasks)
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
        }[word]
        made.append(
            Said(
                *(word, sentence, tuple((one.policy, numbers(one)) for one in own[:NAMED])),
                more=max(0, len(own) - NAMED),
            )
        )
    return made


def numbers(one: Judged) -> str:
    """Estimate, interval, the adjusted p that the verdict rests on; for an unknown, what could be shown."""
    r = one.result
    text = f"{r.estimate:+.1f} [{r.interval.low:+.1f}, {r.interval.high:+.1f}]"
    if r.verdict in ("better", "worse"):
        return f"{text}, {_p(r.holm_p)}"
    if r.verdict == "equivalent":
        return f"{text}, TOST {_p(r.holm_equivalence_p)}"
    if r.verdict == "inconclusive" and one.detectable is not None:
        return f"{text}, {_p(r.holm_p)}; these items could show {one.detectable:.1f}"
    return text


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


def _strata(scores: Scores, place: Place, policy: str) -> list[np.ndarray]:
    cell = Cell(place.regime, policy, 1.0 if policy == FULL else place.budget)
    return scores.strata(cell, scores.tasks(place.family))


def _detectable(scores: Scores, place: Place, policy: str, baseline: str, family_size: int) -> float | None:
    pairs = zip(_strata(scores, place, policy), _strata(scores, place, baseline), strict=True)
    differences = [a - b for a, b in pairs]
    count = sum(len(own) for own in differences)
    spread = standard_error(differences) * math.sqrt(count)
    if count < FEWEST or not spread > 0:
        return None
    return smallest_difference(count, sd=spread, alpha=ALPHA / family_size)
