"""Tables of a report that come from a run's rows and aligned scores."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from retain.eval.config import FULL
from retain.eval.report.blocks import (
    PAGE,
    REPORT,
    Figure,
    Row,
    Table,
    heat,
    number,
    of_budget,
    p_value,
    scale,
    words,
)
from retain.eval.report.run import MANY, Run
from retain.eval.run.results_store import asked_as
from retain.eval.stats.comparisons import Judged, budget_name, discriminations, word_of
from retain.eval.stats.significance import standard_error
from retain.eval.stats.summary import ALL, FAMILIES, Cell, Comparison, Scores

# Rows that the report shows of nulls and of cells that tell nothing.
LISTED = 40
# Longest answer that is shown, in characters, and most tasks whose answers are.
SHOWN_CHARACTERS, SHOWN_TASKS = 240, 12


def families_of(scores: Scores) -> list[str]:
    """Families of tasks that were measured."""
    return [family for family in FAMILIES if scores.tasks(family)]


def half_of(scores: Scores, cell: Cell, tasks: Sequence[str]) -> float:
    """Half of a 95 % band; nan of a single item, of which nothing is known."""
    half = 1.96 * standard_error(scores.strata(cell, tasks))
    return half if math.isfinite(half) else math.nan


def glance_table(scores: Scores) -> Table:
    """Means over tasks of every cell, the full cache's own beside them; of many policies the best first."""

    def overall(policy: str) -> float:
        return fmean(scores.mean(cell, scores.tasks(ALL)) for cell in scores.exact if cell.policy == policy)

    places = [(regime, budget) for regime in scores.regimes for budget in scores.budgets]
    names = scores.policies
    if len(names) > MANY:
        names = sorted(names, key=lambda name: -overall(name))
    rows = []
    for policy in names:
        row = [words(policy)]
        for regime, budget in places:
            cell = Cell(regime, policy, 1.0 if policy == FULL else budget)
            means = [
                scores.mean(cell, scores.tasks(own)) for own in families_of(scores) if cell in scores.exact
            ]
            text = " / ".join(f"{mean:.1f}" for mean in means)
            row.append(words(text, means[0] if means else None))
        rows.append(tuple(row))
    columns = ("policy", *(f"{regime} {budget:g}" for regime, budget in places))
    return Table("tab-glance", "Means over tasks of every cell", columns, tuple(rows))


def regime_table(scores: Scores, regime: str) -> Table:
    """Every cell of a regime by task, with the families' means and their bands."""
    columns = ["budget", "policy"]
    for family in families_of(scores):
        columns += [*scores.tasks(family), f"**{family}**"]
    order = {name: place for place, name in enumerate(scores.policies)}
    cells = [cell for cell in scores.exact if cell.regime == regime]
    rows = []
    for cell in sorted(cells, key=lambda cell: (-cell.budget, order[cell.policy])):
        row = [of_budget(cell.budget), words(cell.policy)]
        for family in families_of(scores):
            tasks = scores.tasks(family)
            row += [number(scores.mean(cell, [task])) for task in tasks]
            mean, half = scores.mean(cell, tasks), half_of(scores, cell, tasks)
            around = "" if math.isnan(half) else f" ±{half:.1f}"
            row.append(words(f"**{mean:.1f}**{around}", mean, "marked"))
        rows.append((*row, number(fmean(scores.partial[cell][task].mean() for task in scores.families))))
    ident = f"tab-scores-{scores.regimes.index(regime)}"
    return Table(ident, f"Scores in %, {regime}", (*columns, "partial"), tuple(rows), 2)


def spelled(made: Comparison, *, named: bool) -> tuple[str, str]:
    """A difference with its interval, and its verdict."""
    interval = made.interval
    minus = f"minus {made.baseline}: " if named else ""
    return f"{minus}{interval.estimate:+.1f} {interval.spelled()}", word_of(made.result)


def pivot_table(
    ident: str, caption: str, made: Sequence[Comparison], names: Sequence[str], on: str = "both"
) -> Table:
    """Comparisons as rows, the families side by side; a cell names its baseline where no column does."""
    families = [family for family in FAMILIES if any(one.family == family for one in made)]
    named = "minus" not in names
    rows: dict[Row, dict[str, Row]] = {}
    for one in made:
        text, word = spelled(one, named=named)
        own = words(text, one.interval.estimate), words(word, mark=f"v-{one.result.verdict}")
        place: Row = (words(one.regime), of_budget(one.budget), words(one.policy))
        place += () if named else (words(one.baseline),)
        rows.setdefault(place, {})[one.family] = own
    columns = (*names, *(text for family in families for text in (f"{family}, points", "verdict")))
    none = (words(), words())
    body = [
        (*row, *(cell for family in families for cell in own.get(family, none))) for row, own in rows.items()
    ]
    return Table(ident, caption, columns, tuple(body), len(names), on=on)


def comparison_table(judged: Sequence[Judged]) -> Table:
    """Every comparison with the best heuristic, with its raw and adjusted p."""
    columns = (
        *("regime", "budget", "tasks", "policy", "minus", "verdict", "difference", "low", "high"),
        *("p", "Holm p", "margin p", "Holm margin p", "Wilcoxon p"),
        *("items", "differ", "could show", "family"),
    )
    rows = []
    for one in judged:
        r, interval = one.result, one.result.interval
        ends = (None, None) if interval.undefined else (interval.low, interval.high)
        # A p against the best of several means nothing for those that it was chosen among.
        p: tuple[float | None, ...] = (None,) * 5
        if r.family_size is not None:
            p = (r.p, r.holm_p, r.within_p, r.holm_within_p, r.signed_rank.p)
        rows.append(
            (
                *(words(one.place.regime), of_budget(one.place.budget), words(one.place.family)),
                *(words(one.policy), words(one.baseline), words(word_of(r), mark=f"v-{r.verdict}")),
                *(number(own, sign=True) for own in (r.estimate, *ends)),
                *map(p_value, p),
                *(number(r.num_clusters, 0), number(interval.num_nonzero, 0), number(one.detectable)),
                number(r.family_size, 0),
            )
        )
    caption = "Every policy minus the best heuristic, in points"
    return Table("tab-comparisons", caption, columns, tuple(rows), 6, on=PAGE)


def seed_table(scores: Scores) -> Table:
    """Means over tasks, for each seed apart."""
    seeds = sorted({int(seed) for own in scores.seeds.values() for seed in own})
    families = families_of(scores)
    rows = []
    for cell in scores.exact:
        means = [scores.seed_means(cell, scores.tasks(family)) for family in families]
        numbers = (number(own.get(seed)) for own in means for seed in seeds)
        rows.append((words(cell.regime), of_budget(cell.budget), words(cell.policy), *numbers))
    of_seeds = (f"{family}, seed {seed}" for family in families for seed in seeds)
    columns = ("regime", "budget", "policy", *of_seeds)
    return Table("tab-seeds", "Means over tasks by seed", columns, tuple(rows), 3)


def memory_table(run: Run) -> Table:
    """Memory of each cell, as the cache counted it."""
    scores = run.scores
    lines = []
    for cell, own in scores.memory.items():
        rows = run.cells[cell]
        attended = [ratio for task in scores.families for ratio in scores.attended.get((cell, task), ())]
        peaks = [row["peak_entries"] for row in rows if "peak_entries" in row]
        needles = [row["needles_kept"] for row in rows if row.get("needles_kept") is not None]
        lines.append(
            (
                *(words(cell.regime), of_budget(cell.budget), words(cell.policy)),
                *(number(own.kept_entries), number(own.bytes_held / 1024)),
                number(100 * own.bytes_held / own.bytes_full, 2),
                words(f"{own.lowest_ratio:.4f} to {own.highest_ratio:.4f}", own.lowest_ratio),
                number(fmean(attended) if attended else None, 4),
                number(fmean(peaks) if peaks else None),
                number(own.gate_bytes / 1024),
                number(fmean(needles) if needles else None, 3),
            )
        )
    columns = (
        *("regime", "budget", "policy", "entries", "KiB held", "% of full"),
        *("kept / seen", "attended", "entries at peak", "KiB of gates", "needles kept"),
    )
    caption = "Memory held, mean over items"
    return Table("tab-memory", caption, columns, tuple(lines), 3, page_columns=3)


def task_table(run: Run) -> Table:
    """Questions, source and licence of each task."""
    parts = ("provenance", "source", "licence", "version", "metric")
    recorded = run.manifest.get("tasks") or {}
    lines = []
    for name, family in run.scores.families.items():
        task, known = run.tasks.get(name), recorded.get(name, {})
        facts = (without_scheme(str(known.get(part, getattr(task, part, "")))) for part in parts)
        items, about = str(len(run.scores.seeds[name])), task.about if task else ""
        lines.append((words(name), words(family), words(items, int(items)), words(about), *map(words, facts)))
    columns = ("task", "family", "items", "what is asked", *parts)
    return Table(
        "tab-tasks", "Tasks: what they ask, and whose they are", columns, tuple(lines), 4, page_columns=5
    )


def ceiling_tables(scores: Scores) -> tuple[int, tuple[Table, ...]]:
    """The number of places that do not tell policies apart, the table of those, and of all."""
    unclear, every = [], []
    for place, own in discriminations(scores):
        where = (words(place.regime), of_budget(place.budget), words(place.family))
        if not own.yes:
            unclear.append((*where, number(own.ceiling), words(own.why)))
        flag = words("yes" if own.yes else "no", mark="" if own.yes else "v-worse")
        noise = own.noise if math.isfinite(own.noise) else None
        numbers = map(number, (own.ceiling, own.spread, noise))
        every.append((*where, flag, *map(words, (own.why, own.best, own.worst)), *numbers))
    columns = ("regime", "budget", "task", "full", "why")
    more = ("discriminative", "why", "best", "worst", "full cache", "spread", "noise")
    caption = "Ceilings, in points, and what tells policies apart"
    tables = (
        Table("tab-unclear", "", columns, tuple(unclear), 5, most=LISTED, on=REPORT),
        Table("tab-ceilings", caption, (*columns[:3], *more), tuple(every), 7, on=PAGE),
    )
    return len(unclear), tuple(table for table in tables if table.rows)


def null_table(run: Run) -> Table:
    """Answers that were none, and how many were asked for."""
    lines = [
        (
            *(words(cell.regime), words(cell.policy), of_budget(cell.budget), words(task)),
            words(", ".join("/".join(map(str, one)) for one in own)),
            *(number(len(own), 0), number(sum(row["task"] == task for row in run.cells[cell]), 0)),
        )
        for (cell, task), own in run.scores.nulls.items()
    ]
    columns = ("regime", "policy", "budget", "task", "which", "nulls", "of")
    caption = "Nothing was answered: counted as 0"
    return Table("tab-nulls", caption, columns, tuple(lines), 5, page_columns=2, most=LISTED)


def answer_table(run: Run) -> Table:
    """Answers of policies, at one budget, to the first question of each task on which scores differ."""
    rows, budgets = run.rows, run.scores.budgets
    middle = budgets[len(budgets) // 2] if budgets else 1.0
    regime = rows[0]["regime"]
    here = [row for row in rows if row["regime"] == regime and row["budget"] in (1.0, middle)]
    found: dict[tuple[Any, ...], set[float]] = defaultdict(set)
    for row in here:
        found[asked_as(row)].add(row["score"])
    first: dict[str, tuple[bool, tuple[Any, ...]]] = {}
    for question, own in found.items():
        rank = (len(own) == 1, question)
        first[question[1]] = min(first.get(question[1], rank), rank)
    shown = {question for _, question in list(first.values())[:SHOWN_TASKS]}
    lines = []
    for row in here:
        if asked_as(row) in shown:
            wanted = run.asked.get(asked_as(row), {})
            right = " | ".join(wanted.get("references") or ()) or _tokens(wanted.get("gold_ids", ()))
            answer = "(nothing)" if row.get("null") else row.get("text") or _tokens(row.get("tokens", ()))
            texts = (words(_cut(right), mark="said"), words(_cut(answer), mark="said"))
            lines.append(
                (words(row["task"]), words(row["policy"]), *texts, number(100 * float(row["score"])))
            )
    columns = ("task", "policy", "right answer", "answer", "score")
    ids = "" if any(row.get("text") for row in here) else ", as token ids"
    caption = f"Of each task the first question on which scores differ, {regime}, {budget_name(middle)}{ids}"
    return Table("tab-answers", caption, columns, tuple(lines), 4, on=PAGE)


def heat_maps(rows: Sequence[Mapping[str, Any]], budgets: Sequence[float], command: str) -> Figure | None:
    """Depth by length, one map a policy, of tasks that say both; None where no task does."""
    cells: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        about = row.get("about") or {}
        if "depth" in about and "length" in about:
            key = (row["task"], row["regime"], float(row["budget"]), row["policy"])
            cells[*key, about["depth"], about["length"]].append(float(row["score"]))
    if not cells:
        return None
    depths, lengths = (sorted({key[place] for key in cells}) for place in (4, 5))
    tables: list[Table] = []
    group_of: list[str] = []
    for task, regime in dict.fromkeys(key[:2] for key in cells):
        for budget in budgets:
            for policy in dict.fromkeys(key[3] for key in cells):
                place = (task, regime, 1.0 if policy == FULL else budget, policy)
                found = [[cells.get((*place, depth, length)) for length in lengths] for depth in depths]
                if any(any(row) for row in found):
                    means = [[fmean(own) if own else None for own in row] for row in found]
                    names, heads = map(_plain, depths), ("depth", *map(_plain, lengths))
                    tables.append(heat_table(f"heat-{len(tables)}", policy, heads, names, means))
                    group_of.append(f"{task}, {regime}, {budget_name(budget)}")
    counts = {len(values) for values in cells.values()}
    middle = budget_name(budgets[len(budgets) // 2]) if budgets else ""
    return Figure(
        ident="fig-needles",
        title="Needle in a haystack: depth by length",
        note="Mean score, 0 to 1. Rows: how deep the needle lies (0: at the start); columns: length of the "
        f"context. {min(counts)}{f' to {max(counts)}' if len(counts) > 1 else ''} answers a square.",
        command=command,
        tables=tuple(tables),
        scale=scale(),
        group_of=tuple(group_of),
        chosen=next((group for group in group_of if group.endswith(middle)), *group_of[:1]),
    )


def heat_table(
    ident: str,
    caption: str,
    columns: Sequence[str],
    names: Iterable[str],
    values: Sequence[Sequence[float | None]],
    top: float = 1.0,
) -> Table:
    """A heat map: named rows of numbers, coloured between 0 and `top`."""
    lines = tuple(
        (words(name), *(heat(value, top) for value in row), *(words(),) * (len(columns) - 1 - len(row)))
        for name, row in zip(names, values, strict=True)
    )
    return Table(ident, caption, tuple(columns), lines, sortable=False)


def without_scheme(text: str) -> str:
    """An address as words: the page links to nothing."""
    return text.replace("https://", "").replace("http://", "")


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and math.isfinite(value) else str(value)


def _tokens(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
