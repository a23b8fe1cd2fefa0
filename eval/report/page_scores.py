"""The parts of a page of results that come from its rows: scores, differences, heat maps, memory, tasks.

In: rows and aligned scores. Out: tables and figures (`retain.eval.report.tabular`). The one decision taken
here: a policy has one look on the whole page, given by its place in the run, so that a line can be followed
from figure to figure.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from retain.eval.config import FULL
from retain.eval.report.figures import (
    NUM_COLOURS,
    Difference,
    Panel,
    Series,
    draw_forest,
    draw_lines,
    draw_ranks,
    forest_reach,
    swatch,
)
from retain.eval.report.tabular import Entry, Figure, Shown, Table, heat, number, p_value, scale, words
from retain.eval.stats.comparisons import Judged, budget_name, is_bound, word_of
from retain.eval.stats.paired_result import PairedResult
from retain.eval.stats.significance import Interval, standard_error
from retain.eval.stats.summary import FAMILIES, Cell, Scores
from retain.eval.tasks.suite import Task

# More policies than this are drawn as a ranking.
MANY = 12
# Longest answer that is shown, in characters, and most tasks whose answers are.
SHOWN_CHARACTERS, SHOWN_TASKS = 240, 12


def styles_of(names: Iterable[str]) -> dict[str, int]:
    """The look of each policy: controls grey and dashed, methods everything else; the full cache is a rule
    of its own."""
    own = list(dict.fromkeys(name for name in names if name != FULL))
    methods = [name for name in own if not is_bound(name)]
    controls = [name for name in own if is_bound(name)]
    colours = NUM_COLOURS - 1  # the last is grey
    looks = {name: place // colours * NUM_COLOURS + place % colours for place, name in enumerate(methods)}
    return looks | {name: NUM_COLOURS * (place + 2) - 1 for place, name in enumerate(controls)}


def legend(names: Iterable[str], styles: Mapping[str, int]) -> tuple[Entry, ...]:
    """Entries of those policies that are drawn."""
    return tuple(Entry(name, styles[name], swatch(styles[name])) for name in names if name in styles)


def score_figure(scores: Scores, styles: Mapping[str, int], command: str) -> Figure:
    """Score against budget with bands, or, of many policies, a ranking at the middle budget."""
    names = [name for name in scores.policies if name != FULL]
    many = len(names) > MANY
    panels: list[str] = []
    for regime in scores.regimes:
        for family in FAMILIES:
            tasks = scores.tasks(family)
            if not tasks:
                continue
            for kind, budgets in _kinds(scores.budgets):
                ident = f"fig-scores-{len(panels)}"
                title = f"{regime}, {family} ({len(tasks)} task{'s' * (len(tasks) > 1)})"
                if many:
                    panels.append(_ranks(scores, ident, title, regime, tasks, budgets, styles))
                else:
                    panels.append(_curves(scores, ident, title, regime, tasks, budgets, kind, styles))
    note = (
        "Mean score over tasks, each counting alike. "
        + (
            "Dot: the middle budget, with ±1.96 standard errors; thin line: all budgets. "
            if many
            else "Bands: ±1.96 standard errors, how firm one line is. "
        )
        + "Whether two policies differ is a paired question: see the differences. Dashed: the full cache."
    )
    return Figure(
        ident="fig-scores",
        title="Score against budget",
        note=note,
        command=command,
        panels=tuple(panels),
        legend=() if many else legend(names, styles),
        data=tuple(score_tables(scores)),
    )


def score_tables(scores: Scores) -> list[Table]:
    """Scores of every cell by task, one table a regime."""
    made: list[Table] = []
    for regime in scores.regimes:
        families = [family for family in FAMILIES if scores.tasks(family)]
        columns = ["policy", "budget"]
        for family in families:
            columns += [*scores.tasks(family), f"{family} mean", "± 1.96 s.e."]
        rows = []
        for cell in sorted((c for c in scores.exact if c.regime == regime), key=lambda c: -c.budget):
            row = [words(cell.policy), number(cell.budget, 3) if cell.budget < 1 else _budget(cell.budget)]
            for family in families:
                tasks = scores.tasks(family)
                row += [number(scores.mean(cell, [task])) for task in tasks]
                row += [number(scores.mean(cell, tasks))]
                row += [number(_finite(1.96 * standard_error(scores.strata(cell, tasks))))]
            rows.append(tuple(row))
        ident = f"tab-scores-{len(made)}"
        made.append(Table(ident, f"Scores in %, {regime}", tuple(columns), tuple(rows)))
    return made


def forest_figure(judged: Sequence[Judged], margin: float, command: str) -> Figure:
    """Differences from the best heuristic, a panel a place, all on one axis."""
    by_place: dict[Any, list[Difference]] = {}
    names: dict[Any, str] = {}
    for one in judged:
        i = one.result.interval
        if one.policy == FULL or i.undefined:
            continue
        by_place.setdefault(one.place, []).append(
            Difference(one.policy, i.estimate, i.low, i.high, one.result.verdict)
        )
        names[one.place] = one.baseline
    drawn = [own for lines in by_place.values() for own in lines]
    reach = forest_reach(drawn, margin) if drawn else None
    panels = tuple(
        draw_forest(
            f"fig-forest-{number_}",
            f"{place.regime}, {budget_name(place.budget)}, {place.family}",
            sorted(lines, key=lambda own: -own.estimate),
            f"minus {names[place]}, points",
            margin,
            reach,
        )
        for number_, (place, lines) in enumerate(by_place.items())
    )
    return Figure(
        ident="fig-forest",
        title="Difference from the best heuristic",
        note=f"Policy minus the best heuristic, paired by item, with 95 % intervals. The band is ±{margin:g} "
        "points, the difference that was said beforehand not to matter; the full cache, and what has no "
        "interval, is in the table. Up: better; down: worse; square: equivalent or identical; hollow circle: "
        "not known; full circle: a heuristic or variant, not judged.",
        command=command,
        panels=panels,
    )


def comparison_table(judged: Sequence[Judged]) -> Table:
    """Every comparison with its raw and adjusted p."""
    columns = (
        *("regime", "budget", "tasks", "policy", "minus", "verdict", "difference", "low", "high"),
        *("p", "Holm p", "margin p", "Holm margin p", "Wilcoxon p"),
        *("items", "differ", "could show", "family"),
    )
    rows = tuple(
        (
            *(words(one.place.regime), _budget(one.place.budget), words(one.place.family)),
            *(words(one.policy), words(one.baseline), words(word_of(r), mark=f"v-{r.verdict}")),
            *(number(r.estimate, sign=True), *_ends(r.interval)),
            *(p_value(p) for p in _p_values(r)),
            *(number(r.num_clusters, 0), number(r.interval.num_nonzero, 0), number(one.detectable)),
            number(r.family_size, 0),
        )
        for one in judged
        for r in (one.result,)
    )
    return Table(
        "tab-comparisons", "Every policy minus the best heuristic, in points", columns, rows, num_text=6
    )


def _ends(interval: Interval) -> tuple[Shown, Shown]:
    """Both ends, empty where there is no interval."""
    ends = (None, None) if interval.undefined else (interval.low, interval.high)
    return number(ends[0], sign=True), number(ends[1], sign=True)


def _p_values(r: PairedResult) -> tuple[float | None, ...]:
    """Of a comparison that is judged; a p against the best of several means nothing for the others."""
    if r.family_size is None:
        return (None,) * 5
    return r.p, r.holm_p, r.within_p, r.holm_within_p, r.signed_rank.p


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
    policies = list(dict.fromkeys(key[3] for key in cells))
    depths = sorted({key[4] for key in cells})
    lengths = sorted({key[5] for key in cells})
    tables: list[Table] = []
    group_of: list[str] = []
    for task, regime in dict.fromkeys(key[:2] for key in cells):
        for budget in budgets:
            group = f"{task}, {regime}, {budget_name(budget)}"
            for policy in policies:
                own = 1.0 if policy == FULL else budget
                found = {
                    (depth, length): cells.get((task, regime, own, policy, depth, length))
                    for depth in depths
                    for length in lengths
                }
                if not any(found.values()):
                    continue
                lines = [
                    (words(_plain(depth)), *(_mean_heat(found[depth, length]) for length in lengths))
                    for depth in depths
                ]
                columns = ("depth", *map(_plain, lengths))
                ident = f"heat-{len(tables)}"
                tables.append(Table(ident, policy, columns, tuple(lines), sortable=False))
                group_of.append(group)
    groups = tuple(dict.fromkeys(group_of))
    counts = {len(values) for values in cells.values()}
    return Figure(
        ident="fig-needles",
        title="Needle in a haystack: depth by length",
        note="Mean score, 0 to 1. Rows: how deep the needle lies (0: at the start); columns: length of the "
        f"context. {min(counts)}{f' to {max(counts)}' if len(counts) > 1 else ''} answers a square.",
        command=command,
        tables=tuple(tables),
        scale=scale(1.0, 2),
        groups=groups,
        group_of=tuple(group_of),
        chosen=_middle(groups, budgets),
    )


def memory_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What each cell held, as the cache counted it."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["regime"], float(row["budget"]), row["policy"]].append(row)
    lines = []
    for (regime, budget, policy), own in found.items():
        kept = [row["kept_entries"] / row["seen_entries"] for row in own]
        peaks = [row["peak_entries"] for row in own if "peak_entries" in row]
        needles = [row["needles_kept"] for row in own if row.get("needles_kept") is not None]
        lines.append(
            (
                *(words(regime), _budget(budget), words(policy)),
                number(fmean(row["kept_entries"] for row in own)),
                number(fmean(peaks) if peaks else None),
                number(fmean(row["bytes_held"] for row in own) / 1024),
                number(100 * fmean(row["bytes_held"] / row["bytes_full"] for row in own), 2),
                *(number(min(kept), 4), number(max(kept), 4)),
                number(max(row.get("gate_bytes", 0) for row in own) / 1024),
                number(fmean(needles) if needles else None, 3),
            )
        )
    columns = (
        *("regime", "budget", "policy", "entries held", "entries at peak", "KiB held", "% of full"),
        *("lowest kept / seen", "highest kept / seen", "KiB of gates", "needles kept"),
    )
    return Table("tab-memory", "Memory held, mean over items", columns, tuple(lines), num_text=3)


def task_table(scores: Scores, tasks: Mapping[str, Task], manifest: Mapping[str, Any]) -> Table:
    """Where every task comes from."""
    recorded = manifest.get("tasks") or {}
    lines = []
    for name, family in scores.families.items():
        task, known = tasks.get(name), recorded.get(name, {})
        facts = {
            part: known.get(part, getattr(task, part, ""))
            for part in ("provenance", "source", "licence", "version", "metric")
        }
        lines.append(
            (
                words(name),
                words(task.about if task else ""),
                words(family),
                words(facts["provenance"]),
                words(without_scheme(str(facts["source"]))),
                words(facts["licence"]),
                words(facts["version"]),
                words(facts["metric"]),
                number(scores.num_items([name]), 0),
            )
        )
    columns = ("task", "asks", "family", "provenance", "source", "licence", "version", "metric", "items")
    return Table("tab-tasks", "Tasks: what they ask, and whose they are", columns, tuple(lines), num_text=8)


def null_table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Answers that were none, counted as 0: how many in each cell, and the first of them."""
    found: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    asked: dict[tuple[Any, ...], int] = defaultdict(int)
    for row in rows:
        key = (row["regime"], float(row["budget"]), row["policy"], row["task"])
        asked[key] += 1
        if row.get("null"):
            found[key].append(f"{row['seed']}/{row['item']}/{row.get('question', 0)}")
    if not found:
        return None
    lines = [
        (
            *(words(key[0]), _budget(key[1]), words(key[2]), words(key[3])),
            words(", ".join(own[:6]) + (f" and {len(own) - 6} more" if len(own) > 6 else "")),
            *(number(len(own), 0), number(asked[key], 0)),
        )
        for key, own in found.items()
    ]
    columns = ("regime", "budget", "policy", "task", "seed/item/question", "nulls", "of")
    return Table("tab-nulls", "Nothing was answered: counted as 0", columns, tuple(lines), num_text=5)


def answer_table(
    rows: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]], budgets: Sequence[float]
) -> Table | None:
    """What every policy answered, at one budget, to the first question of each task on which scores
    differ."""
    if not rows:
        return None
    middle = budgets[len(budgets) // 2] if budgets else 1.0
    regime = rows[0]["regime"]
    asked = {_question(one): one for one in references}
    here = [row for row in rows if row["regime"] == regime and row["budget"] in (1.0, middle)]
    found: dict[tuple[Any, ...], set[float]] = defaultdict(set)
    for row in here:
        found[_question(row)].add(row["score"])
    first: dict[str, tuple[bool, tuple[Any, ...]]] = {}
    for question, own in found.items():
        rank = (len(own) == 1, question)
        first[question[1]] = min(first.get(question[1], rank), rank)
    shown = {question for _, question in list(first.values())[:SHOWN_TASKS]}
    lines = []
    for row in here:
        if _question(row) not in shown:
            continue
        wanted = asked.get(_question(row), {})
        right = " | ".join(wanted.get("references") or ()) or _tokens(wanted.get("gold_ids", ()))
        answer = row.get("text") or _tokens(row.get("tokens", ()))
        lines.append(
            (
                *(words(row["task"]), words(row["policy"]), words(_cut(right), mark="said")),
                words(_cut(answer) if not row.get("null") else "(nothing)", mark="said"),
                number(100 * float(row["score"])),
            )
        )
    columns = ("task", "policy", "right answer", "answer", "score")
    ids = "" if any(row.get("text") for row in here) else ", as token ids"
    caption = f"Of each task the first question on which scores differ, {regime}, {budget_name(middle)}{ids}"
    return Table("tab-answers", caption, columns, tuple(lines), num_text=4)


def without_scheme(text: str) -> str:
    """An address as words: the page links to nothing."""
    return text.replace("https://", "").replace("http://", "")


def _kinds(budgets: Sequence[float]) -> list[tuple[str, list[float]]]:
    """Shares and numbers of tokens do not share an axis."""
    kinds = {
        "keep_ratio (kept / seen)": [budget for budget in budgets if budget < 1],
        "tokens per head": [budget for budget in budgets if budget > 1],
    }
    return [(name, own) for name, own in kinds.items() if own]


def _curves(
    scores: Scores,
    ident: str,
    title: str,
    regime: str,
    tasks: Sequence[str],
    budgets: Sequence[float],
    kind: str,
    styles: Mapping[str, int],
) -> str:
    series = []
    for name, style in styles.items():
        cells = [cell for b in budgets if (cell := Cell(regime, name, b)) in scores.exact]
        if not cells:
            continue
        means = [scores.mean(cell, tasks) for cell in cells]
        halves = [1.96 * standard_error(scores.strata(cell, tasks)) for cell in cells]
        pairs = list(zip(means, halves, strict=True))
        series.append(
            Series(
                *(name, style, tuple(cell.budget for cell in cells), tuple(means)),
                low=tuple(max(0.0, mean - half) for mean, half in pairs),
                high=tuple(min(100.0, mean + half) for mean, half in pairs),
            )
        )
    full = Cell(regime, FULL, 1.0)
    rules = ((scores.mean(full, tasks), "full cache"),) if full in scores.exact else ()
    ticks = tuple((budget, f"{budget:g}") for budget in budgets)
    panel = Panel(ident, title, kind, "score, %", tuple(series), ticks, (0.0, 100.0), log_x=True, rules=rules)
    return draw_lines(panel)


def _ranks(
    scores: Scores,
    ident: str,
    title: str,
    regime: str,
    tasks: Sequence[str],
    budgets: Sequence[float],
    styles: Mapping[str, int],
) -> str:
    middle = budgets[len(budgets) // 2]
    lines = []
    for name in styles:
        cell = Cell(regime, name, middle)
        if cell in scores.exact:
            at = [Cell(regime, name, budget) for budget in budgets]
            means = [scores.mean(own, tasks) for own in at if own in scores.exact]
            half = _finite(1.96 * standard_error(scores.strata(cell, tasks))) or 0.0
            style = 1 if name in scores.learned else NUM_COLOURS - 1 if is_bound(name) else 0
            lines.append((name, style, scores.mean(cell, tasks), half, min(means), max(means)))
    full = Cell(regime, FULL, 1.0)
    ceiling = scores.mean(full, tasks) if full in scores.exact else None
    lines.sort(key=lambda line: -line[2])
    return draw_ranks(ident, f"{title}, {budget_name(middle)}", lines, ceiling)


def _finite(value: float) -> float | None:
    """None for the error of a single item, of which nothing is known."""
    return value if math.isfinite(value) else None


def _budget(budget: float) -> Shown:
    return Shown("full" if budget == 1 else f"{budget:g}", budget)


def _mean_heat(values: Sequence[float] | None) -> Shown:
    return heat(fmean(values) if values else None)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and math.isfinite(value) else str(value)


def _middle(groups: Sequence[str], budgets: Sequence[float]) -> str:
    """The first group at the middle budget."""
    middle = budget_name(budgets[len(budgets) // 2]) if budgets else ""
    return next((group for group in groups if group.endswith(middle)), groups[0] if groups else "")


def _question(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["seed"], row["task"], row["item"], row.get("question", 0)


def _tokens(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
