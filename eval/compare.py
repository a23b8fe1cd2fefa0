"""The entry: compare eviction policies at equal achieved memory.

    python eval/compare.py --config configs/compare/reference.yaml [key=value ...]

In: a config, trained gates. Out: `results/<run>/` with `items.jsonl`, `manifest.json`, `report.md` and
`scores.png`. A run that was stopped goes on where it was when the same command is given again; a finished one
is only reported again. The one decision taken here: everything that can be wrong is found before the first
model runs.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from retain.config import load, to_mapping
from retain.eval.config import (
    NOT_IDENTITY,
    CompareConfig,
    check,
    find_policy,
    needs_gates,
    with_all_tasks,
)
from retain.eval.record import MANIFEST, gates_identity, open_run
from retain.eval.report import section, write_report
from retain.eval.runner import plan, rows_per_unit, run_all
from retain.eval.summary import Claim
from retain.eval.tasks import Suite, load_suite
from retain.hf.model import fingerprint
from retain.provenance import code_state, environment, now, write_json


def describe_run(config: CompareConfig, suite: Suite) -> dict[str, Any]:
    """The manifest of a run: `identity` is what two runs must share for their rows to stand in one file. It
    holds what decides a score, never where that came from."""
    mapping = to_mapping(config) | {"tasks": list(with_all_tasks(config, suite))}
    machine = environment("cpu", 1 if config.workers else 0)
    identity = {
        "config": {name: value for name, value in mapping.items() if name not in NOT_IDENTITY},
        "policies": {
            name: asdict(replace(find_policy(config, name), paper="", regime="any"))
            for name in config.policies
        },
        "models": {str(seed): fingerprint(suite.load_model(seed))["sha256"] for seed in config.seeds},
        "gates": {str(s): gates_identity(config.gates_of(s)) for s in config.seeds}
        if needs_gates(config)
        else {},
        "python": machine["python"],  # the reference suite's text is the standard library's
    }
    return {
        "run": config.run,
        "config": mapping,
        "identity": identity,
        "code": code_state(Path(__file__).parent),
        "environment": machine,
        "samples": {"units": len(plan(config, suite)), "items_per_task_and_seed": config.items_per_task},
        "started": now(),
    }


def compare(config: CompareConfig, suite: Suite) -> tuple[Path, list[Claim]]:
    """Run a comparison to its end, and report it.

    Returns:
        Path of the report, and the claims that were checked.

    Raises:
        ValueError: If the config is wrong, or the run's folder holds the rows of another configuration.
    """
    check(config, suite)
    manifest = open_run(config.folder, describe_run(config, suite), rows_per_unit(config, suite))
    if run_all(config, suite) or "finished" not in manifest:
        manifest |= {"finished": now()}
        write_json(config.folder / MANIFEST, manifest)
    return write_report(config.folder, manifest, suite.tasks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run, and say where the report is."""
    parser = argparse.ArgumentParser(
        description="Compare KV-cache eviction policies at equal achieved memory.",
        epilog="Keys: " + ", ".join(field.name for field in fields(CompareConfig)),
    )
    parser.add_argument("--config", required=True, help="YAML, e.g. configs/compare/reference.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config")
    given = parser.parse_args(arguments)
    try:
        config = load(given.config, CompareConfig, given.overrides)
        report, claims = compare(config, load_suite(config.suite))
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n" + section(report, "At a glance"))
    print("\nClaims checked")
    for claim in claims:
        print(f"  {claim.outcome}: {claim.text}")
        for number in claim.numbers:
            print(f"      {number}")
    print(f"\nReport: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
