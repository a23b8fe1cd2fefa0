"""A finished run as reports and pictures read it: manifest, tasks, rows and scores."""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from retain.eval.config import MODEL, OWN_GATES, RESOLVED
from retain.eval.report.sentences import Sentence, sentences
from retain.eval.run.results_store import asked_as, read_manifest, read_references, read_rows
from retain.eval.stats.comparisons import BOUNDS, Judged, judge
from retain.eval.stats.summary import (
    Cell,
    Comparison,
    Scores,
    gather,
    heuristics,
    learned_against_each,
    with_gates,
)
from retain.eval.tasks.suite import Task
from retain.eval.tasks.suites import tasks_of

# More policies than this are drawn, and shown at a glance, as a ranking.
MANY = 12


@dataclass(frozen=True)
class Run:
    """The folder of a run, its manifest, and the suite's tasks; `found`: its rows, where they were read."""

    folder: Path
    manifest: Mapping[str, Any]
    tasks: Mapping[str, Task]
    found: Sequence[Mapping[str, Any]] | None = None

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Read the manifest of `results/<run>`.

        Raises:
            ValueError: The folder holds no run.
        """
        manifest = read_manifest(folder)
        return cls(folder, manifest, tasks_of(manifest))

    @property
    def config(self) -> Mapping[str, Any]:
        """Of the comparison."""
        return self.manifest["config"]

    @property
    def device(self) -> str:
        """The device that it ran on."""
        return str(self.manifest.get("device", self.manifest["environment"]["device"]))

    @property
    def states(self) -> list[Mapping[str, Any]]:
        """States of the code that made its rows: commit, and whether the tree was clean."""
        return self.manifest.get("code_states", [])

    @property
    def options(self) -> dict[str, Any]:
        """Margin and resamples of all comparisons."""
        return {"margin": self.config["margin_points"], "resamples": self.config["resamples"]}

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Its rows; those of earlier runs knew one kind of budget and one kind of score."""
        found = read_rows(self.folder) if self.found is None else self.found
        old = {"budget": "keep_ratio", "score": "exact"}
        return [{**{name: row[of] for name, of in old.items() if name not in row}, **row} for row in found]

    @cached_property
    def cells(self) -> dict[Cell, list[dict[str, Any]]]:
        """Its rows by cell, in order of what was asked."""
        found: dict[Cell, list[dict[str, Any]]] = {}
        for row in sorted(self.rows, key=asked_as):
            found.setdefault(Cell(row["regime"], row["policy"], float(row["budget"])), []).append(row)
        return found

    @cached_property
    def asked(self) -> dict[Any, dict[str, Any]]:
        """References of the questions, by `asked_as`."""
        return {asked_as(one): one for one in read_references(self.folder)}

    @cached_property
    def scores(self) -> Scores:
        """Its scores, aligned."""
        return gather(self.rows, self.tasks)

    @cached_property
    def judged(self) -> list[Judged]:
        """Every policy against the best heuristic."""
        return judge(self.scores, **self.options)

    @cached_property
    def each(self) -> list[Comparison]:
        """Learned policies against each other policy; variants are left out."""
        return learned_against_each(self.scores, **self.options, leave_out=self.variants)

    @cached_property
    def sentences(self) -> list[Sentence]:
        """What each regime came to."""
        return sentences(
            self.scores,
            self.judged,
            self.each,
            variants=self.variants,
            controls=self.controls,
            speed=self.measured("speed"),
        )

    @property
    def drawn(self) -> list[str]:
        """Policies of the first picture: all, or of too many for lines those that the sentences speak of."""
        if len(self.scores.policies) <= MANY:
            return self.scores.policies
        named = {name for one in self.sentences for name in one.names}
        return [name for name in self.scores.policies if name in named or name in BOUNDS][:MANY]

    @property
    def variants(self) -> tuple[str, ...]:
        """Policies that are no presets."""
        return tuple(self.config.get("variants", ()))

    @property
    def controls(self) -> tuple[str, ...]:
        """Policies whose gates are controls: of random weights, or of another layer."""
        sets = self.config.get("gate_sets", {})
        kinds = {name: sets.get(own, {}).get("control") for name, own in self.config.get("uses", {}).items()}
        return tuple(name for name, kind in kinds.items() if kind not in (None, "none"))

    @property
    def command(self) -> str:
        """The line that made the rows: as it was typed, or as it would be."""
        run = self.config["run"]
        typed = self.manifest.get("command")
        return str(typed or f"python eval/compare.py --config configs/compare/{run}.yaml")

    @property
    def commands(self) -> dict[str, str]:
        """Commands that make what other files hold, for this run's model, policies and a middle budget."""
        config = self.config
        where = f"{config.get('results', 'results')}/{config['run']}"
        out, seed = shlex.quote(where), str(config["seeds"][0])
        model = str(config.get("model") or MODEL)
        variants, asked = config.get("variants", {}), config.get("policies", ())
        policies = [name for name in asked if name not in (*variants, "token_identity")]
        # Where there are only variants, as in a study without references: the first, which is its winner.
        some = policies or [name for name in asked if name in variants][:1]
        parts = {name: variants.get(name, (name,)) for name in some}
        needy = [name for name, own in parts.items() if own[0].partition(":")[0] in with_gates()]
        gates = ""
        if needy:  # of the first policy that takes some
            of_set = config.get("gate_sets", {}).get(config.get("uses", {}).get(needy[0], OWN_GATES), {})
            folder = str(of_set.get("folder") or config.get("gates", ""))
            gates = f" --gates {shlex.quote(folder.replace('{seed}', seed))}"
        ratios = list(config.get("keep_ratios") or (0.2,))
        # The resolved config that the run left: what was typed may be the config of a study, or of nothing.
        # Runs of earlier versions left none.
        arguments = self.command.partition("--config")[2].strip() or f"configs/compare/{config['run']}.yaml"
        if (self.folder / RESOLVED).is_file():
            arguments = shlex.quote(f"{where}/{RESOLVED}")
        alone = ",".join(name for name in policies if name in heuristics())
        return {
            "report": f"python -m retain.eval.report.render {out}",
            "diagnostics": f"python -m retain.eval.diagnose --model {shlex.quote(model)} --policies "
            f"{shlex.join(','.join(own) for own in parts.values())} "
            f"--keep-ratio {ratios[len(ratios) // 2]:g}{gates} --out {out}",
            "kept": f"python -m retain.eval.report.kept --config {arguments}",
            "needles": f"python eval/compare.py --config {arguments} suite=text tasks=[niah] "
            f"run={config['run']}-niah",
            "speed": f"python -m retain.eval.speed --model {shlex.quote(model)}"
            f"{f' --policies {alone}' if alone else ''} --output {out}/speed.json",
        }

    @property
    def title(self) -> str:
        """Of the picture of its scores."""
        return f"{self.config['run']}: score at equal memory, mean over tasks"

    def measured(self, name: str) -> dict[str, Any] | None:
        """Content of `<name>.json`, which another command wrote, or None where it is not there.

        Raises:
            ValueError: The file is damaged.
        """
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            made = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(made, dict) or "command" not in made:
                raise ValueError("no command in it")
        except ValueError as error:
            raise ValueError(
                f"{path} cannot be read ({error}). Make it again, or delete it: the page then says that it "
                "is missing."
            ) from error
        return made


def parser_of(description: str) -> argparse.ArgumentParser:
    """A command line that names the folder of a run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="results/<run>")
    return parser
