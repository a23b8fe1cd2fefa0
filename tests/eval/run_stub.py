"""Run a comparison of the stub suite in a process of its own, to be killed or launched several times over.

python -m tests.eval.run_stub kill FOLDER SEED    run it in children that are killed, until it is done
accelerate launch ... tests/eval/run_stub.py launched FOLDER [kill RANK]
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from retain.eval.compare import compare
from retain.eval.config import CompareConfig
from retain.eval.run.evaluated_model import plan
from retain.eval.run.processes import launched
from retain.eval.run.results_store import ITEMS, finished
from retain.eval.run.runner import run_all
from tests.eval.stub import MORE_STUB, stub_config


def config_of(folder: Path, run: str) -> CompareConfig:
    """Two paths, several questions, a control that is fitted; quick."""
    return stub_config(
        folder,
        run=run,
        tasks=("pair", "turns"),
        policies=("recency", "token_identity"),
        regimes=("context_only", "decode"),
        keep_ratios=(0.45,),
        every=3,
        unit_items=1,
        items_per_task=3,
    )


def killed(folder: Path, seed: int) -> None:
    """Start the run again and again, and kill it at random moments; say what each attempt left done.

    A moment is so many new bytes of rows and so many milliseconds, so that a fast machine is hit too.
    """
    config, drawn = config_of(folder, "killed"), random.Random(seed)
    items, units = config.folder / ITEMS, len(plan(config, MORE_STUB))
    # A child is forked before this process has run any model, so there are no threads that could be missed.
    for attempt in range(30):
        before = items.stat().st_size if items.exists() else 0
        child = os.fork()
        if child == 0:
            compare(config, MORE_STUB)
            os._exit(0)
        wanted = before + drawn.choice((0, 1, 2000)) if attempt < 6 else None
        while wanted is not None and os.waitpid(child, os.WNOHANG) == (0, 0):
            if wanted == before or (items.exists() and items.stat().st_size >= wanted):
                time.sleep(drawn.uniform(0, 0.15))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.001)
        status = os.waitpid(child, 0)[1] if wanted is None else 1
        done = finished(config.folder, [unit.key for unit in plan(config, MORE_STUB)])
        print(f"{status} {len(done)} of {units}", flush=True)
        if status == 0:
            return
    raise RuntimeError("thirty attempts, and the run is not done")


def several(folder: Path, doomed: int | None) -> None:
    """As one of the processes of a launch; the doomed one dies behind its first unit."""
    processes, config = launched(), config_of(folder, "several")
    if doomed is None:
        with processes.until_done():
            compare(config, MORE_STUB, processes)
        return

    def die(_: object) -> None:
        if processes.rank == doomed:
            os.kill(os.getpid(), signal.SIGKILL)

    from retain.eval.compare import describe_run
    from retain.eval.run.results_store import open_run

    if processes.first:
        open_run(config.folder, describe_run(config, MORE_STUB), [own.key for own in plan(config, MORE_STUB)])
    processes.wait()
    run_all(config, MORE_STUB, on_unit=die, processes=processes)


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    if what == "kill":
        killed(Path(where), int(rest[0]))
    else:
        several(Path(where), int(rest[1]) if rest else None)
