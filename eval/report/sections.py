"""The sections of a run's report, made once from its rows; `render` writes them as Markdown and as a page.

Every number is computed from the rows of this run. A run that cannot be trusted (unclean tree, rows made by
different code) says so in its first lines.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from retain.eval.config import asks_shipped
from retain.eval.report.blocks import PAGE, REPORT, Block, Bullets, Figure, PagePart, Prose, Report, Section
from retain.eval.report.document_view import from_diagnostics, view
from retain.eval.report.measured import (
    budget_figure,
    coverage_figure,
    jaccard_figure,
    missing,
    speed_figure,
    speed_policies,
)
from retain.eval.report.picture import forest_panels, score_panels
from retain.eval.report.plots import Look, Panel, looks_of
from retain.eval.report.run import MANY, Run
from retain.eval.report.tables import (
    answer_table,
    ceiling_tables,
    comparison_table,
    families_of,
    glance_table,
    heat_maps,
    memory_table,
    null_table,
    pivot_table,
    regime_table,
    seed_table,
    task_table,
    without_scheme,
)
from retain.eval.stats.summary import Comparison, Scores, best_heuristic

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


def _generated(config: Mapping[str, Any]) -> str:
    """How answers came about."""
    how, temperature = "greedy generation", config.get("temperature", 0.0)
    if temperature:
        how = f"sampling at temperature {temperature:g}, alike for all policies,"
    return f"{how} through the ragged cache"


def report_of(run: Run) -> Report:
    """All sections of a run's report."""
    scores, config = run.scores, run.config
    diagnostics, speed, kept = (run.measured(name) for name in ("diagnostics", "speed", "kept"))
    names = [*scores.policies, *(diagnostics["curves"] if diagnostics else ())]
    looks = looks_of([*names, *(speed_policies(speed) if speed else ())])
    how = run.commands
    files = {"diagnostics": diagnostics, "kept": kept, "speed": speed}
    ran = {name: own["command"] for name, own in files.items() if own}
    unclear, ceilings = ceiling_tables(scores)
    regimes = [
        Section(
            f"scores-{place}",
            f"Scores, {regime}",
            (Prose(f"Here {REGIMES.get(regime, regime)}."), regime_table(scores, regime)),
        )
        for place, regime in enumerate(scores.regimes)
    ]
    sections = [
        _verdicts(run, unclear),
        *([_ranking(run, looks)] if len(scores.policies) > MANY else []),
        _glance(scores),
        *regimes,
        _best(run),
        _each(run),
        _seeds(scores),
        *_measured_sections(run, looks, how, diagnostics, kept),
        _memory(run, looks, how, speed),
        Section("tasks", "Tasks", (task_table(run),)),
        _unclear(unclear, ceilings),
        Section("answers", "Answers", (answer_table(run),)),
        _nulls(run),
        _made(run, {**how, **ran}),
        _reading(config),
    ]
    title = f"Comparison `{config['run']}`"
    return Report(title, _warnings(run), _first(run), _lead(run), tuple(sections))


def _warnings(run: Run) -> tuple[Block, ...]:
    mixed = "**Mixed code:** the rows were made by more than one state of the code."
    scratch = "**Scratch:** the working tree was not clean, so these numbers enter no table."
    unfinished = "**Unfinished:** the run has not ended; give its command again to go on."
    found = (
        (len(run.states) > 1, Prose(mixed, "warning")),
        (not all(state["clean"] for state in run.states), Prose(scratch, "warning")),
        ("finished" not in run.manifest, Prose(unfinished, "warning", PAGE)),
    )
    return tuple(warning for said, warning in found if said)


def _lead(run: Run) -> tuple[Block, ...]:
    scores, config, machine = run.scores, run.config, run.manifest["environment"]
    states = run.states
    commits = ", ".join(
        f"`{(state['commit'] or 'none')[:12]}`{'' if state['clean'] else ' (tree not clean)'}"
        for state in states
    )
    counts = [len(seeds) for seeds in scores.seeds.values()]
    bed = f"\n{TEST_BED}" if asks_shipped(config) else ""
    return (
        Prose(
            f"Seeds {', '.join(map(str, config['seeds']))} of the {config['suite']} model; "
            f"{' to '.join(map(str, sorted({*counts})))} items a task over all seeds ({sum(counts)} in all), "
            f"contexts of {config['context_tokens']} tokens; {_generated(config)}. "
            f"Scores in %: what each task is judged by.{bed}"
        ),
        Prose(
            f"Code {commits}; config hash `{run.manifest['identity_sha']}`; Python {machine['python']}, "
            f"{_versions(machine)}; {machine['device']} ({machine['processor']}); "
            f"finished {run.manifest.get('finished', 'not yet')}."
        ),
    )


def _versions(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)


def _verdicts(run: Run, unclear: int) -> Section:
    """What the verdicts mean, and what the run cannot say."""
    scores = run.scores
    places = len(scores.regimes) * len(scores.budgets) * len(scores.families)
    nulls = sum(map(len, scores.nulls.values()))
    count = sum(one.result.family_size is not None for one in run.judged)
    rule = (
        "Learned policies, controls and the full cache are compared with the best heuristic of their regime, "
        "budget and task family, item by item; other heuristics are shown, not judged, since the best was "
        "chosen among them. Better or worse: the 95 % interval excludes 0 and the Holm-adjusted test passes "
        f"at 0.05. Equivalent: the interval lies within ±{run.config['margin_points']:g} points, a margin "
        "stated before the run, and the adjusted equivalence test passes. Identical: the same score on every "
        "item. Everything else is not known, which is not the same as equal. "
        f"{count} comparisons in all; all of one regime are adjusted together."
    )
    cannot = (
        f"What this run cannot say: {unclear} of {places} places (regime, budget, task) do not tell policies "
        f"apart; {nulls} of {len(run.rows)} answers were empty and count as 0; intervals resample items, not "
        f"models. The sections below name each."
    )
    return Section("verdicts", "Verdicts", (Prose(rule, on=PAGE), Prose(cannot, on=PAGE)))


def _first(run: Run) -> tuple[Block, ...]:
    """The first screen: who wins in each regime, and the picture of it."""
    own = looks_of(run.drawn)
    left = len(run.scores.policies) - len(run.drawn)
    figure = Figure(
        ident="fig-scores",
        title="Score against budget",
        note="Mean score over tasks, each counting alike. Bands: ±1.96 standard errors, how firm a line is. "
        "Whether two policies differ is a paired question: the sentences say it. Dashed: the full cache."
        + (f" {left} more policies are in the ranking." if left else ""),
        command=run.command,
        panels=_score_panels(run, own),
        legend=tuple(own.items()),
        image=("scores.png", "score against budget"),
        on="both",
    )
    return Bullets(tuple((one.text, ()) for one in run.sentences)), figure


def _ranking(run: Run, looks: Mapping[str, Look]) -> Section:
    figure = Figure(
        ident="fig-ranking",
        title="Ranking of policies",
        note="Mean score over tasks, each counting alike. Dot: the middle budget, with ±1.96 standard "
        "errors; thin line: all budgets; hollow: a variant. Dashed: the full cache.",
        command=run.command,
        panels=_score_panels(run, {name: looks[name] for name in run.scores.policies if name in looks}),
        image=("ranking.png", "ranking of policies"),
        on="both",
    )
    return Section("ranking", "Ranking", (figure,))


def _score_panels(run: Run, looks: Mapping[str, Look]) -> tuple[Panel, ...]:
    every = (score_panels(run.scores, regime, looks, run.variants) for regime in run.scores.regimes)
    return tuple(panel for own in every for panel in own)


def _glance(scores: Scores) -> Section:
    families = families_of(scores)
    counts = " and ".join(f"{len(scores.tasks(family))} {family}" for family in families)
    order = ", best first" if len(scores.policies) > MANY else ""
    note = (
        f"Score in %, mean over tasks: {' / '.join(families)} ({counts}), by regime and "
        f"budget{order}: below 1 a keep_ratio, from 2 on tokens per head."
    )
    return Section("glance", "At a glance", (Prose(note), glance_table(scores)))


def _best(run: Run) -> Section:
    scores, margin = run.scores, run.config["margin_points"]
    families = families_of(scores)
    chosen = [
        f"{regime} {ratio:g}: "
        + " / ".join(best_heuristic(scores, regime, ratio, family) or "none" for family in families)
        for regime in scores.regimes
        for ratio in scores.budgets
    ]
    blocks: list[Block] = [
        Prose(
            "Policy minus the heuristic with the highest mean over the same tasks, at the same regime, "
            "budget and bytes, with paired 95 % intervals; equivalent means within "
            f"±{margin:g} points. Learned policies, controls and the full cache are judged, all of one "
            "regime as one Holm family, as on the page. The heuristic is chosen for each family apart and on "
            "the same items, which favours it (better is conservative, worse leans against the policy), so "
            "other heuristics and variants are only said to lie below or above it; its own cell is empty. "
            "duoattention is no heuristic here: its table of heads is measured on documents with questions "
            "and answers. The rows of `full` are the full cache minus that heuristic. "
            f"Best heuristic, {' / '.join(families)}: {'; '.join(chosen)}."
        )
    ]
    if not run.judged:
        blocks.append(Prose("No heuristic was measured."))
        return Section("differences", "Against the best heuristic", tuple(blocks))
    made = [
        Comparison(one.policy, one.baseline, one.place.regime, one.place.budget, one.place.family, one.result)
        for one in run.judged
    ]
    forest = Figure(
        ident="fig-forest",
        title="Difference from the best heuristic",
        note=f"Policy minus the best heuristic, paired by item, with 95 % intervals. The band is ±{margin:g} "
        "points, the difference that was said beforehand not to matter; the full cache, and what has no "
        "interval, is in the table. Up: better; down: worse; square: equivalent or identical; hollow circle: "
        "not known; full circle: a heuristic or variant, not judged.",
        command=run.command,
        panels=tuple(forest_panels(run.judged, float(margin))),
        data=(comparison_table(run.judged),),
    )
    names = ("regime", "budget", "policy")
    blocks += [forest, pivot_table("tab-best", "Against the best heuristic", made, names, REPORT)]
    return Section("differences", "Against the best heuristic", tuple(blocks))


def _each(run: Run) -> Section:
    made = run.each
    blocks: list[Block] = [Prose("Variants are left out.")] if run.variants else []
    blocks.append(Prose("All comparisons of one regime are one Holm family."))
    if not made:
        blocks.append(Prose("None was measured."))
    else:
        names = ("regime", "budget", "policy", "minus")
        caption = "Learned policies against each policy, in points"
        blocks.append(pivot_table("tab-each", caption, made, names))
    return Section("each", "Learned policies against each policy", tuple(blocks))


def _seeds(scores: Scores) -> Section:
    count = len({int(seed) for own in scores.seeds.values() for seed in own})
    note = (
        "Means over tasks, for each seed of the model apart. Intervals above resample items, not seeds: "
        f"{count} seed{'s are' if count > 1 else ' is'} too few to speak for others."
    )
    return Section("seeds", "Spread over seeds", (Prose(note), seed_table(scores)))


def _measured_sections(
    run: Run,
    looks: Mapping[str, Look],
    how: Mapping[str, str],
    diagnostics: Mapping[str, Any] | None,
    kept: Mapping[str, Any] | None,
) -> list[Section]:
    """Parts of the page that other commands measure, or what they would show."""
    shown = kept or (diagnostics and from_diagnostics(diagnostics))
    document = (PagePart("document", view(shown)),) if shown else None
    maps = heat_maps(run.rows, run.scores.budgets, run.command)
    parts = (
        (
            *("needles", "Needles", maps, "needles"),
            "Heat maps of depth by length need a task whose items say both, such as those of the group niah.",
        ),
        (
            *("documents", "What was kept", document, "kept"),
            "The view of a document shows token by token what each policy kept.",
        ),
        (
            *("budgets", "Layers and heads", diagnostics and budget_figure(diagnostics), "diagnostics"),
            "The map of layers by heads shows where each policy spends its budget.",
        ),
        (
            *("coverage", "Coverage", diagnostics and coverage_figure(diagnostics, looks), "diagnostics"),
            "Coverage says what share of the attention of later steps a policy's kept entries still get.",
        ),
        (
            *("jaccard", "Agreement of policies", diagnostics and jaccard_figure(diagnostics), "diagnostics"),
            "The matrix says which policies keep the same entries.",
        ),
    )
    return [
        Section(
            ident, title, (own if isinstance(own, tuple) else (own,)) if own else missing(what, how[name])
        )
        for ident, title, own, name, what in parts
    ]


def _memory(
    run: Run, looks: Mapping[str, Look], how: Mapping[str, str], speed: Mapping[str, Any] | None
) -> Section:
    note = (
        "Per item, over all layers and KV heads, as the cache reports it: after eviction and before the "
        "question or the answer is appended where eviction is done once, at the end of the answer elsewhere. "
        "In the regimes that evict once every policy but the full cache holds the same number of entries, "
        "item by item: the run stops where that is not so. *attended* is what the answers were given from: "
        "entries held / seen before the forward of each answer's token, mean. Near 1 while kept / seen is "
        "small, nothing had gone yet when the answer was given, and the cell says nothing of eviction."
    )
    what = "Time and peak memory against budget are measured by a command of their own."
    timed = (speed_figure(speed, looks),) if speed else missing(what, how["speed"])
    return Section("memory", "Memory held", (Prose(note), memory_table(run), *timed))


def _unclear(unclear: int, ceilings: Sequence[Block]) -> Section:
    note = (
        "Every task tells policies apart at every budget."
        if not unclear
        else "Here the full cache is no better than its noise, or policies differ by no more than theirs: "
        "these cells say nothing about policies. All cells, with ceilings, are in `cells.json`."
    )
    return Section("unclear", "What does not tell policies apart", (Prose(note), *ceilings))


def _nulls(run: Run) -> Section:
    blocks: tuple[Block, ...] = (Prose("No answer was empty."),)
    if count := sum(map(len, run.scores.nulls.values())):
        note = f"{count} answers were empty and count as 0; seed/item/question."
        blocks = (Prose(note), null_table(run))
    return Section("nulls", "Nulls", blocks)


def _made(run: Run, how: Mapping[str, str]) -> Section:
    """Provenance of the run, and the commands that make each part again."""
    config, manifest, machine = run.config, run.manifest, run.manifest["environment"]
    commits = ", ".join(
        f"{(state['commit'] or 'none')[:12]} ({'clean' if state['clean'] else 'not clean'})"
        for state in run.states
    )
    models = manifest.get("identity", {}).get("models", {})
    models = models if isinstance(models, Mapping) else {"": models}
    found = {
        "Run": config["run"],
        "Code": commits,
        "Config hash": manifest.get("identity_sha", ""),
        "Model": manifest.get("model") or config.get("model") or config["suite"],
        "Model weights (sha256, by seed)": ", ".join(
            f"{seed}: {str(sha)[:16]}" for seed, sha in models.items()
        ),
        "Seeds": ", ".join(map(str, config["seeds"])),
        "Answers": len(run.rows),
        "Longest context, tokens": config["context_tokens"],
        "Device": f"{run.device} ({machine['processor']})",
        "Data type of weights": manifest.get("dtype", ""),
        "Attention": manifest.get("attention", ""),
        "Python": machine["python"],
        "Versions": _versions(machine),
        "Started": manifest.get("started", ""),
        "Finished": manifest.get("finished", "not yet"),
        "The run": run.command,
        "This report again": how["report"],
        "Diagnostics": how["diagnostics"],
        "What was kept": how["kept"],
        "Speed": how["speed"],
    }
    facts = [(name, without_scheme(str(value))) for name, value in found.items() if value]
    folded = ("The config, as it was read", json.dumps(config, indent=2, sort_keys=True))
    return Section("made", "How this was made", (PagePart("facts", facts), PagePart("folded", folded)))


def _reading(config: Mapping[str, Any]) -> Section:
    tokens = config["control_documents"] * config["context_tokens"]
    lines = (
        "Means are over tasks, each counting alike; **seen** families are those that gates train on.",
        "± is 1.96 standard errors of that mean. Whether two policies differ is a paired question: see "
        "the tables of differences.",
        "Intervals: paired, stratified by task, Student's t over (seed, item) clusters, widened where "
        "differences are skewed. An item that every seed answers is one cluster. An interval is for one "
        "comparison; a verdict is adjusted for its family (Holm, 0.05; sign-flip tests of at least "
        f"{config['resamples']} resamples).",
        "better / worse: the interval excludes 0 and the adjusted test passes. equivalent: it lies "
        "within the margin and the adjusted equivalence test passes. identical: every item has the same "
        "score. inconclusive: none of these. no interval: a task has a single item.",
        "`token_identity` and `oracle` are controls: the mean target of a token's id without any "
        "context, and the true future risk under the question and the right answer. Neither is a method. "
        f"`token_identity` is fitted, for each seed, on {config['control_documents']} documents of "
        f"{config['context_tokens']} tokens ({tokens:,} tokens).",
        "partial: share of the answer found, mean over all tasks.",
    )
    more = (
        f"p: sign-flip test of the mean over tasks, at least {config['resamples']} resamples, or the exact "
        "McNemar test of one task scored right or wrong. margin p: of a difference as large as the margin, "
        "which counts losses too rare to be seen. Wilcoxon's test is printed and decides nothing: it is "
        "about ranks.",
        "Equal memory is checked, not assumed: the run stops where two policies of one budget hold different "
        "numbers of entries in the regimes that evict once.",
    )
    both, page = (tuple((line, ()) for line in own) for own in (lines, more))
    return Section("reading", "How to read this", (Bullets(both), Bullets(page, PAGE)))
