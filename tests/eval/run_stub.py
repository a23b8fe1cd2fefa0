"""Run a comparison of the stub suite as one of the processes of a launch.

accelerate launch ... tests/eval/run_stub.py FOLDER [RANK]    that process dies behind its first unit
"""

import os
import signal
import sys
from pathlib import Path

from retain.eval.compare import compare, describe_run
from retain.eval.config import CompareConfig
from retain.eval.run.evaluated_model import plan
from retain.eval.run.processes import launched
from retain.eval.run.results_store import open_run
from retain.eval.run.runner import run_all
from tests.eval.stub import MORE_STUB, stub_config


def config_of(folder: Path, run: str) -> CompareConfig:
    """Two paths, several questions, a control that is fitted; quick."""
    return stub_config(
        folder,
        **{"run": run, "tasks": ("pair", "turns"), "policies": ("recency", "token_identity")},
        **{"regimes": ("context_only", "decode"), "keep_ratios": (0.45,), "every": 3},
        **{"unit_items": 1, "items_per_task": 3},
    )


def several(folder: Path, doomed: int | None) -> None:
    processes, config = launched(), config_of(folder, "several")
    if doomed is None:
        with processes.until_done():
            compare(config, MORE_STUB, processes)
        return

    def die(_: object) -> None:
        if processes.rank == doomed:
            os.kill(os.getpid(), signal.SIGKILL)

    if processes.first:
        open_run(config.folder, describe_run(config, MORE_STUB), [own.key for own in plan(config, MORE_STUB)])
    processes.wait()
    run_all(config, MORE_STUB, on_unit=die, processes=processes)


if __name__ == "__main__":
    where, *rest = sys.argv[1:]
    several(Path(where), int(rest[0]) if rest else None)
