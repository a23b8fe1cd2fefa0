"""A finished run as reports, pictures, exports and claims read it: manifest, tasks, rows and scores."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from retain.eval.run.results_store import read_manifest, read_rows
from retain.eval.stats.comparisons import Judged, judge
from retain.eval.stats.summary import Claim, Scores, check_claims, gather
from retain.eval.tasks.suite import Task
from retain.eval.tasks.suites import tasks_of


@dataclass(frozen=True)
class Run:
    """The folder of a run, its manifest, and the suite's tasks."""

    folder: Path
    manifest: Mapping[str, Any]
    tasks: Mapping[str, Task]

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
        return [{"budget": row["keep_ratio"], "score": row["exact"], **row} for row in read_rows(self.folder)]

    @cached_property
    def scores(self) -> Scores:
        """Its scores, aligned."""
        return gather(self.rows, self.tasks)

    @cached_property
    def judged(self) -> list[Judged]:
        """Every policy against the best heuristic."""
        return judge(self.scores, **self.options)

    @cached_property
    def claims(self) -> list[Claim]:
        """Claims, and whether they hold."""
        single_key = [task.name for task in self.tasks.values() if task.single_key]
        return check_claims(self.scores, single_key, **self.options, leave_out=self.variants)

    @property
    def variants(self) -> tuple[str, ...]:
        """Policies that are no presets."""
        return tuple(self.config.get("variants", ()))

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
