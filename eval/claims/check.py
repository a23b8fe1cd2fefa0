"""Checks claims line by line: a line for every regime, budget and macro-average that a claim speaks of.

A line *holds* where its interval and its test, if it has one, show it, *does not hold* where its interval
shows the opposite, and is *undecided* otherwise, whatever the estimate. A place that was not measured is a
line too.

The best heuristic is the line with the highest mean of that very cell, chosen on the items that it is then
compared on, out of every line of the run that reads neither gates nor head classes, under whatever
protection. Its mean is therefore too high, and the differences to it are too small. Which cells have a gap to
close is read from the same scores and leans the other way, so the cells left out are printed with their gap.

Better: the interval excludes 0 and the Holm-adjusted test passes; the wanted lines of one macro-average are
one Holm family, the lines shown beside are others. Not worse rests on `retain.eval.stats.not_worse` beside
the interval, so that losses too rare to be seen count. The gap closed rests on its interval alone, whose
coverage is measured (`retain.eval.studies.interval_coverage`).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from retain.eval.claims.claim import BEST_HEURISTIC, CheckedClaim, Claim, ClaimRow, Line, Outcome, Parts
from retain.eval.claims.runs import places_of
from retain.eval.config import FULL
from retain.eval.stats.not_worse import ONE_SIDED, not_worse, step_down
from retain.eval.stats.significance import Interval, macro_mean, paired_interval, ratio_interval
from retain.eval.stats.summary import ALL, FAMILIES, Cell, Scores, best_of, compare_family

# Of a heuristic that is chosen on one half of the items and compared on the other.
SPLITS = 20


class Question(NamedTuple):
    """One line that is asked for: `cell` against `other`, None where that was not measured."""

    cell: Cell
    label: str
    other: str | None
    family: str
    required: bool
    row: ClaimRow

    @property
    def opponent(self) -> Cell:
        """The cell that it is compared with."""
        assert self.other is not None
        return self.cell._replace(policy=self.other)


def check_claim(claim: Claim, scores: Scores, parts: Parts, *, resamples: int = 5000) -> CheckedClaim:
    """Check one claim.

    Args:
        claim: As stated.
        scores: Of the run.
        parts: Which lines of it play which part.
        resamples: At most, of a sign-flip test.
    """
    return _Check(claim, scores, parts, resamples).claim()


def groups_of(scores: Scores) -> list[str]:
    """Macro-averages that a run has, the one that claims rest on first: over all tasks, then over each task
    family; of a run with one family only that."""
    families = [family for family in FAMILIES if scores.tasks(family)]
    return [ALL, *families] if len(families) > 1 else families


def differences(scores: Scores, own: Cell, other: Cell, family: str) -> list[np.ndarray]:
    """One array per task, in points: own minus other on the same clusters."""
    tasks = scores.tasks(family)
    pairs = zip(scores.strata(own, tasks), scores.strata(other, tasks), strict=True)
    return [a - b for a, b in pairs]


@dataclass(frozen=True)
class _Check:
    """A claim that is being checked on a run."""

    stated: Claim
    scores: Scores
    parts: Parts
    resamples: int

    def claim(self) -> CheckedClaim:
        stated, lines = self.stated, list[Line]()
        judge = {"better": self._better, "not worse": self._not_worse, "closes the gap": self._gap_closed}
        of_gap = stated.says == "closes the gap"
        for row in stated.rows:
            if of_gap and row.tasks and not self.scores.tasks(row.tasks):
                nowhere = Line("not measured", True, "any", 0.0, row.tasks, BEST_HEURISTIC, bound=row.share)
                lines.append(nowhere)
                continue
            for family in self._families(row):
                ready = [one for one in family if self._measured(one)]
                lines += [self._lacking(one) for one in family if one not in ready]
                lines += judge[stated.says](ready)
        return CheckedClaim(stated.name, stated.sentence(self.parts), tuple(lines), of_gap)

    def _families(self, row: ClaimRow) -> Iterator[list[Question]]:
        """Questions of a row, those of one Holm family together."""
        there = places_of(self.scores, self.parts.policy)
        wanted = [*itertools.product(row.regimes, row.keep_ratios)]
        others = [place for place in there if place not in wanted]
        asked = [*there, *(place for place in wanted if place not in there)]
        if self.stated.elsewhere == "beside":
            asked = wanted
        elif self.stated.elsewhere == "other regimes":
            asked = [place for place in asked if place[1] in row.keep_ratios]
        groups = [row.tasks] if row.tasks else groups_of(self.scores)
        for group in groups:
            first = group == groups[0]
            found = [one for place in asked for one in self._at(place, group, first, row)]
            yield from [found] if self.stated.adjusted else [[one] for one in found]
            if self.stated.elsewhere == "beside":
                yield [one for place in others for one in self._at(place, group, False, row)]
            if self.stated.adjusted:
                yield [
                    Question(Cell(regime, self.parts.policy, budget), name, name, group, False, row)
                    for regime, budget in there
                    for name in self.parts.also
                    if Cell(regime, name, budget) in self.scores.judged
                ]

    def _at(self, place: tuple[str, float], group: str, required: bool, row: ClaimRow) -> list[Question]:
        """Questions of one place: one for each opponent, or one for the best of them."""
        cell = Cell(place[0], self.parts.policy, place[1])
        found: dict[str, str | None] = {}
        for role in self.stated.against:
            names = self.parts.named(role)
            label = role if role == BEST_HEURISTIC else names[0]
            found[label] = best_of(self.scores, names, *place, group)
        if self.stated.pick == "best":
            names = tuple(name for name in found.values() if name)
            complete = len(names) == len(found)
            found = {"the best of all": best_of(self.scores, names, *place, group) if complete else None}
        return [Question(cell, label, other, group, required, row) for label, other in found.items()]

    def _oracle_missing(self, one: Question) -> bool:
        return one.cell._replace(policy=self.parts.oracle) not in self.scores.judged

    def _measured(self, one: Question) -> bool:
        missing = self.stated.needs_oracle and self._oracle_missing(one)
        return one.cell in self.scores.judged and one.other is not None and not missing

    def _lacking(self, one: Question) -> Line:
        """The line of a place that was not measured. A claim that needs an oracle asks for one in the regimes
        of its rows alone."""
        row, needs = one.row, self.stated.needs_oracle
        optional = needs and one.cell.regime not in row.regimes
        note = "no oracle in this regime" if optional and self._oracle_missing(one) else ""
        required, place = one.required and not optional, (one.cell.regime, one.cell.budget)
        bound = self._bound(row) if needs else 0.0
        return Line("not measured", required, *place, one.family, one.label, bound=bound, note=note)

    def _bound(self, row: ClaimRow) -> float:
        return {"better": 0.0, "not worse": -row.margin, "closes the gap": row.share}[self.stated.says]

    def _line(self, one: Question, interval: Interval, outcome: Outcome, **more: Any) -> Line:
        """A line of two cells that were compared, with means, counts, seeds and tasks."""
        scores, own, other = self.scores, one.cell, one.opponent
        tasks, full = scores.tasks(one.family), Cell(own.regime, FULL, 1.0)
        made = differences(scores, own, other, one.family)
        seeds = scores.seed_means(own, tasks), scores.seed_means(other, tasks)
        found: dict[str, Any] = {
            **{"required": one.required, "regime": own.regime, "budget": own.budget},
            **{"family": one.family, "against": other.policy},
            "estimate": interval.estimate,
            "low": None if interval.undefined else interval.low,
            "high": None if interval.undefined else interval.high,
            "bound": self._bound(one.row),
            "policy_mean": scores.mean(own, tasks),
            "against_mean": scores.mean(other, tasks),
            "full_mean": scores.mean(full, tasks) if full in scores.judged else None,
            "num_items": sum(values.size for values in made),
            "num_differ": sum(int(np.count_nonzero(values)) for values in made),
            "by_seed": {seed: mean - seeds[1][seed] for seed, mean in seeds[0].items()},
            "by_task": {task: float(values.mean()) for task, values in zip(tasks, made, strict=True)},
        }
        return Line(outcome=outcome, **(found | more))

    def _better(self, asked: Sequence[Question]) -> list[Line]:
        pairs = [(one.cell, one.opponent, one.family) for one in asked]
        margin = asked[0].row.margin if asked else 0.0
        outcomes: dict[str, Outcome] = {
            "better": "holds",
            "worse": "does not hold",
            "identical": "does not hold",
        }
        lines = []
        made = compare_family(self.scores, pairs, margin=margin, resamples=self.resamples)
        for one, result in zip(asked, made, strict=True):
            assert result is not None
            chosen = ", best of all heuristics here" if one.label == BEST_HEURISTIC else ""
            outcome = outcomes.get(result.verdict, "undecided")
            note = result.verdict + chosen
            lines.append(self._line(one, result.interval, outcome, p=result.result.holm_p, note=note))
        return lines

    def _not_worse(self, asked: Sequence[Question]) -> list[Line]:
        """It holds where the 95 % interval lies above -margin and the adjusted p is below 2.5 %; it does not
        where the interval, which is not adjusted, lies below."""
        made = [differences(self.scores, one.cell, one.opponent, one.family) for one in asked]
        tests = [not_worse(own, one.row.margin) for own, one in zip(made, asked, strict=True)]
        lines = []
        for one, own, step in zip(asked, made, step_down(tests, ONE_SIDED), strict=True):
            interval, bound = paired_interval(own), -one.row.margin
            outcome: Outcome = "undecided"
            if interval.low >= bound and step.p < ONE_SIDED:
                outcome = "holds"
            elif interval.high < bound:
                outcome = "does not hold"
            more: dict[str, Any] = {}
            if self.stated.adjusted:
                end = None if step.end == -np.inf else step.end
                more = {"p": step.p, "adjusted_low": end, "note": f"one of {len(tests)}"}
            lines.append(self._line(one, interval, outcome, **more))
        return lines

    def _gap_closed(self, asked: Sequence[Question]) -> list[Line]:
        return [self._share_closed(one) for one in asked]

    def _share_closed(self, one: Question) -> Line:
        """The share `(mean(policy) - mean(other)) / (mean(oracle) - mean(other))` of the gap that is closed.

        It holds where the 95 % interval of `policy - other - share * (oracle - other)` does not go below 0:
        that is where the ratio's interval (`retain.eval.stats.significance.ratio_interval`) does not go below
        the share.
        """
        scores, own, base, share = self.scores, one.cell, one.opponent, one.row.share
        oracle = own._replace(policy=self.parts.oracle)
        won = differences(scores, own, base, one.family)
        gap = differences(scores, oracle, base, one.family)
        more: dict[str, Any] = {"gap": float(macro_mean(*gap))}
        if more["gap"] < self.stated.gap_from:
            nothing = Interval(0.0, -math.inf, math.inf, 0.95, "undefined", 0, 0)
            more |= {"required": False, "estimate": None, "by_seed": {}}
            return self._line(one, nothing, "no gap", **more)
        means = [scores.seed_means(cell, scores.tasks(one.family)) for cell in (own, base, oracle)]
        more["crossed"] = self._crossed(oracle, one.family)
        more["by_seed"] = {
            seed: (mine - means[1][seed]) / (means[2][seed] - means[1][seed])
            for seed, mine in means[0].items()
            if means[2][seed] > means[1][seed]
        }
        rest = paired_interval([a - share * b for a, b in zip(won, gap, strict=True)])
        interval = ratio_interval(won, gap)
        outcome: Outcome = "undecided"
        if rest.low >= 0:
            outcome = "holds"
        elif rest.high < 0:
            outcome = "does not hold"
        if interval.undefined or paired_interval(gap).low <= 0:
            said = f"judged by won - {share:g} gap: {rest.estimate:+.1f} {rest.spelled()}"
            more |= {"low": None, "high": None, "note": f"there may be no gap; {said}"}
        return self._line(one, interval, outcome, **more)

    def _crossed(self, oracle: Cell, family: str) -> float | None:
        """The share closed with the heuristic chosen on one half of each task's items and compared on the
        other, summed over both ways of `SPLITS` splits; None where a task has one item, or no gap is left.

        Halves are drawn (seed 0): kinds of questions may take turns with the items, and a choice on one kind
        that is compared on another is no choice on other items."""
        parts, tasks = self.parts, self.scores.tasks(family)
        names = [n for n in parts.heuristics if oracle._replace(policy=n) in self.scores.judged]
        strata = {
            name: self.scores.strata(oracle._replace(policy=name), tasks)
            for name in (*names, parts.policy, parts.oracle)
        }
        if any(values.size < 2 for values in strata[parts.oracle]):
            return None
        rng = np.random.default_rng(0)
        won = gap = 0.0
        for _ in range(SPLITS):
            orders = [rng.permutation(values.size) for values in strata[parts.oracle]]
            halves = [
                {
                    name: float(macro_mean(*(v[o[half::2]] for v, o in zip(own, orders, strict=True))))
                    for name, own in strata.items()
                }
                for half in (0, 1)
            ]
            for chosen, compared in (halves[::-1], halves):
                best = max(names, key=chosen.__getitem__)
                won += compared[parts.policy] - compared[best]
                gap += compared[parts.oracle] - compared[best]
        return won / gap if gap > 0 else None
