"""The entry: compare eviction policies at equal achieved memory.

    python eval/compare.py --config configs/compare/reference.yaml [key=value ...]
    accelerate launch --num_processes 8 eval/compare.py --config FILE device=cuda [key=value ...]

A run's folder `results/<run>/` holds `compare.yaml` (the config, resolved), `items.jsonl`,
`references.jsonl`, `cells.json`, `manifest.json`, `report.md` and `report.html`. A run that was stopped goes
on where it was when the same command is given again; a finished one is only reported again. Everything that
can be wrong is found before the first model runs, and one run at a time is in a folder.
"""

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from retain.eval.config import compare_parser
from retain.process.command import command, parse_first

if __name__ == "__main__":
    parse_first(compare_parser())

from retain.config import load, save, to_mapping
from retain.eval.config import (
    NOT_IDENTITY,
    OWN_GATES,
    RESOLVED,
    CompareConfig,
    all_lines,
    find_policy,
    gate_names,
    gate_users,
    indices_of,
    resolve_device,
    suite_of,
    with_all_tasks,
)
from retain.eval.report.render import section, write_report
from retain.eval.report.run import Run
from retain.eval.run.checks import check
from retain.eval.run.evaluated_model import one_by_one, plan
from retain.eval.run.gate_sources import source_identity
from retain.eval.run.processes import Processes, launched
from retain.eval.run.results_store import MANIFEST, full_disk_explained, mapping_hash, open_run
from retain.eval.run.runner import run_all
from retain.eval.stats.ceilings import write_cells
from retain.eval.tasks.suite import Suite
from retain.head_weights import read_weights
from retain.hf.model.identity import fingerprint, identity_of
from retain.models.named import commit_of
from retain.presets import Policy
from retain.process.extras import require
from retain.process.lock import lock_folder
from retain.process.provenance import code_state, environment, now, write_json

# As a script this file has another name.
MODULE = "retain.eval.compare"
# Of a task, how many items say what its items are.
FIRST_ITEMS = 3
# vLLM by its names: its CPU build is another package.
# What the manifest says of a task.
OF_TASK = ("family", "metric", "primary", "provenance", "source", "licence", "version", "seeded")


def items_sha(config: CompareConfig, suite: Suite, task: str) -> str:
    """First 16 hex digits of the sha256 of a task's first items, as the model reads them: data files, chat
    template, tokenizer and generation config have changed where this has, wherever they lie."""
    digest = hashlib.sha256()
    for index in indices_of(config, suite, task)[:FIRST_ITEMS]:
        item = suite.item(task, config.seeds[0], index, config.context_tokens)
        asked = [(list(one.question_ids), one.generate, list(one.references)) for one in item.asked]
        digest.update(json.dumps([list(item.context_ids), asked, list(item.end_ids)]).encode())
    return digest.hexdigest()[:16]


def _config_identity(config: CompareConfig, mapping: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config that a score may depend on; where data and models lie is not among them."""
    identity = {name: value for name, value in mapping.items() if name not in NOT_IDENTITY}
    text = {name: value for name, value in mapping["text"].items() if name != "device_map"}
    changes = {
        task: {name: value for name, value in own.items() if name != "path"}
        for task, own in config.text.changes.items()
    }
    text["changes"] = {task: own for task, own in changes.items() if own}
    if not config.first_item:  # runs of before it could be stated began there, and can be reported again
        del identity["first_item"]
    return identity | {"text": text}


def _policy_identity(policy: Policy) -> dict[str, Any]:
    """The settings of a policy that a score may depend on; weights of heads by their numbers, wherever the
    file lies."""
    own = asdict(replace(policy, paper="", regime="any"))
    if (path := policy.allocation.weights) is not None:
        own["allocation"]["weights"] = {str(layer): [*row] for layer, row in read_weights(path).items()}
    return own


def _of_model(model: Any) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint(model)["sha256"],
        "weights": mapping_hash(identity_of(model, head=True)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": getattr(model.config, "_attn_implementation", None),
        "device": model.get_input_embeddings().weight.device.type,
        "commit": commit_of(model),
    }


def describe_run(config: CompareConfig, suite: Suite, command: str = "") -> dict[str, Any]:
    """The manifest of a run: `identity` is what two runs must share for their rows to stand in one file. It
    holds what decides a score, never where that came from.

    Args:
        command: That makes the run; empty: the one that makes it from the config in its folder.
    """
    tasks = {name: suite.tasks[name] for name in with_all_tasks(config, suite)}
    mapping = to_mapping(config) | {"tasks": [*tasks]}
    seeds = config.seeds if suite.seeds is not None else config.seeds[:1]
    models = one_by_one(replace(config, seeds=seeds), suite, lambda _, model: _of_model(model))
    first = next(iter(models.values()))
    models = {seed: models.get(seed, first) for seed in config.seeds}
    device = first["device"] if config.text.device_map else resolve_device(config.device).type
    machine = environment(device, 1 if config.workers else 0)
    policies = {line.name: find_policy(config, line.policy, line.protection) for line in all_lines(config)}
    # Of all gates, seed by seed: those of `gates`, and of policies that take others, theirs.
    of_set = {
        name: {str(seed): source_identity(config, seed, name) for seed in config.seeds}
        for name in gate_names(config)
    }
    others = {policy: of_set[name] for policy, name in gate_users(config).items() if name != OWN_GATES}
    identity = {
        "config": _config_identity(config, mapping) | {"device": device},
        "policies": {name: _policy_identity(own) for name, own in policies.items()},
        "models": {str(seed): own["fingerprint"] for seed, own in models.items()},
        "weights": {str(seed): own["weights"] for seed, own in models.items()},
        "gates": of_set.get(OWN_GATES, {}),
        # Left out where there are none, so that what was run before there were any can be reported again.
        **({"gates_of_policies": others} if others else {}),
        "tasks": {name: task.version for name, task in tasks.items()},
        "items": {name: items_sha(config, suite, name) for name in tasks},
        "python": machine["python"],  # the reference suite's text is the standard library's
    }
    return {
        "run": config.run,
        "command": command or command_of(MODULE, ["--config", str(config.folder / RESOLVED)]),
        "config": mapping,
        "identity": identity,
        "tasks": {name: {part: getattr(task, part) for part in OF_TASK} for name, task in tasks.items()},
        "model_commits": {str(seed): own["commit"] for seed, own in models.items()},
        "device": device,
        "dtype": first["dtype"],
        "attention": first["attention"],
        "code": code_state(Path(__file__).parent),
        "environment": machine,
        "samples": {
            "units": len(plan(config, suite)),
            "items_per_task_and_seed": config.items_per_task,
            "first_item": config.first_item,
        },
        "started": now(),
    }


def compare(
    config: CompareConfig, suite: Suite, processes: Processes | None = None, *, command: str = ""
) -> Path:
    """Runs a comparison to its end, and reports it.

    Args:
        processes: Of the launch; the first of them checks, locks the folder and reports.
        command: That was typed, for the manifest; empty: see `describe_run`.

    Returns:
        Path of the report; of the processes beside the first, the run's folder.

    Raises:
        ValueError: If the config is wrong, another run holds the folder, or it holds the rows of another
            configuration.
    """
    # Its reports need them all, hours later.
    require("eval", "jinja2", "matplotlib", "scipy", what="a comparison")
    processes = processes or Processes()
    if not processes.first:
        processes.wait()
        run_all(config, suite, processes=processes)
        return config.folder
    for note in check(config, suite, processes.count):
        print(f"note: {note}", file=sys.stderr)
    with lock_folder(config.folder, otherwise="another name (run=...)"):
        units = [unit.key for unit in plan(config, suite)]
        manifest = open_run(config.folder, describe_run(config, suite, command), units)
        save(config, config.folder / RESOLVED)
        processes.wait()
        if run_all(config, suite, processes=processes) or "finished" not in manifest:
            manifest |= {"finished": now(), "processes": processes.count}
            write_json(config.folder / MANIFEST, manifest)
        write_cells(config.folder, suite.tasks)
        run = Run(config.folder, manifest, suite.tasks)
        return write_report(run)


def command_of(module: str, typed: Sequence[str]) -> str:
    """The command that starts a module with these arguments, which may have come by a script or `retain`."""
    return shlex.join(["python", "-m", module, *typed])


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and says where the report is."""
    typed = [*(sys.argv[1:] if arguments is None else arguments)]
    given = compare_parser().parse_args(typed)
    config = load(given.config, CompareConfig, given.overrides)
    with launched().until_done() as processes, full_disk_explained(config.folder):
        report = compare(config, suite_of(config), processes, command=command_of(MODULE, typed))
    if not processes.first:
        return 0
    print("\n" + section(report, "At a glance"))
    print(f"\nReport: {report}, {report.with_suffix('.html')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
