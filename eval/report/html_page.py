"""`report.html`: a run as one page that needs nothing but a browser.

    python -m retain.eval.report.html_page results/RUN

In: a run's folder (rows, manifest, and where they are there `diagnostics.json`, `speed.json`, `kept.json`).
Out: the page, in that folder. The one decision taken here: it is one file without a single address in it, so
that it reads the same in an archive, in a mail and without a network, and nothing in it is trusted: what
models answered and documents say is escaped like everything else.
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retain.eval.config import OWN_GATES, RESOLVED, asks_shipped
from retain.eval.report.document_view import STEPS, from_diagnostics, view
from retain.eval.report.page_measured import (
    Missing,
    budget_figure,
    coverage_figure,
    jaccard_figure,
    speed_figure,
    speed_policies,
)
from retain.eval.report.page_scores import (
    answer_table,
    comparison_table,
    forest_figure,
    heat_maps,
    memory_table,
    null_table,
    score_figure,
    styles_of,
    task_table,
    without_scheme,
)
from retain.eval.report.tabular import Table, colours, number, words
from retain.eval.run.results_store import read_manifest, read_references, read_rows
from retain.eval.stats.comparisons import apart, budget_name, judge, paragraphs
from retain.eval.stats.summary import Scores, gather, heuristics, with_gates
from retain.eval.tasks.suite import Task
from retain.process.command import status_of
from retain.process.extras import require
from retain.process.provenance import write_text

PAGE = "report.html"
HERE = Path(__file__).parent / "template"
PARTS = (
    *(("verdicts", "Verdicts"), ("scores", "Scores"), ("differences", "Differences"), ("needles", "Needles")),
    *(("documents", "What was kept"), ("budgets", "Layers and heads"), ("coverage", "Coverage")),
    *(("jaccard", "Agreement of policies"), ("memory", "Memory and speed"), ("tasks", "Tasks and ceilings")),
    *(("answers", "Answers"), ("made", "How this was made")),
)
SHADES = ("by none", "up to 1/4", "up to 1/2", "up to 3/4", "most", "by all")


def write_page(folder: Path, manifest: Mapping[str, Any], tasks: Mapping[str, Task]) -> Path:
    """Write `report.html` of a run.

    Args:
        folder: `results/<run>`, which holds the rows.
        manifest: Of the run.
        tasks: The suite's tasks.

    Returns:
        Path of the page.

    Raises:
        ValueError: If jinja2 is not installed, or a file of the folder is damaged.
    """
    require("eval", "jinja2", what=PAGE)
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    given = context(folder, manifest, tasks)
    levels = "\n".join(
        f".h{level} {{ background: {ground}; color: {ink}; }}"
        for level, (ground, ink) in enumerate(colours())
    )
    own = {
        "style": (HERE / "page.css").read_text(encoding="utf-8") + levels,
        "script": (HERE / "page.js").read_text(encoding="utf-8"),
        "document_data": inert(given["document"].data if given["document"] else []),
    }
    path = folder / PAGE
    write_text(path, environment.get_template("page.html.j2").render(**given, **own))
    return path


def inert(value: object) -> str:
    """JSON that can stand inside a script element: no character of it can end one."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def context(folder: Path, manifest: Mapping[str, Any], tasks: Mapping[str, Task]) -> dict[str, Any]:
    """Everything that the template is given."""
    measured = {name: _load(folder / f"{name}.json") for name in ("diagnostics", "speed", "kept")}
    diagnostics, speed, kept = measured["diagnostics"], measured["speed"], measured["kept"]
    # Rows of earlier runs knew one kind of budget and one kind of score.
    rows = [{"budget": row["keep_ratio"], "score": row["exact"], **row} for row in read_rows(folder)]
    scores = gather(rows, tasks)
    config = manifest["config"]
    command = run_command(manifest)
    names = [*scores.policies]
    if diagnostics:
        names += diagnostics["curves"]
    if speed:
        names += speed_policies(speed)
    styles = styles_of(names)
    margin = float(config["margin_points"])
    judged = judge(scores, margin=margin, resamples=int(config["resamples"]))
    ceilings, unclear = _ceilings(scores)
    diagnose, where = _commands(folder, manifest)
    needles = heat_maps(rows, scores.budgets, command)
    document = view(kept) if kept else view(from_diagnostics(diagnostics)) if diagnostics else None
    nulls = null_table(rows)
    missing = {
        "needles": Missing(
            "Heat maps of depth by length need a task whose items say both, such as those of the group niah.",
            where["needles"],
        ),
        "document": Missing(
            "The view of a document shows token by token what each policy kept.", where["kept"]
        ),
        "budgets": Missing("The map of layers by heads shows where each policy spends its budget.", diagnose),
        "coverage": Missing(
            "Coverage says what share of the attention of later steps a policy's kept entries still get.",
            diagnose,
        ),
        "jaccard": Missing("The matrix says which policies keep the same entries.", diagnose),
        "speed": Missing(
            "Time and peak memory against budget are measured by a command of their own.", where["speed"]
        ),
    }
    return {
        "run": config["run"],
        "lead": _lead(scores, manifest),
        "warnings": _warnings(manifest),
        "parts": PARTS,
        "rule": _rule(margin, sum(one.result.family_size is not None for one in judged)),
        "paragraphs": paragraphs(scores, judged),
        "limits": _limits(scores, rows, unclear, config),
        "scores": score_figure(scores, styles, command),
        "forest": forest_figure(judged, margin, command),
        "comparisons": comparison_table(judged),
        "needles": needles or missing["needles"],
        "document": document,
        "document_missing": missing["document"],
        "shades": SHADES[: STEPS + 1],
        "budgets": (budget_figure(diagnostics) if diagnostics else None) or missing["budgets"],
        "coverage": coverage_figure(diagnostics, styles) if diagnostics else missing["coverage"],
        "jaccard": (jaccard_figure(diagnostics) if diagnostics else None) or missing["jaccard"],
        "memory": memory_table(rows),
        "speed": speed_figure(speed, styles) if speed else missing["speed"],
        "tasks": task_table(scores, tasks, manifest),
        "ceilings": ceilings,
        "answers": answer_table(rows, read_references(folder), scores.budgets),
        "nulls": nulls,
        "rows_command": command,
        "facts": _facts(manifest, rows),
        "commands": [
            ("The run:", command),
            ("This page again:", f"python -m retain.eval.report.html_page {shlex.quote(_folder(manifest))}"),
            ("Diagnostics:", diagnostics["command"] if diagnostics else diagnose),
            ("What was kept:", kept["command"] if kept else where["kept"]),
            ("Speed:", speed["command"] if speed else where["speed"]),
        ],
        "config": json.dumps(config, indent=2, sort_keys=True),
        "reading": _reading(config),
    }


def run_command(manifest: Mapping[str, Any]) -> str:
    """The line that made the rows: as it was typed, or as it would be."""
    run = manifest["config"]["run"]
    return str(manifest.get("command") or f"python eval/compare.py --config configs/compare/{run}.yaml")


def _folder(manifest: Mapping[str, Any]) -> str:
    config = manifest["config"]
    return f"{config.get('results', 'results')}/{config['run']}"


def _commands(folder: Path, manifest: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Commands that make what other files hold, for this run's own model, policies and a middle budget.

    Args:
        folder: Where the rows lie now.
        manifest: Of the run.
    """
    config = manifest["config"]
    out = shlex.quote(_folder(manifest))
    seed = config["seeds"][0]
    model = str(config.get("model") or "reference:{seed}").replace("{seed}", str(seed))
    variants, asked = config.get("variants", {}), config.get("policies", ())
    policies = [name for name in asked if name not in (*variants, "token_identity")]
    # Where there are only variants, as in a study without references: the first, which is its winner.
    some = policies or [name for name in asked if name in variants][:1]
    ratios = list(config.get("keep_ratios") or (0.2,))
    diagnose = (
        f"python -m retain.eval.diagnose --model {shlex.quote(model)} --policies "
        f"{shlex.join(','.join(variants.get(name, (name,))) for name in some)} "
        f"--keep-ratio {ratios[len(ratios) // 2]:g}{_gates(config, some)} --out {out}"
    )
    # The resolved config that the run left: what was typed may be the config of a study, or of nothing. Runs
    # of earlier versions left none.
    arguments = run_command(manifest).partition("--config")[2].strip()
    arguments = arguments or f"configs/compare/{config['run']}.yaml"
    if (folder / RESOLVED).is_file():
        arguments = shlex.quote(f"{_folder(manifest)}/{RESOLVED}")
    alone = [name for name in policies if name in heuristics()]
    timed = f" --policies {','.join(alone)}" if alone else ""
    return diagnose, {
        "kept": f"python -m retain.eval.report.kept --config {arguments}",
        "needles": f"python eval/compare.py --config {arguments} suite=text tasks=[niah] "
        f"run={config['run']}-niah",
        "speed": f"python -m retain.eval.speed --what serving{timed} --output {out}/speed.json",
    }


def _gates(config: Mapping[str, Any], policies: Sequence[str]) -> str:
    """The argument that names the gates of the first of these policies that takes some; empty: none does."""
    variants = config.get("variants", {})
    needy = [name for name in policies if variants.get(name, (name,))[0].partition(":")[0] in with_gates()]
    if not needy:
        return ""
    of_set = config.get("gate_sets", {}).get(config.get("uses", {}).get(needy[0], OWN_GATES), {})
    gates = str(of_set.get("folder") or config.get("gates", ""))
    return f" --gates {shlex.quote(gates.replace('{seed}', str(config['seeds'][0])))}"


def _load(path: Path) -> dict[str, Any] | None:
    """A file of the folder, or None where it is not there."""
    if not path.exists():
        return None
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(made, dict) or "command" not in made:
            raise ValueError("no command in it")
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}). Make it again, or delete it: the page then says that it is "
            "missing."
        ) from error
    return made


def _ceilings(scores: Scores) -> tuple[Table | None, list[str]]:
    """Every task's ceiling and whether it tells policies apart, and the names of those that do not."""
    lines, unclear = [], []
    for place, own in apart(scores):
        if not own.yes:
            unclear.append(f"{place.regime}, {budget_name(place.budget)}, {place.family}")
        lines.append(
            (
                *(words(place.regime), number(place.budget, 2 if place.budget < 1 else 0)),
                words(place.family),
                words("yes" if own.yes else "no", mark="" if own.yes else "v-worse"),
                *(words(own.why), words(own.best), words(own.worst)),
                *(number(own.ceiling), number(own.spread)),
                number(own.noise if math.isfinite(own.noise) else None),
            )
        )
    columns = (
        *("regime", "budget", "task", "discriminative", "why", "best", "worst", "full cache", "spread"),
        "noise",
    )
    if not lines:
        return None, []
    caption = "Ceilings, in points, and what tells policies apart"
    return Table("tab-ceilings", caption, columns, tuple(lines), 7), unclear


def _lead(scores: Scores, manifest: Mapping[str, Any]) -> str:
    config = manifest["config"]
    items = scores.num_items(scores.families)
    ratios = ", ".join(f"{budget:g}" for budget in scores.budgets if budget < 1)
    tokens = ", ".join(f"{budget:g}" for budget in scores.budgets if budget > 1)
    budgets = " and ".join(
        part for part in (ratios and f"keep_ratio {ratios}", tokens and f"{tokens} tokens per head") if part
    )
    seeds, plural = ", ".join(map(str, config["seeds"])), "s" * (len(config["seeds"]) > 1)
    model = str(config.get("model") or "") if config["suite"] == "text" else f"the {config['suite']} model"
    return (
        f"KV-cache eviction policies at equal achieved memory: {len(scores.policies)} policies with the full "
        f"cache, {len(scores.families)} tasks, {items} items on {model} (seed{plural} {seeds}), "
        f"{' and '.join(scores.regimes)}; {budgets}."
    )


def _warnings(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    states = manifest.get("code_states", [])
    found = []
    if not all(state["clean"] for state in states):
        found.append(("Scratch.", "The working tree was not clean, so these numbers enter no table."))
    if len(states) > 1:
        found.append(("Mixed code.", "The rows were made by more than one state of the code."))
    if "finished" not in manifest:
        found.append(("Unfinished.", "The run has not ended; give its command again to go on."))
    return found


def _rule(margin: float, count: int) -> str:
    return (
        "Learned policies, controls and the full cache are compared with the best heuristic of their regime, "
        "budget and task family, item by item; other heuristics are shown, not judged, since the best was "
        "chosen among them. Better or worse: the 95 % interval excludes 0 and the Holm-adjusted test passes "
        "at 0.05. "
        f"Equivalent: the interval lies within ±{margin:g} points, a margin stated before the run, and the "
        "adjusted equivalence test passes. Identical: the same score on every item. Everything else is not "
        f"known, which is not the same as equal. {count} comparisons in all; all of one regime are adjusted "
        "together."
    )


def _limits(
    scores: Scores, rows: Sequence[Mapping[str, Any]], unclear: Sequence[str], config: Mapping[str, Any]
) -> list[str]:
    seeds = len({int(seed) for own in scores.seeds.values() for seed in own})
    cells = sum(1 for _ in scores.regimes) * len(scores.budgets) * len(scores.families)
    nulls = sum(bool(row.get("null")) for row in rows)
    said = [
        f"Intervals resample items, not models: {seeds} seed{'s' * (seeds > 1)} cannot speak for others.",
        "The best heuristic is chosen on the same items that it is then compared on, which favours it: "
        "better is conservative, worse leans against the policy.",
    ]
    if asks_shipped(config):
        said.append("The model has about a million parameters: nothing about large models follows from it.")
    if unclear:
        said.append(
            f"{len(unclear)} of {cells} places (regime, budget, task) do not tell policies apart: "
            f"{'; '.join(unclear[:4])}{'; and others' if len(unclear) > 4 else ''}. See the ceilings."
        )
    said.append(
        f"{nulls} of {len(rows)} answers were empty. They count as 0 and are listed under Answers."
        if nulls
        else f"None of the {len(rows)} answers was empty."
    )
    return said


def _facts(manifest: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    config, machine = manifest["config"], manifest["environment"]
    commits = ", ".join(
        f"{(state['commit'] or 'none')[:12]} ({'clean' if state['clean'] else 'not clean'})"
        for state in manifest.get("code_states", [])
    )
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    identity = manifest.get("identity", {})
    models = identity.get("models", {})
    models = models if isinstance(models, Mapping) else {"": models}
    shas = ", ".join(f"{seed}: {str(sha)[:16]}" for seed, sha in models.items())
    found = [
        ("Run", config["run"]),
        ("Code", commits),
        ("Config hash", manifest.get("identity_sha", "")),
        ("Model", str(manifest.get("model") or config.get("model") or config["suite"])),
        ("Model weights (sha256, by seed)", shas),
        ("Seeds", ", ".join(map(str, config["seeds"]))),
        ("Answers", str(len(rows))),
        ("Longest context, tokens", str(config["context_tokens"])),
        ("Device", f"{manifest.get('device', machine['device'])} ({machine['processor']})"),
        ("Data type of weights", str(manifest.get("dtype", ""))),
        ("Attention", str(manifest.get("attention", ""))),
        ("Python", machine["python"]),
        ("Versions", versions),
        ("Started", str(manifest.get("started", ""))),
        ("Finished", str(manifest.get("finished", "not yet"))),
    ]
    return [(name, without_scheme(value)) for name, value in found if value]


def _reading(config: Mapping[str, Any]) -> list[str]:
    return [
        "Scores are in % of what a task is judged by (its metric); means are over tasks, each counting "
        "alike.",
        "Seen: families of tasks that gates were trained on. Held-out: all others.",
        "Intervals: paired, stratified by task, Student's t over (seed, item), widened where differences are "
        "skewed. Several questions on one item are averaged first, and so are the seeds of an item that all "
        "of them answer. A task of one item leaves no interval.",
        f"p: sign-flip test of the mean over tasks, at least {config['resamples']} resamples, or the exact "
        "McNemar test of one task scored right or wrong. margin p: of a difference as large as the margin, "
        "which counts losses too rare to be seen. Wilcoxon's test is printed and decides nothing: it is "
        "about ranks.",
        "oracle and token_identity are controls, no methods: the true future attention, and a table of "
        "token ids.",
        "Equal memory is checked, not assumed: the run stops where two policies of one budget hold different "
        "numbers of entries in the regimes that evict once.",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page of a folder again."""
    parser = argparse.ArgumentParser(description="Write report.html of a run again.")
    parser.add_argument("folder", type=Path, help="results/<run>")
    given = parser.parse_args(arguments)
    try:
        manifest = read_manifest(given.folder)
        print(write_page(given.folder, manifest, tasks_of(manifest)))
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def tasks_of(manifest: Mapping[str, Any]) -> Mapping[str, Task]:
    """The tasks of a run's suite, without its model; a suite that only a program made has none here."""
    config = manifest["config"]
    if config["suite"] == "reference":
        from retain.eval.tasks.suites import load_suite

        return load_suite("reference").tasks
    if config["suite"] == "text":
        from retain.eval.tasks.text import cards

        about = {name: card.about for name, card in cards().items()}
    else:
        about = {}
    return {
        name: Task(name, about=about.get(name, ""), **own) for name, own in manifest.get("tasks", {}).items()
    }


if __name__ == "__main__":
    sys.exit(status_of(main))
