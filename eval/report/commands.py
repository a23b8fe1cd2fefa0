"""Commands that a report names: what made the rows, and what would make the parts that are missing."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retain.eval.config import OWN_GATES, RESOLVED
from retain.eval.stats.summary import heuristics, with_gates


def run_command(manifest: Mapping[str, Any]) -> str:
    """The line that made the rows: as it was typed, or as it would be."""
    run = manifest["config"]["run"]
    return str(manifest.get("command") or f"python eval/compare.py --config configs/compare/{run}.yaml")


def commands(folder: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Commands that make what other files hold, for this run's own model, policies and a middle budget.

    Args:
        folder: Where the rows lie now.
        manifest: Of the run.
    """
    config = manifest["config"]
    where = f"{config.get('results', 'results')}/{config['run']}"
    out, seed = shlex.quote(where), config["seeds"][0]
    model = str(config.get("model") or "reference:{seed}").replace("{seed}", str(seed))
    variants, asked = config.get("variants", {}), config.get("policies", ())
    policies = [name for name in asked if name not in (*variants, "token_identity")]
    # Where there are only variants, as in a study without references: the first, which is its winner.
    some = policies or [name for name in asked if name in variants][:1]
    ratios = list(config.get("keep_ratios") or (0.2,))
    # The resolved config that the run left: what was typed may be the config of a study, or of nothing. Runs
    # of earlier versions left none.
    arguments = run_command(manifest).partition("--config")[2].strip()
    arguments = arguments or f"configs/compare/{config['run']}.yaml"
    if (folder / RESOLVED).is_file():
        arguments = shlex.quote(f"{where}/{RESOLVED}")
    alone = [name for name in policies if name in heuristics()]
    timed = f" --policies {','.join(alone)}" if alone else ""
    return {
        "report": f"python -m retain.eval.report.render {out}",
        "diagnostics": f"python -m retain.eval.diagnose --model {shlex.quote(model)} --policies "
        f"{shlex.join(','.join(variants.get(name, (name,))) for name in some)} "
        f"--keep-ratio {ratios[len(ratios) // 2]:g}{_gates(config, some)} --out {out}",
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
