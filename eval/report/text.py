"""Writes the text of a report, in Markdown: the answer in words, tables, and what they rest on."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas
from pandas import DataFrame, Series

from retain.eval.config import CONTROLS, FULL
from retain.eval.report.page import plain
from retain.eval.report.table import Table, budget_words, line_words, where_words
from retain.eval.stats.paired import ALPHA
from retain.eval.stats.scores import KEY, SETTING, WHERE, Compared

PICTURE = "![Score against the share of the cache held](scores.png)"
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?( ± \d+\.\d+| of \d+\.\d+)?$")
# The full cache scores less than so many points: nothing can be lost there.
LOW = 10.0
HELD = ["entries_held", "entries_seen", "bytes_held", "bytes_seen"]
METHOD = (
    "A score is the mean over tasks of the mean over items, in points of 100; ± is 1.96 of its standard "
    "errors. Rows with one context are one item. Whether two policies differ is a paired question: a "
    "difference is taken item by item, its interval is Student's t over items within tasks, widened where "
    "differences are skewed."
)
VERDICTS = (
    "Better or worse: the 95 % interval excludes 0 and the sign-flip test passes at {alpha:g}. Equivalent: "
    "the interval lies within ±{margin:g} points, a margin set before the run, and so does the difference on "
    "items that were not seen, by a bound that counts rare losses. Inconclusive: neither was shown, which is "
    "not the same as equal. Tests are adjusted (Holm) for all comparisons of one time of eviction."
)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table whose columns line up in a terminal too; cells are text, numbers stand at the
    right."""
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    made = []
    for column in zip(*cells, strict=True):
        width, numbers = max(2, *map(len, column)), all(_NUMBER.match(cell) for cell in column[1:] if cell)
        line = "-" * (width - 1) + (":" if numbers else "-")
        made.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
        made[-1].insert(1, line)
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*made, strict=True))


def answer_of(table: Table, scores: "DataFrame", compared: Sequence[Compared]) -> str:
    """The beginning of a report: for every time of eviction a few sentences, then its table of scores."""
    parts = [f"# Comparison {plain(table.config['run'])}"]
    for (when, question), group in scores.groupby(WHERE, sort=False):
        asked = [one for one in compared if (one.when, one.question) == (when, question)]
        full = group.loc[group["line"] == FULL, "score"]
        sentences = [_sentence(at, asked, table.config, full) for _, at in _budgets(group)]
        said = "".join(f" The full cache scores {score:.1f}." for score in full)
        parts += [f"**{where_words(when, question)}.**{said}", "\n".join(f"- {one}" for one in sentences)]
    for (when, question), group in scores.groupby(WHERE, sort=False):
        parts += [f"Scores in points of 100. {where_words(when, question)}:", _score_table(group)]
    return "\n\n".join(part for part in parts if part)


def _budgets(group: "DataFrame") -> list[tuple[str, "DataFrame"]]:
    """Budgets of a (when, question) but for the full cache's, smallest first, each with its lines."""
    evicted = group[group["line"] != FULL]
    found = [(str(budget), at) for budget, at in evicted.groupby("budget", sort=False)]
    return sorted(found, key=lambda pair: pair[1]["keep_ratio"].mean())


def _sentence(
    at: "DataFrame", asked: Sequence[Compared], config: Mapping[str, Any], full: "Series[float]"
) -> str:
    """Says which policy is ahead at a budget; `full` holds the full cache's score, if it was measured."""
    budget, score = str(at["budget"].iloc[0]), dict(zip(at["line"], at["score"], strict=True))
    names = sorted((line for line in score if line not in CONTROLS), key=lambda line: -score[line])
    lead, here = f"With {budget_words(budget)}", [one for one in asked if one.budget == budget]
    if not names:
        return f"{lead} nothing but {', '.join(map(plain, score))} was measured."
    highest = f"{_bold(names[0])} scores highest, {score[names[0]]:.1f}"
    if not here:
        alike = len({score[name] for name in names}) == 1
        who = _bold(names[0]) if len(names) == 1 else "every policy"
        return f"{lead} {who} scores {score[names[0]]:.1f}." if alike else f"{lead} {highest}."
    first = max(here, key=lambda one: score[one.line])
    what = "" if config.get("baseline") else ", the best policy without training"
    base_score = full.iloc[0] if first.baseline == FULL else score[first.baseline]
    base = f"{_bold(first.baseline)} ({base_score:.1f}){what}"
    ours = f"{_bold(first.line)} ({score[first.line]:.1f})"
    interval = first.result.interval
    comma = "," if interval.method == "undefined" else ""
    difference = f"{interval.estimate:+.1f} points{comma} {interval}"
    if first.result.verdict == "inconclusive" and (interval.low > 0 or interval.high < 0):
        difference += f" (p {first.result.holm_p:.2f} among {first.result.family_size} comparisons)"
    words = {
        "better": f"{ours} is better than {base}: {difference}",
        "worse": f"{ours} is worse than {base}: {difference}",
        "equivalent": f"{ours} is equivalent to {base}: {difference}",
        "inconclusive": f"{ours} is not shown to differ from {base}: {difference}",
    }
    equal = f"{ours} has on every item the score of {base}"
    said = [f"{lead} {words[first.result.verdict] if interval.num_nonzero else equal}."]
    for verdict in ("better", "worse"):
        others = [one.line for one in here if one is not first and one.result.verdict == verdict]
        said += [f"Also {verdict}: {', '.join(map(_bold, others))}."] if others else []
    if names[0] not in (first.line, first.baseline):
        said.append(f"{highest}.")
    return " ".join(said)


def _bold(line: str) -> str:
    return f"**{plain(line_words(line))}**"


def _score_table(group: "DataFrame") -> str:
    """Lines by budgets, the full cache first, then by their mean."""
    budgets = [budget for budget, _ in _budgets(group)]
    cell = {(row.line, row.budget): f"{row.score:.1f}{_half(row.error)}" for row in group.itertuples()}
    order = (
        group.groupby("line", sort=False)["score"].mean().sort_values(ascending=False, kind="stable").index
    )
    lines = [line for line in order if line != FULL]
    rows = [(plain(line), *(cell.get((line, budget), "") for budget in budgets)) for line in lines]
    full = [value for (line, _), value in cell.items() if line == FULL]
    rows = [(line_words(FULL), *(full[:1] * max(1, len(budgets)))) for _ in full[:1]] + rows
    return markdown_table(("policy", *(map(budget_words, budgets) if budgets else ("score",))), rows)


def _half(error: float) -> str:
    return f" ± {1.96 * error:.1f}" if error < float("inf") else ""


def rest_of(table: Table, scores: "DataFrame", compared: Sequence[Compared]) -> str:
    """Everything behind the picture: verdicts that were asked for, scores by task, and what they rest on."""
    parts = []
    if compared:
        margin = table.config.get("margin_points", 2.0)
        parts += ["## Comparisons", VERDICTS.format(alpha=ALPHA, margin=margin), *_verdict_tables(compared)]
    if table.frame["task"].nunique() > 1:
        parts += ["## Scores by task", *_by_task(table.frame)]
    parts += ["## What this rests on", METHOD, _facts(table, scores), "### Memory", *_memory(table.frame)]
    return "\n\n".join([*parts, "### Answers", *_answers(table.frame)])


def _verdict_tables(compared: Sequence[Compared]) -> list[str]:
    """A table a (when, question)."""
    parts = []
    for where in dict.fromkeys((one.when, one.question) for one in compared):
        rows = [
            (
                budget_words(one.budget),
                plain(line_words(one.line)),
                plain(line_words(one.baseline)),
                f"{one.result.interval.estimate:+.1f}",
                str(one.result.interval),
                one.result.verdict + ("" if one.result.interval.num_nonzero else ", equal on every item"),
            )
            for one in compared
            if (one.when, one.question) == where
        ]
        columns = ("budget", "policy", "against", "difference, points", "95 % interval", "verdict")
        parts += [f"{where_words(*where)}:", markdown_table(columns, rows)]
    return parts


def _by_task(frame: "DataFrame") -> list[str]:
    """A table a setting: what there is less of, tasks or lines, in columns."""
    parts = []
    for (when, question, budget), rows in frame[frame["line"] != FULL].groupby(SETTING, sort=False):
        full = frame[(frame["line"] == FULL) & (frame["when"] == when) & (frame["question"] == question)]
        every = pandas.concat([full, rows])
        means = 100 * every.pivot_table("score", "line", "task", aggfunc="mean", sort=False)
        means = means.rename(index=line_words)
        first, means = ("policy", means) if len(means.columns) <= len(means) else ("task", means.T)
        cells = [(plain(name), *(f"{score:.1f}" for score in row)) for name, row in means.iterrows()]
        parts.append(f"{where_words(when, question)}, {budget_words(budget)}:")
        parts.append(markdown_table((first, *map(plain, means.columns)), cells))
    return parts


def _facts(table: Table, scores: "DataFrame") -> str:
    """Lists what was measured, and with what."""
    frame, manifest, config = table.frame, table.manifest, table.config
    whole = 100 * frame[frame["line"] == FULL].groupby("task", sort=False)["score"].mean()
    low = ", ".join(whole[whole < LOW].index)
    tasks = frame.drop_duplicates(KEY).groupby("task", sort=False).size()
    gates = frame.dropna(subset=["gates"]).drop_duplicates("line")[["line", "gates"]]
    controls = ", ".join(frame.loc[frame["policy"].isin(CONTROLS), "line"].unique())
    code = manifest.get("code") or {}
    commit = f"{str(code.get('commit'))[:12]}{'' if code.get('clean') else ' with uncommitted changes'}"
    found: dict[str, object] = {
        "Items of a task": ", ".join(f"{task} {count}" for task, count in tasks.items()),
        "Independent items": f"{scores['items'].max():g} contexts",
        "Seeds": ", ".join(map(str, sorted(frame["seed"].unique()))),
        "Tokens of a context": config.get("context_tokens"),
        "Nothing to lose": low and f"the full cache scores below {LOW:g} points on {low}",
        "Controls": controls and f"{controls}: they know what is asked and answered, and are no methods",
        "Empty answers": f"{(frame['text'] == '').sum()} of {len(frame)}",
        "Model": manifest.get("model") or ", ".join(frame["model"].unique()),
        "Gates": ", ".join(f"{line}: {name}" for line, name in gates.itertuples(index=False)),
        "Code": code and commit,
        "Versions": _pairs(manifest.get("versions") or {}),
        "Machine": _pairs(manifest.get("machine") or {}),
        "Started": manifest.get("started"),
        "Finished": manifest.get("finished"),
        "Made by": manifest.get("command"),
    }
    return "\n".join(f"- {name}: {plain(value)}" for name, value in found.items() if value)


def _pairs(value: Mapping[str, object]) -> str:
    """A mapping on one line."""
    return ", ".join(f"{name} {one}" for name, one in value.items() if one not in (None, "", {}, []))


def _memory(frame: "DataFrame") -> list[str]:
    """Tables of what was held and seen, one a (when, question): policies of a budget that hold the same share
    a row."""
    apart, parts = 0.0, []
    for (when, question), group in frame.groupby(WHERE, sort=False):
        rows: dict[tuple[str, str, str], list[str]] = {}
        for budget, at in group.groupby("budget", sort=False):
            held = at.groupby(KEY)["bytes_held"]
            apart = max(apart, float((held.max() / held.min() - 1).max()))
            for line, means in at.groupby("line", sort=False)[HELD].mean().iterrows():
                entries = f"{means['entries_held']:.1f} of {means['entries_seen']:.1f}"
                mib = [means[name] / 2**20 for name in ("bytes_held", "bytes_seen")]
                decimals = 3 if mib[1] < 10 else 1
                shown = " of ".join(f"{size:.{decimals}f}" for size in mib)
                rows.setdefault((budget_words(str(budget)), entries, shown), []).append(line_words(str(line)))
        columns = ("budget", "entries held of seen", "MiB held of seen", "policies")
        cells = [(*key, plain(", ".join(lines))) for key, lines in rows.items()]
        parts += [f"{where_words(when, question)}:", markdown_table(columns, cells)]
    within = f", within {100 * apart:.1f} %" if apart else ""
    said = f"Policies of a budget held the same bytes on every item{within}. Means over answers, over all "
    return [f"{said}layers and KV heads, as the cache counts them.", *parts]


def _answers(frame: "DataFrame") -> list[str]:
    """Answers of every policy to one item a setting: the first on which their scores differ most."""
    parts = []
    for (when, question), group in frame.groupby(WHERE, sort=False):
        smallest = group.loc[group["line"] != FULL].groupby("budget")["entries_held"].mean()
        budgets = [FULL, *smallest.nsmallest(1).index]
        rows = group[group["budget"].isin(budgets) | (group["line"] == FULL)]
        spread = rows.groupby(KEY, sort=True)["score"].std().fillna(0.0)
        task, seed, item = spread.idxmax()
        chosen = rows[(rows["task"] == task) & (rows["seed"] == seed) & (rows["item"] == item)]
        cells = [
            (plain(line_words(row.line)), f"{100 * row.score:.0f}", plain(row.text[:200]))
            for row in chosen.itertuples()
        ]
        at = f", {budget_words(budgets[1])}" if len(budgets) > 1 else ""
        parts.append(f"{where_words(when, question)}{at}; {plain(task)}, seed {seed}, item {item}:")
        parts.append(markdown_table(("policy", "score", "answer"), cells))
    return parts
