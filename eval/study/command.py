"""Runs a study: which ingredient of a policy pays, by taking them out one at a time, or by crossing them.

    python -m retain.eval.study --config configs/study/fusion.yaml [key=value ...]
    python -m retain.eval.study --config configs/study/fusion.yaml --train-commands | bash
    accelerate launch --num_processes 8 -m retain.eval.study --config FILE compare.device=cuda [key=value ...]

A study is one comparison of variants (`retain.eval.study.plan`): it is run, resumed, spread over workers and
devices as any other. In `<compare.results>/<compare.run>/` it leaves what a comparison leaves, and
`study.md`, `study.json`, `study.png`, `study.yaml`. Its tables are made from the rows alone, so that a
finished study is only reported again.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retain.config import load, save, to_mapping
from retain.eval.compare import command_of, compare
from retain.eval.config import config_parser, suite_of
from retain.eval.run.processes import Processes, launched
from retain.eval.run.results_store import full_disk_explained, read_manifest, read_rows
from retain.eval.stats.summary import gather
from retain.eval.study.picture import draw_study
from retain.eval.study.plan import Plan, StudyConfig, absent_gates, plan_of, stale_gates, train_commands
from retain.eval.study.table import as_markdown, as_rows, entries_of, ingredients_of, tables_of
from retain.eval.tasks.suite import Suite
from retain.process.command import command
from retain.process.provenance import write_json, write_text

MODULE = "retain.eval.study"
REPORT, NUMBERS, PICTURE, CONFIG = "study.md", "study.json", "study.png", "study.yaml"


def run_study(
    study: StudyConfig, suite: Suite, processes: Processes | None = None, *, command: str = ""
) -> Path:
    """Run a study to its end, and report it; of several processes the first reports.

    Args:
        command: That was typed; empty: the one that makes the comparison alone.

    Returns:
        Path of `study.md`.

    Raises:
        ValueError: If the study or its comparison is wrong, gates are missing or were trained otherwise than
            the study says, or the folder holds the rows of another configuration.
    """
    plan = plan_of(study, suite)
    missing = absent_gates(study, plan) + stale_gates(study, plan)
    if missing:
        raise ValueError("This study cannot start:\n" + "\n".join(f"  - {one}" for one in missing))
    processes = Processes() if processes is None else processes
    compare(plan.compare, suite, processes, command=command)
    if processes.first:
        report(study, plan, suite)
    return plan.compare.folder / REPORT


def report(study: StudyConfig, plan: Plan, suite: Suite) -> None:
    """Write a study's tables and picture from the rows of its run."""
    folder = plan.compare.folder
    scores = gather(read_rows(folder), suite.tasks)
    options: dict[str, Any] = {"margin": study.compare.margin_points, "resamples": study.compare.resamples}
    entries = entries_of(scores, tables_of(study, plan), **options)
    manifest = read_manifest(folder)
    save(study, folder / CONFIG)
    write_json(
        folder / NUMBERS,
        {
            "run": study.compare.run,
            "code_states": manifest["code_states"],
            "identity_sha": manifest["identity_sha"],
            "study": to_mapping(study),
            "lines": {
                name: {"policy": [*line.policy], "gates": line.gates, "levels": {**line.levels}}
                for name, line in plan.lines.items()
            },
            "skipped": {**plan.skipped},
            "ingredients": [
                {
                    **{"factor": one.factor, "family": one.family, "winner": one.chosen},
                    **{"absent": one.absent, "verdict": one.verdict},
                    "places": [
                        {"regime": regime, "budget": budget, "word": word}
                        for (regime, budget), word in one.places.items()
                    ],
                }
                for one in ingredients_of(study, plan, entries)
            ],
            "entries": as_rows(entries),
        },
    )
    draw_study(entries, folder / PICTURE, title=f"Study {study.compare.run}")
    text = as_markdown(study, plan, scores, entries, head=_head(study, suite, manifest))
    write_text(folder / REPORT, text + f"\n![level minus winner]({PICTURE})\n")


def _head(study: StudyConfig, suite: Suite, manifest: dict[str, Any]) -> list[str]:
    """Lines on the run and its code, and whether its numbers may enter a table."""
    own, states = study.compare, manifest["code_states"]
    seeds = ", ".join(map(str, own.seeds))
    commits = ", ".join(f"`{(state['commit'] or 'none')[:12]}`" for state in states)
    lines = [
        f"Suite `{suite.name}`, seeds {seeds}, {own.items_per_task} items a task and seed (from index "
        f"{own.first_item} on), contexts of at most {own.context_tokens} tokens; plan: {study.plan}. Memory "
        "and every other policy: `report.md` beside this file.",
        "",
        f"Code {commits}; config hash `{manifest['identity_sha']}`.",
    ]
    if not all(one["clean"] for one in states):
        lines += ["", "**Scratch:** the working tree was not clean, so these numbers enter no table."]
    return lines


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run, and say where the report is."""
    about = "Which ingredient of an eviction policy pays."
    parser = config_parser(StudyConfig, "configs/study/fusion.yaml", description=about)
    parser.add_argument(
        "--train-commands", action="store_true", help="print what trains the gates, and run nothing"
    )
    parser.add_argument("--processes", type=int, default=1, help="of each training, for --train-commands")
    typed = [*(sys.argv[1:] if arguments is None else arguments)]
    given, made_by = parser.parse_args(typed), command_of(MODULE, typed)
    study = load(given.config, StudyConfig, given.overrides)
    if given.train_commands:
        print("\n".join(train_commands(study, given.processes)))
        return 0
    with (
        launched().until_done() as processes,
        full_disk_explained(study.compare.folder, key="compare.results"),
    ):
        path = run_study(study, suite_of(study.compare), processes, command=made_by)
    if processes.first:
        text = path.read_text(encoding="utf-8")
        print(text.partition("\n## Ingredients\n")[2].partition("\n## ")[0].strip())
        print(f"\nStudy: {path}; again: {made_by}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
