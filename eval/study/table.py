"""Tables of a study: each ingredient of a policy against the levels that could stand in its place.

Every difference is "level minus winner" on the same items, and the words are about the winner's choice. It
*pays* against a level that is worse, *harms* against one that is better, *does not pay* where the two are
shown to lie within the margin, and anything else is *not known*, the same answers on too few items included.
The levels of one factor, over all budgets of one regime, are one Holm family, for each task family apart: the
table that a reader looks at is what is adjusted.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, get_args

from retain.eval.config import FULL
from retain.eval.report.blocks import markdown_table
from retain.eval.stats.comparisons import budget_name
from retain.eval.stats.paired_result import PairedResult
from retain.eval.stats.significance import Verdict
from retain.eval.stats.summary import ALL, FAMILIES, SAME_BYTES, Cell, Comparison, Scores, compare_family
from retain.eval.study.plan import WINNER, Plan, StudyConfig

Word = Literal["pays", "does not pay", "harms", "not known"]
WORDS: tuple[Word, ...] = get_args(Word)
# The verdict on "level minus winner", as a word on the winner's choice; identical is `_of_identical`.
WORD_OF: Mapping[Verdict, Word] = {
    "worse": "pays",
    "better": "harms",
    "equivalent": "does not pay",
    "inconclusive": "not known",
}
GRID, REFERENCES = "grid", "references"


@dataclass(frozen=True)
class Entry:
    """One level at one place.

    Attributes:
        table: Factor, "grid" or "references".
        level: Name in that table.
        line: Its measured line.
        regime, budget, family: Where; `family` is "all", "seen" or "held-out".
        mean: Macro mean over the family's tasks, in points.
        made: Level minus winner, adjusted; None of the winner.
        seeds: Level minus winner, for each seed; empty of the winner.
        items: Items that agreement counts for: tasks times those of the task with the fewest; 0: all.
    """

    table: str
    level: str
    line: str
    regime: str
    budget: float
    family: str
    mean: float
    made: Comparison | None
    seeds: Mapping[int, float]
    items: int = 0

    @property
    def word(self) -> Word | None:
        """The word on the winner's choice; None of the winner itself."""
        if self.made is None:
            return None
        if self.made.verdict == "identical":
            return _of_identical(self.made.result, self.items or self.made.result.num_clusters)
        return WORD_OF[self.made.verdict]


def _of_identical(result: PairedResult, items: int) -> Word:
    """Of two that agree on all of n items, true differences of up to `100 (1 - (alpha / m)^(1 / n))` points
    are left open at level alpha in a family of m: with few items that is as good as anything. Of a mean over
    K tasks n is K times the items of the task with the fewest (`retain.eval.stats.not_worse`)."""
    left_open = 100 * (1 - (result.alpha / (result.family_size or 1)) ** (1 / items))
    return "does not pay" if left_open < result.margin else "not known"


@dataclass(frozen=True)
class Ingredient:
    """Findings over one task family on one level that leaves something of the winner out.

    A factor whose levels leave out different things (queries of one source, then those of another) has one
    of these for each.

    Attributes:
        factor: Its name.
        family: Of tasks.
        chosen: The winner's level; None where no level is the winner's.
        absent: The level without the ingredient; None where the factor has none.
        places: (regime, budget) -> word.
    """

    factor: str
    family: str
    chosen: str | None
    absent: str | None
    places: Mapping[tuple[str, float], Word]

    @property
    def verdict(self) -> str:
        """Over all places: an ingredient must pay at one of them and harm at none."""
        found = set(self.places.values())
        if {"pays", "harms"} <= found:
            return "pays here, harms there"
        ranks: tuple[Word, ...] = ("harms", "pays", "not known", "does not pay")
        return next((word for word in ranks if word in found), "not asked")

    @property
    def sentence(self) -> str:
        """The verdict, and of how many places it is; without a level that leaves the ingredient out, that
        there is none."""
        if self.absent is None:
            return "not asked: its levels are alternatives, and none leaves it out"
        if not self.places:
            return "not asked: the winner leaves it out"
        word: str = self.verdict
        places: list[str] = [*self.places.values()]
        if word not in ("pays", "harms") or places.count(word) == len(places):
            return word
        return f"{word} at {places.count(word)} of {len(places)} places"


def tables_of(study: StudyConfig, plan: Plan) -> dict[str, dict[str, str]]:
    """Table -> level -> line. The winner stands in each, under its level's name if it has one there."""
    tables: dict[str, dict[str, str]] = {}
    if study.plan == "grid":
        tables[GRID] = {name: name for name in plan.lines}
    else:
        for factor, levels in study.factors.items():
            own = {name: plan.place[factor, name] for name in levels if (factor, name) in plan.place}
            tables[factor] = own if WINNER in own.values() else {WINNER: WINNER, **own}
    if study.references:
        tables[REFERENCES] = {WINNER: WINNER, **{name: name for name in study.references}}
    return tables


def entries_of(
    scores: Scores, tables: Mapping[str, Mapping[str, str]], *, margin: float, resamples: int
) -> list[Entry]:
    """Every level of every table (`tables_of`), at every place that was measured; `margin` in points."""
    return [
        entry
        for table, levels in tables.items()
        for regime in scores.regimes
        for family in families_of(scores)
        for entry in _one_family(scores, table, levels, regime, family, margin=margin, resamples=resamples)
    ]


def families_of(scores: Scores) -> list[str]:
    """Averages over tasks that differ: over all of them, and over each family where there are several."""
    families = [family for family in FAMILIES if scores.tasks(family)]
    return [ALL, *families] if len(families) > 1 else [ALL]


def _one_family(
    scores: Scores, table: str, levels: Mapping[str, str], regime: str, family: str, **options: Any
) -> list[Entry]:
    """The entries of one declared Holm family, and the winner's."""
    tasks = scores.tasks(family)
    count = len(tasks) * min(scores.num_items([task]) for task in tasks)
    found = [
        (level, Cell(regime, line, budget), Cell(regime, WINNER, budget))
        for level, line in levels.items()
        for budget in scores.budgets
        if Cell(regime, line, budget) in scores.exact
    ]
    # Two levels of a table may be one line: it is tested once, and both have its result.
    pairs = list(dict.fromkeys((cell, winner, family) for _, cell, winner in found if cell != winner))
    settled = dict(zip(pairs, compare_family(scores, pairs, **options), strict=True))
    made = []
    for level, cell, winner in found:
        own, base = scores.seed_means(cell, tasks), scores.seed_means(winner, tasks)
        seeds = {} if cell == winner else {seed: own[seed] - base[seed] for seed in own}
        mean, one = scores.mean(cell, tasks), settled.get((cell, winner, family))
        made.append(Entry(table, level, cell.policy, regime, cell.budget, family, mean, one, seeds, count))
    return made


def ingredients_of(study: StudyConfig, plan: Plan, entries: Sequence[Entry]) -> list[Ingredient]:
    """Verdicts on each ingredient, at every place: against each level that leaves something out.

    It pays where the winner is better, harms where the winner is worse and does not pay where they are
    equivalent; otherwise nothing is known.
    """
    if study.plan == "grid":
        return []
    made = []
    for factor, levels in study.factors.items():
        chosen = next((name for name in levels if plan.place.get((factor, name)) == WINNER), None)
        absent = [name for name, level in levels.items() if level.absent and not level.elsewhere]
        asked: list[str | None] = [*absent] or [None]
        for left_out, family in itertools.product(asked, dict.fromkeys(one.family for one in entries)):
            own = [one for one in entries if (one.table, one.family) == (factor, family)]
            # A winner that leaves the ingredient out has nothing to defend: its own entries have no word.
            found = [(one.regime, one.budget, one.word) for one in own if one.level == left_out]
            places = {(regime, budget): word for regime, budget, word in found if word is not None}
            if own:
                made.append(Ingredient(factor, family, chosen, left_out, places))
    return made


def unequal_bytes(scores: Scores, lines: Sequence[str]) -> list[str]:
    """Lines that hold other bytes than the winner, at the same place: a comparison of unequals."""
    notes = []
    for cell in scores.memory:
        share = scores.bytes_apart(cell, cell._replace(policy=WINNER))
        if cell.policy in lines and share is not None and abs(share) > SAME_BYTES:
            notes.append(f"{cell.policy} holds {100 * share:+.1f} % of the winner's bytes ({_place(cell)})")
    return notes


def nothing_evicted(scores: Scores) -> list[str]:
    """Places where every answer of the winner was given before anything had gone: nothing was measured."""
    notes = []
    for cell in scores.exact:
        ratios = [ratio for task in scores.families for ratio in scores.attended.get((cell, task), ())]
        if cell.policy == WINNER and ratios and min(ratios) >= 1:
            where = f"({_place(cell)}): lower compare.every"
            notes.append(f"nothing had been evicted before an answer ended {where}")
    return notes


def _place(cell: Cell) -> str:
    return f"{cell.regime}, {budget_name(cell.budget)}"


def as_rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Every entry as one flat row of numbers and words."""
    rows = []
    names = ("table", "level", "line", "regime", "budget", "family", "mean", "word")
    for one in entries:
        row: dict[str, Any] = {name: getattr(one, name) for name in names}
        if one.made is not None:
            numbers = {name: _number(value) for name, value in one.made.result.row().items()}
            # Of the interval; a row's level is the factor's.
            row |= {"interval_level": numbers.pop("level"), **numbers}
        rows.append(row | {"seeds": {str(seed): value for seed, value in one.seeds.items()}})
    return rows


def _number(value: Any) -> Any:
    """A number that JSON has: an end that is not known is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_markdown(
    study: StudyConfig, plan: Plan, scores: Scores, entries: Sequence[Entry], *, head: Sequence[str]
) -> str:
    """The text of `study.md`; `head` are the lines below its title, on the run and its code."""
    compare = study.compare
    lines = [f"# Study `{compare.run}`", "", *head, ""]
    lines += [
        f"The winner: `[{', '.join(study.winner.policy)}]`, gates `{study.winner.gates}`.",
        "",
        "Every number is a macro mean over tasks in points, and every difference is level minus winner on "
        "the same items, with its paired 95 % interval. Words are about the winner's choice: it pays "
        f"against a level that is worse, harms against one that is better, does not pay where both lie "
        f"within ±{compare.margin_points:g} points, and else it is not known. The levels of one table (one "
        "factor in one regime, all budgets) are one Holm family for each task family.",
        "",
        "A winner that was chosen on these very items leads by too much: state its lead on others.",
    ]
    lines += _ingredients(study, ingredients_of(study, plan, entries))
    for table in dict.fromkeys(one.table for one in entries):
        own = [one for one in entries if one.table == table]
        lines += ["", f"## {table}", ""]
        lines += _levels(study, plan, table)
        for regime in dict.fromkeys(one.regime for one in own):
            lines += ["", f"### {table}, {regime}", ""]
            lines += _table([one for one in own if one.regime == regime])
    lines += _marginals(study, plan, entries)
    lines += _full(scores)
    notes = nothing_evicted(scores) + unequal_bytes(scores, [*plan.lines, *study.references])
    notes += [
        f"left out of the grid, since it cannot be: {name}: {why}" for name, why in plan.skipped.items()
    ]
    if notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _ingredients(study: StudyConfig, found: Sequence[Ingredient]) -> list[str]:
    if not found:
        return []
    lines = [
        "",
        "## Ingredients",
        "",
        "Of the places (regime and budget) where an ingredient was left out. The places of one regime are "
        "adjusted together; regimes, and averages over tasks, are not, so that one place alone "
        "that pays, among many, may be chance:",
        "",
    ]
    rows = []
    for one in found:
        places: list[str] = [*one.places.values()]
        missing = "no level is marked `absent`"
        if one.absent is not None:
            level = study.factors[one.factor][one.absent]
            missing = one.absent + " (policy and gates at once)" * bool(level.changes and level.gates)
        chosen = one.chosen or "none of its levels"
        count = [str(places.count(word)) for word in WORDS]
        rows.append([one.factor, one.family, chosen, missing, *count, one.sentence])
    heads = ["ingredient", "tasks", "in the winner", "left out", *WORDS, "verdict"]
    return lines + markdown_table(heads, rows)


def _levels(study: StudyConfig, plan: Plan, table: str) -> list[str]:
    """The levels of a factor, one a line."""
    lines, levels = [], study.factors.get(table, {})
    if levels and not any(level.absent for level in levels.values()):
        lines = [
            "These are alternatives: none of them leaves the ingredient out, so that whether it pays at all "
            "is not asked here. Each is compared with the winner's.",
            "",
        ]
    for name, level in levels.items():
        changes = [*level.changes, *([f"gates {level.gates}"] if level.gates else [])]
        line = plan.place.get((table, name))
        two = "; two changes at once: policy and gates" if level.changes and level.gates else ""
        same = ""
        if level.elsewhere:
            same = f"; not measured here: {level.elsewhere}"
        elif line == WINNER:
            same = "; the winner"
        elif line != f"{table}={name}":
            same = f"; the same line as {line}"
        absent = "; the ingredient left out" if level.absent else ""
        lines.append(f"- {name}: `{', '.join(changes) or 'no change'}`{same}{absent}{two}")
    return lines


def _table(entries: Sequence[Entry]) -> list[str]:
    """Levels at every budget of one regime."""
    families = [f for f in (ALL, *FAMILIES) if any(one.family == f for one in entries)]
    at = {(one.level, one.budget, one.family): one for one in entries}
    rows = []
    for budget in dict.fromkeys(one.budget for one in entries):
        for level in dict.fromkeys(one.level for one in entries):
            own = [at[level, budget, family] for family in families]
            seeds = " ".join(f"{value:+.1f}" for value in own[0].seeds.values())
            cells = (cell for one in own for cell in (f"{one.mean:.1f}", *_against_winner(one)))
            rows.append([f"{budget:g}", level, *cells, seeds])
    heads = [part for family in families for part in (family, f"{family} - winner", "")]
    return markdown_table(["budget", "level", *heads, "seeds"], rows)


def _against_winner(one: Entry) -> tuple[str, str]:
    """The difference, and the word with its adjusted p; of references the verdict itself."""
    if one.made is None:
        return "", "winner"
    result, verdict = one.made.result, one.made.verdict
    difference = f"{result.estimate:+.1f} {result.interval.spelled()}"
    word = str(verdict if one.table == REFERENCES else one.word)
    p = result.holm_within_p if verdict == "equivalent" else result.holm_p
    if verdict == "identical":
        return difference, word if word == verdict else f"{word}, identical"
    if p is None:
        return difference, word
    return difference, f"{word}, {'p < 0.001' if p < 0.001 else f'p = {p:.3f}'}"


def _marginals(study: StudyConfig, plan: Plan, entries: Sequence[Entry]) -> list[str]:
    """Of a grid, the mean of each level over the combinations that it is part of; no test."""
    if study.plan != "grid":
        return []
    own = [one for one in entries if one.table == GRID and one.family == ALL]
    places = list(dict.fromkeys((one.regime, one.budget) for one in own))
    rows = []
    for factor in study.cross:
        for level in study.factors[factor]:
            names = {name for name, line in plan.lines.items() if line.levels.get(factor) == level}
            cells = [factor, level]
            for place in places:
                means = [one.mean for one in own if one.line in names and (one.regime, one.budget) == place]
                cells.append(f"{fmean(means):.1f}" if means else "")
            rows.append(cells)
    lines = ["", "## Levels on average", "", "Over the combinations that were measured; not tested.", ""]
    heads = ["factor", "level", *(f"{regime} {budget:g}" for regime, budget in places)]
    return lines + markdown_table(heads, rows)


def _full(scores: Scores) -> list[str]:
    """Scores of the full cache, the ceiling."""
    families = families_of(scores)
    cells = [Cell(regime, FULL, 1.0) for regime in scores.regimes if Cell(regime, FULL, 1.0) in scores.exact]
    found = [
        f"- {cell.regime}: " + ", ".join(f"{f} {scores.mean(cell, scores.tasks(f)):.1f}" for f in families)
        for cell in cells
    ]
    return ["", "## The full cache", "", *found] if found else []
