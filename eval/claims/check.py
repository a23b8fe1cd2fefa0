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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
# Verdict -> outcome of a line that says "better"; of others: undecided.
VERDICTS: dict[str, Outcome] = {"better": "holds", "worse": "does not hold", "identical": "does not hold"}


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
    """Check one claim; `resamples` are at most those of a sign-flip test."""
    check, lines = _Check(claim, scores, parts, resamples), list[Line]()
    judge = {"better": check.better, "not worse": check.not_worse, "closes the gap": check.gap_closed}
    for row in claim.rows:
        if claim.of_gap and row.tasks and not scores.tasks(row.tasks):
            lines.append(Line("not measured", True, "any", 0.0, row.tasks, BEST_HEURISTIC, bound=row.share))
            continue
        for family in check.families(row):
            ready = [one for one in family if check.is_measured(one)]
            lines += [check.unmeasured_line(one) for one in family if one not in ready]
            lines += judge[claim.says](ready)
    return CheckedClaim(claim.name, claim.sentence(parts), tuple(lines), claim.of_gap)


def groups_of(scores: Scores) -> list[str]:
    """Macro-averages that a run has, the one that claims rest on first: over all tasks, then over each task
    family; of a run with one family only that."""
    families = [family for family in FAMILIES if scores.tasks(family)]
    return [ALL, *families] if len(families) > 1 else families


def differences(scores: Scores, own: Cell, other: Cell, family: str) -> list[np.ndarray]:
    """One array per task, in points: own minus other on the same clusters."""
    tasks = scores.tasks(family)
    return [a - b for a, b in zip(scores.strata(own, tasks), scores.strata(other, tasks), strict=True)]


def _outcome_of(low: float, high: float, bound: float, *, shown: bool = True) -> Outcome:
    """Outcome of an interval against a bound; `shown`: whether the test that belongs to it passes."""
    if low >= bound and shown:
        return "holds"
    return "does not hold" if high < bound else "undecided"


@dataclass(frozen=True)
class _Check:
    """A claim that is being checked on a run."""

    stated: Claim
    scores: Scores
    parts: Parts
    resamples: int

    def families(self, row: ClaimRow) -> Iterator[list[Question]]:
        """Questions of a row, those of one Holm family together."""
        policy, elsewhere = self.parts.policy, self.stated.elsewhere
        measured = places_of(self.scores, policy)
        wanted = [*itertools.product(row.regimes, row.keep_ratios)]
        asked = [*measured, *(place for place in wanted if place not in measured)]
        if elsewhere == "beside":
            asked = wanted
        elif elsewhere == "other regimes":
            asked = [place for place in asked if place[1] in row.keep_ratios]
        groups = [row.tasks] if row.tasks else groups_of(self.scores)
        for group in groups:
            found = [one for place in asked for one in self._at(place, group, group == groups[0], row)]
            yield from [found] if self.stated.adjusted else [[one] for one in found]
            if elsewhere == "beside":
                others = [place for place in measured if place not in wanted]
                yield [one for place in others for one in self._at(place, group, False, row)]
            if self.stated.adjusted:
                yield [
                    Question(Cell(regime, policy, budget), name, name, group, False, row)
                    for regime, budget in measured
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

    def _lacks_oracle(self, one: Question) -> bool:
        oracle = one.cell._replace(policy=self.parts.oracle)
        return self.stated.needs_oracle and oracle not in self.scores.judged

    def is_measured(self, one: Question) -> bool:
        """Whether all cells of a question were measured."""
        return one.cell in self.scores.judged and one.other is not None and not self._lacks_oracle(one)

    def unmeasured_line(self, one: Question) -> Line:
        """The line of a place that was not measured. A claim that needs an oracle asks for one in the regimes
        of its rows alone."""
        needs = self.stated.needs_oracle
        optional = needs and one.cell.regime not in one.row.regimes
        where = (one.cell.regime, one.cell.budget, one.family, one.label)
        bound = self.stated.bound(one.row) if needs else 0.0
        note = "no oracle in this regime" if optional and self._lacks_oracle(one) else ""
        return Line("not measured", one.required and not optional, *where, bound=bound, note=note)

    def _line(self, one: Question, interval: Interval | None, outcome: Outcome, **more: Any) -> Line:
        """A line of two cells that were compared, with means, counts, seeds and tasks."""
        scores, own, other = self.scores, one.cell, one.opponent
        tasks, full = scores.tasks(one.family), Cell(own.regime, FULL, 1.0)
        made = differences(scores, own, other, one.family)
        seeds = scores.seed_means(own, tasks), scores.seed_means(other, tasks)
        ends = None if interval is None or interval.undefined else interval
        line = Line(
            *(outcome, one.required, own.regime, own.budget, one.family, other.policy),
            estimate=interval.estimate if interval else None,
            low=ends.low if ends else None,
            high=ends.high if ends else None,
            bound=self.stated.bound(one.row),
            policy_mean=scores.mean(own, tasks),
            against_mean=scores.mean(other, tasks),
            full_mean=scores.mean(full, tasks) if full in scores.judged else None,
            num_items=sum(values.size for values in made),
            num_differ=sum(int(np.count_nonzero(values)) for values in made),
            by_seed={seed: mean - seeds[1][seed] for seed, mean in seeds[0].items()},
            by_task={task: float(values.mean()) for task, values in zip(tasks, made, strict=True)},
        )
        return replace(line, **more)

    def better(self, asked: Sequence[Question]) -> list[Line]:
        """Lines that hold where the verdict of their family is better."""
        pairs = [(one.cell, one.opponent, one.family) for one in asked]
        margin = asked[0].row.margin if asked else 0.0
        lines = []
        made = compare_family(self.scores, pairs, margin=margin, resamples=self.resamples)
        for one, result in zip(asked, made, strict=True):
            assert result is not None
            note = result.verdict + ", best of all heuristics here" * (one.label == BEST_HEURISTIC)
            more = {"p": result.result.holm_p, "note": note}
            lines.append(self._line(one, result.interval, VERDICTS.get(result.verdict, "undecided"), **more))
        return lines

    def not_worse(self, asked: Sequence[Question]) -> list[Line]:
        """Lines that hold where the 95 % interval lies above -margin and the adjusted p is below 2.5 %, and
        do not where the interval, which is not adjusted, lies below."""
        made = [differences(self.scores, one.cell, one.opponent, one.family) for one in asked]
        tests = [not_worse(own, one.row.margin) for own, one in zip(made, asked, strict=True)]
        lines = []
        for one, own, step in zip(asked, made, step_down(tests, ONE_SIDED), strict=True):
            interval, more = paired_interval(own), dict[str, Any]()
            outcome = _outcome_of(interval.low, interval.high, -one.row.margin, shown=step.p < ONE_SIDED)
            if self.stated.adjusted:
                end = None if step.end == -np.inf else step.end
                more = {"p": step.p, "adjusted_low": end, "note": f"one of {len(tests)}"}
            lines.append(self._line(one, interval, outcome, **more))
        return lines

    def gap_closed(self, asked: Sequence[Question]) -> list[Line]:
        """Lines of the share `(mean(policy) - mean(other)) / (mean(oracle) - mean(other))` of the gap that is
        closed.

        One holds where the 95 % interval of `policy - other - share * (oracle - other)` does not go below 0:
        that is where the ratio's interval (`retain.eval.stats.significance.ratio_interval`) does not go below
        the share.
        """
        return [*map(self._share_closed, asked)]

    def _share_closed(self, one: Question) -> Line:
        scores, own, base, share = self.scores, one.cell, one.opponent, one.row.share
        oracle = own._replace(policy=self.parts.oracle)
        won = differences(scores, own, base, one.family)
        gap = differences(scores, oracle, base, one.family)
        more: dict[str, Any] = {"gap": float(macro_mean(*gap))}
        if more["gap"] < self.stated.gap_from:
            return self._line(one, None, "no gap", **more, required=False, by_seed={})
        means = [scores.seed_means(cell, scores.tasks(one.family)) for cell in (own, base, oracle)]
        more["crossed"] = self._crossed(oracle, one.family)
        more["by_seed"] = {
            seed: (mine - means[1][seed]) / (means[2][seed] - means[1][seed])
            for seed, mine in means[0].items()
            if means[2][seed] > means[1][seed]
        }
        rest = paired_interval([a - share * b for a, b in zip(won, gap, strict=True)])
        interval = ratio_interval(won, gap)
        if interval.undefined or paired_interval(gap).low <= 0:
            judged_by = f"judged by won - {share:g} gap: {rest.estimate:+.1f} {rest.spelled()}"
            more |= {"low": None, "high": None, "note": f"there may be no gap; {judged_by}"}
        return self._line(one, interval, _outcome_of(rest.low, rest.high, 0.0), **more)

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
