"""`report.md` of a run: what was claimed, the scores, who beats whom, at what memory, and how seeds differ.

In: the scores and the manifest. Out: Markdown. The one decision taken here: every number is computed from the
rows of this run, and a run that cannot be trusted (unclean tree, rows made by different code) says so in its
first lines.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from retain.budget.statement import LayerShape, spread
from retain.eval.claims.orderings import (
    ENDS,
    PROTECTION,
    Checked,
    Ordering,
    check_orderings,
    in_words,
    load_orderings,
    topics,
)
from retain.eval.config import asks_shipped, budget_of
from retain.eval.report.picture import draw, draw_ranking
from retain.eval.run.results_store import read_rows
from retain.eval.stats.comparisons import Judged, apart, judge, word_of
from retain.eval.stats.significance import standard_error
from retain.eval.stats.summary import (
    ALL,
    FAMILIES,
    Cell,
    Claim,
    Comparison,
    Scores,
    best_heuristic,
    check_claims,
    gather,
    learned_against_each,
)
from retain.eval.tasks.suite import Task
from retain.process.provenance import write_text
from retain.protection import Protection, protected_mask

REGIMES = {
    "context_only": "the context is prefilled and evicted, the question arrives afterwards",
    "query_aware": "scores have observed context and question; after the eviction the question's last token "
    "is read again, and the answer follows",
    "chunked": "the context is read in chunks and evicted behind each, then the question is read",
    "decode": "the context is read whole and nothing of it is evicted behind it; entries go while tokens are "
    "decoded",
    "prefill+decode": "the context is prefilled and evicted, and eviction goes on while tokens are decoded",
    "chunked+decode": "the context is read in chunks and evicted behind each, and eviction goes on while "
    "tokens are decoded",
}


TEST_BED = (
    "A test bed: it ranks policies on a model of about a million parameters. Nothing about large models "
    "follows from it."
)
# Rows of the lists of nulls and of cells that do not discriminate.
LISTED = 40
# More policies than this are drawn, and shown at a glance, as a ranking.
MANY = 12


def write_report(
    folder: Path, manifest: Mapping[str, Any], tasks: Mapping[str, Task]
) -> tuple[Path, list[Claim]]:
    """Write `report.md` and `scores.png` of a finished run.

    Args:
        folder: `results/<run>`, which holds the rows.
        manifest: Of the run.
        tasks: The suite's tasks.

    Returns:
        Path of the report, and the claims with their outcomes.
    """
    scores = gather(read_rows(folder), tasks)
    config = manifest["config"]
    options = {"margin": config["margin_points"], "resamples": config["resamples"]}
    single_key = [task.name for task in tasks.values() if task.single_key]
    variants = tuple(config.get("variants", ()))
    claims = check_claims(scores, single_key, **options, leave_out=variants)
    best = judge(scores, **options)
    each = learned_against_each(scores, **options, leave_out=variants)
    checked = check_orderings(scores, **options)
    title = f"{config['run']}: score at equal memory, mean over tasks"
    many = len(scores.policies) > MANY
    if many:
        draw_ranking(scores, folder / "scores.png", title=title, variants=variants)
    else:
        draw(scores, folder / "scores.png", title=title)
    sections = [
        _head(scores, manifest),
        _claims(claims),
        "![ranking of policies](scores.png)" if many else "![score against budget](scores.png)",
        _glance(scores),
        *(_regime(scores, regime) for regime in scores.regimes),
        *([_orderings(checked, manifest)] if checked else []),
        _best(scores, best, config["margin_points"]),
        _each(each, variants),
        _seeds(scores),
        _memory(scores),
        _tasks(scores, tasks),
        _unclear(scores),
        _nulls(scores),
        _reading(config),
    ]
    path = folder / "report.md"
    write_text(path, "\n\n".join(sections) + "\n")
    return path, claims


def section(report: Path, title: str) -> str:
    """The text of one section of a written report, without its heading."""
    return report.read_text().split(f"## {title}\n\n", 1)[1].split("\n\n## ", 1)[0]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    rule = ["---" if i < text_columns else "---:" for i in range(len(columns))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, rule, *rows))


def _head(scores: Scores, manifest: Mapping[str, Any]) -> str:
    config, machine = manifest["config"], manifest["environment"]
    states = manifest["code_states"]
    commits = ", ".join(
        f"`{(state['commit'] or 'none')[:12]}`{'' if state['clean'] else ' (tree not clean)'}"
        for state in states
    )
    counts = {task: len(seeds) for task, seeds in scores.seeds.items()}
    per_task = sorted(set(counts.values()))
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    lines = [
        f"# Comparison `{config['run']}`",
        "",
        f"Seeds {', '.join(map(str, config['seeds']))} of the {config['suite']} model; "
        f"{' to '.join(map(str, per_task))} items a task over all seeds ({sum(counts.values())} in all), "
        f"contexts of {config['context_tokens']} tokens; greedy generation through the ragged cache. "
        "Scores in %: what each task is judged by.",
        *([TEST_BED] if asks_shipped(config) else []),
        "",
        f"Code {commits}; config hash `{manifest['identity_sha']}`; Python {machine['python']}, {versions}; "
        f"{machine['device']} ({machine['processor']}); finished {manifest.get('finished', 'not yet')}.",
    ]
    if len(states) > 1:
        lines += ["", "**Mixed code:** the rows were made by more than one state of the code."]
    if not all(state["clean"] for state in states):
        lines += ["", "**Scratch:** the working tree was not clean, so these numbers enter no table."]
    return "\n".join(lines)


def _claims(claims: Sequence[Claim]) -> str:
    intro = "Paired 95 % intervals, in points; verdicts are adjusted (Holm) over the comparisons of a claim."
    lines = ["## Claims checked", "", intro, ""]
    for claim in claims:
        lines.append(f"- **{claim.outcome}**: {claim.text}.")
        lines += [f"  - {number}" for number in claim.numbers]
    return "\n".join(lines)


def _glance(scores: Scores) -> str:
    """Means over tasks of every cell, the full cache's own beside them."""
    families = [family for family in FAMILIES if scores.tasks(family)]
    columns = ["policy"]
    columns += [f"{regime} {ratio:g}" for regime in scores.regimes for ratio in scores.budgets]
    names, order = scores.policies, ""
    if len(names) > MANY:
        names, order = sorted(names, key=lambda name: -_overall(scores, name)), ", best first"
    rows = []
    for policy in names:
        row = [policy]
        for regime in scores.regimes:
            for ratio in scores.budgets:
                cell = Cell(regime, policy, 1.0 if policy == "full" else ratio)
                means = [scores.mean(cell, scores.tasks(own)) for own in families if cell in scores.exact]
                row.append(" / ".join(f"{mean:.1f}" for mean in means))
        rows.append(row)
    counts = " and ".join(f"{len(scores.tasks(family))} {family}" for family in families)
    note = (
        f"Score in %, mean over tasks: {' / '.join(families)} ({counts}), by regime and "
        f"budget{order}: below 1 a keep_ratio, from 2 on tokens per head."
    )
    return "\n".join(["## At a glance", "", note, "", _table(columns, rows)])


def _overall(scores: Scores, policy: str) -> float:
    """Mean over all cells of a policy."""
    means = [scores.mean(cell, scores.tasks(ALL)) for cell in scores.exact if cell.policy == policy]
    return sum(means) / len(means)


def _regime(scores: Scores, regime: str) -> str:
    lines = [f"## Scores, {regime}", "", f"Here {REGIMES.get(regime, regime)}.", ""]
    columns = ["budget", "policy"]
    for family in FAMILIES:
        if scores.tasks(family):
            columns += [*scores.tasks(family), f"**{family}**"]
    columns.append("partial")
    rows = []
    cells = [cell for cell in scores.exact if cell.regime == regime]
    order = {name: i for i, name in enumerate(scores.policies)}
    for cell in sorted(cells, key=lambda cell: (-cell.budget, order[cell.policy])):
        row = [f"{cell.budget:g}", cell.policy]
        for family in FAMILIES:
            tasks = scores.tasks(family)
            if tasks:
                row += [f"{scores.mean(cell, [task]):.1f}" for task in tasks]
                half = 1.96 * standard_error(scores.strata(cell, tasks))
                around = f" ±{half:.1f}" if math.isfinite(half) else ""  # not of a single item
                row.append(f"**{scores.mean(cell, tasks):.1f}**{around}")
        partial = [scores.partial[cell][task].mean() for task in scores.families]
        rows.append([*row, f"{sum(partial) / len(partial):.1f}"])
    return "\n".join([*lines, _table(columns, rows, 2)])


def _spelled(made: Comparison, *, named: bool) -> tuple[str, str]:
    i = made.interval
    minus = f"minus {made.baseline}: " if named else ""
    mark = " (percentile)" if i.method == "percentile" else ""
    return f"{minus}{i.estimate:+.1f} {i.spelled()}{mark}", word_of(made.result)


def _pivot(
    made: Sequence[Comparison], key: Callable[[Comparison], tuple[str, ...]], names: Sequence[str]
) -> str:
    """Comparisons as rows, the families side by side; a cell names its baseline where no column does."""
    families = [family for family in FAMILIES if any(one.family == family for one in made)]
    rows: dict[tuple[str, ...], dict[str, tuple[str, str]]] = {}
    for one in made:
        rows.setdefault(key(one), {})[one.family] = _spelled(one, named="minus" not in names)
    columns = [*names, *(text for family in families for text in (f"{family}, points", "verdict"))]
    body = [
        [*row, *(text for family in families for text in cells.get(family, ("", "")))]
        for row, cells in rows.items()
    ]
    return _table(columns, body, len(names))


def _best(scores: Scores, judged: Sequence[Judged], margin: float) -> str:
    made = [
        Comparison(one.policy, one.baseline, one.place.regime, one.place.budget, one.place.family, one.result)
        for one in judged
    ]
    families = [family for family in FAMILIES if scores.tasks(family)]
    chosen = []
    for regime in scores.regimes:
        for ratio in scores.budgets:
            names = [best_heuristic(scores, regime, ratio, family) or "none" for family in families]
            chosen.append(f"{regime} {ratio:g}: {' / '.join(names)}")
    head = [
        "## Against the best heuristic",
        "",
        "Policy minus the heuristic with the highest mean over the same tasks, at the same regime, "
        "budget and bytes, with paired 95 % intervals; equivalent means within "
        f"±{margin:g} points. Learned policies, controls and the full cache are judged, all of one regime as "
        "one Holm family, as on the page. The heuristic is chosen for each family apart and on the same "
        "items, which favours it (better is conservative, worse leans against the policy), so other "
        "heuristics and variants are only said to lie below or above it; its own cell is empty. duoattention "
        "is no heuristic here: its table of heads is measured on documents with questions and answers. The "
        "rows of `full` are the full cache minus that heuristic. "
        f"Best heuristic, {' / '.join(families)}: {'; '.join(chosen)}.",
        "",
    ]
    if not made:
        return "\n".join([*head, "No heuristic was measured."])
    columns = ("regime", "budget", "policy")
    return "\n".join([*head, _pivot(made, lambda o: (o.regime, f"{o.budget:g}", o.policy), columns)])


def _orderings(checked: Sequence[Checked], manifest: Mapping[str, Any]) -> str:
    """Published orderings, topic by topic: claims, then differences and what they say."""
    margin = manifest["config"]["margin_points"]
    distinct = {
        (frozenset((one.made.policy, one.made.baseline)), one.made.regime, one.made.budget) for one in checked
    }
    by_place = {
        place: Counter(one.finding for one in checked if one.published == published)
        for place, published in (("where published", True), ("beyond", False))
    }
    counts = "; ".join(
        f"{place}: {', '.join(f'{count} {finding}' for finding, count in own.most_common())}"
        for place, own in by_place.items()
        if own
    )
    lines = [
        "## Published orderings",
        "",
        "Policy minus baseline over all tasks, each counting alike, at the same regime, budget and "
        f"bytes, with paired 95 % intervals. {len(distinct)} comparisons, each counted once. Each interval "
        "is for one comparison; verdicts and findings are adjusted (Holm) over all of a regime.",
        "",
        "`a > b` holds where a is better, and does not hold where it is worse, equivalent or identical; "
        f"`a = b` holds where the difference is shown to lie within ±{margin:g} points, also if it is "
        "certain, and does not hold where it is shown and lies outside. Against the margin: "
        f"the whole interval is above +{margin:g}, within ±{margin:g}, below -{margin:g}, or open (over an "
        "end of it). † marks what is beyond what was published: another regime or share, or an ordering that "
        f"was not measured by its paper. In all, {counts}.",
    ]
    for topic in topics(checked):
        lines += ["", f"### {topic}", "", *_topic(checked, topic, manifest)]
    return "\n".join(lines)


def _topic(checked: Sequence[Checked], topic: str, manifest: Mapping[str, Any]) -> list[str]:
    """One topic: claims, notes, where else to look, and the table."""
    own = [one for one in checked if one.ordering.topic == topic]
    ratios = sorted({one.made.budget for one in checked})
    same = len({one.ordering.claim for one in own}) == 1
    lines = dict.fromkeys(
        f"- {'' if same else _named(one) + ': '}{one.ordering.claim}"
        f"{f' (arXiv {one.ordering.paper})' if one.ordering.paper else ''}"
        for one in own
    )
    lines |= dict.fromkeys(f"- {note}" for note in load_orderings().notes.get(topic, ()))
    lines |= dict.fromkeys(
        f"- See also {_named(one)} under *{one.ordering.topic}*"
        for one in checked
        if topic in one.ordering.also
    )
    margin = manifest["config"]["margin_points"]
    columns = ["published", "regime", *(f"{ratio:g}" for ratio in ratios), "finding", f"against ±{margin:g}"]
    protects = topic in (PROTECTION, ENDS) and "identity" in manifest
    columns += ["protected: first + last"] if protects else []
    rows: dict[tuple[str, str], dict[float, Checked]] = {}
    for one in own:
        rows.setdefault((_named(one), one.made.regime), {})[one.made.budget] = one
    body = []
    for names, at in rows.items():
        first = next(iter(at.values())).ordering
        body.append(
            [
                *names,
                *(_cell(at[ratio]) if ratio in at else "" for ratio in ratios),
                _found(at),
                in_words({ratio: one.size for ratio, one in at.items()}),
                *([_protected(first, ratios, manifest)] if protects else []),
            ]
        )
    return [*lines, "", _table(columns, body, 2)]


def _cell(one: Checked) -> str:
    """Difference, verdict, recovery, and a mark where it is extrapolated."""
    parts = " ".join(_spelled(one.made, named=False)) + ("" if one.published else "†")
    return parts if one.recovery is None else f"{parts}; recovers {100 * one.recovery:.0f} %"


def _found(at: Mapping[float, Checked]) -> str:
    """Findings of a row, those beyond what was published apart."""
    here = {ratio: one.finding for ratio, one in at.items() if one.published}
    beyond = {ratio: one.finding for ratio, one in at.items() if not one.published}
    parts = [in_words(here)] if here else []
    return "; ".join([*parts, *([f"beyond†: {in_words(beyond)}"] if beyond else [])])


def _protected(ordering: Ordering, ratios: Sequence[float], manifest: Mapping[str, Any]) -> str:
    """What both policies of a row protect on a context, by ratio: `10+32, 20+32 / 0+32, 0+32`."""
    resolved, tokens = manifest["identity"]["policies"], manifest["config"]["context_tokens"]
    valid = torch.ones(1, tokens, dtype=torch.bool)
    sides = []
    for name in (ordering.policy, ordering.baseline):
        ends = []
        for ratio in ratios:
            budget = spread(budget_of(ratio), [tokens], [LayerShape(1, 1)]).per_head_B
            mask = protected_mask(Protection(**resolved[name]["protection"]), valid, budget)[0].tolist()
            ends.append(f"{(mask + [False]).index(False)}+{(mask[::-1] + [False]).index(False)}")
        sides.append(", ".join(ends))
    return " / ".join(sides)


def _named(one: Checked) -> str:
    sign = ">" if one.ordering.says == "better" else "="
    return f"{one.ordering.policy} {sign} {one.ordering.baseline}"


def _each(made: Sequence[Comparison], left_out: Sequence[str]) -> str:
    head = ["## Learned policies against each policy", ""]
    if left_out:
        head += ["Variants are left out.", ""]
    head += ["All comparisons of one regime are one Holm family.", ""]
    if not made:
        return "\n".join([*head, "None was measured."])
    names = ("regime", "budget", "policy", "minus")
    return "\n".join(
        [*head, _pivot(made, lambda o: (o.regime, f"{o.budget:g}", o.policy, o.baseline), names)]
    )


def _seeds(scores: Scores) -> str:
    seeds = sorted({int(seed) for own in scores.seeds.values() for seed in own})
    families = [family for family in FAMILIES if scores.tasks(family)]
    columns = ["regime", "budget", "policy"]
    columns += [f"{family}, seed {seed}" for family in families for seed in seeds]
    rows = []
    for cell in scores.exact:
        means = [scores.seed_means(cell, scores.tasks(family)) for family in families]
        numbers = [f"{own[seed]:.1f}" if seed in own else "" for own in means for seed in seeds]
        rows.append([cell.regime, f"{cell.budget:g}", cell.policy, *numbers])
    note = (
        "Means over tasks, for each seed of the model apart. Intervals above resample items, not seeds: "
        f"{len(seeds)} seed{'s are' if len(seeds) > 1 else ' is'} too few to speak for others."
    )
    return "\n".join(["## Spread over seeds", "", note, "", _table(columns, rows, 3)])


def _memory(scores: Scores) -> str:
    rows = [
        [
            cell.regime,
            f"{cell.budget:g}",
            cell.policy,
            f"{own.kept_entries:.1f}",
            f"{own.bytes_held / 1024:.1f}",
            f"{100 * own.bytes_held / own.bytes_full:.2f}",
            f"{own.lowest_ratio:.4f} to {own.highest_ratio:.4f}",
            _attended(scores, cell),
        ]
        for cell, own in scores.memory.items()
    ]
    columns = ["regime", "budget", "policy", "entries", "KiB held", "% of full", "kept / seen", "attended"]
    note = (
        "Per item, over all layers and KV heads, as the cache reports it: after eviction and before the "
        "question or the answer is appended where eviction is done once, at the end of the answer elsewhere. "
        "In the regimes that evict once every policy but the full cache holds the same number of entries, "
        "item by item: the run stops where that is not so. *attended* is what the answers were given from: "
        "entries held / seen before the forward of each answer's token, mean. Near 1 while kept / seen is "
        "small, nothing had gone yet when the answer was given, and the cell says nothing of eviction."
    )
    return "\n".join(["## Memory held", "", note, "", _table(columns, rows, 3)])


def _attended(scores: Scores, cell: Cell) -> str:
    found = [ratio for task in scores.families for ratio in scores.attended.get((cell, task), ())]
    return f"{sum(found) / len(found):.4f}" if found else ""


def _tasks(scores: Scores, tasks: Mapping[str, Task]) -> str:
    rows = [
        [name, family, str(len(scores.seeds[name])), tasks[name].about if name in tasks else ""]
        for name, family in scores.families.items()
    ]
    return "\n".join(["## Tasks", "", _table(["task", "family", "items", "what is asked"], rows, 4)])


def _unclear(scores: Scores) -> str:
    """Where a task does not tell policies apart."""
    rows = [
        [place.regime, f"{place.budget:g}", place.family, f"{own.ceiling:.1f}", own.why]
        for place, own in apart(scores)
        if not own.yes
    ]
    note = (
        "Every task tells policies apart at every budget."
        if not rows
        else "Here the full cache is no better than its noise, or policies differ by no more than theirs: "
        "these cells say nothing about policies. All cells, with ceilings, are in `cells.json`."
    )
    return "\n".join(
        [
            "## What does not tell policies apart",
            "",
            note,
            *_listed(rows, ("regime", "budget", "task", "full", "why")),
        ]
    )


def _nulls(scores: Scores) -> str:
    """What was not answered."""
    rows = [
        [
            cell.regime,
            cell.policy,
            f"{cell.budget:g}",
            task,
            ", ".join("/".join(map(str, one)) for one in own),
        ]
        for (cell, task), own in scores.nulls.items()
    ]
    count = sum(map(len, scores.nulls.values()))
    note = (
        f"{count} answers were empty and count as 0; seed/item/question." if rows else "No answer was empty."
    )
    columns = ("regime", "policy", "budget", "task", "which")
    return "\n".join(["## Nulls", "", note, *_listed(rows, columns)])


def _listed(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> list[str]:
    """A table with an end."""
    if not rows:
        return []
    more = ["", f"And {len(rows) - LISTED} more."] if len(rows) > LISTED else []
    return ["", _table(columns, rows[:LISTED], len(columns)), *more]


def _reading(config: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            "## How to read this",
            "",
            "- Means are over tasks, each counting alike; **seen** families are those that gates train on.",
            "- ± is 1.96 standard errors of that mean. Whether two policies differ is a paired question: see "
            "the tables of differences.",
            "- Intervals: paired, stratified by task, Student's t over (seed, item) clusters, widened where "
            "differences are skewed. An item that every seed answers is one cluster. An interval is for one "
            "comparison; a verdict is adjusted for its family (Holm, 0.05; sign-flip tests of at least "
            f"{config['resamples']} resamples).",
            "- better / worse: the interval excludes 0 and the adjusted test passes. equivalent: it lies "
            "within the margin and the adjusted equivalence test passes. identical: every item has the same "
            "score. inconclusive: none of these. no interval: a task has a single item.",
            "- `token_identity` and `oracle` are controls: the mean target of a token's id without any "
            "context, and the true future risk under the question and the right answer. Neither is a method. "
            f"`token_identity` is fitted, for each seed, on {config['control_documents']} documents of "
            f"{config['context_tokens']} tokens "
            f"({config['control_documents'] * config['context_tokens']:,} tokens).",
            "- partial: share of the answer found, mean over all tasks.",
        ]
    )
