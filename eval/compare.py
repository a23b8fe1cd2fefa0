"""The entry: compares eviction policies at equal achieved memory.

    retain compare MODEL --policies snapkv,learned --tasks facts --keep-ratios 0.1,0.2
    python eval/compare.py --config configs/compare/reference.yaml [key=value ...]
    accelerate launch --num_processes 8 eval/compare.py --config FILE device=cuda [key=value ...]

A run's folder `results/<run>/` holds `results.jsonl` (a line an answer), `manifest.json` and the report. A
run that was stopped goes on when the same command is given again; more policies, budgets, tasks and items are
added to it. Everything that can be wrong is found before anything is measured, and one run at a time is in a
folder.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

import retain
from retain.config import to_mapping
from retain.eval.config import (
    CompareConfig,
    all_candidates,
    compare_parser,
    config_of,
    gates_identity,
    policy_settings,
)
from retain.eval.report.render import write_report
from retain.eval.run.checks import load_checked, refuse_stated
from retain.eval.run.measure import measure
from retain.eval.run.plan import Context, Loaded, Unit, task_settings, units_of
from retain.eval.run.table import LOCK, append_lines, digest, finish_run, open_run, read_table
from retain.hf.model.identity import fingerprint, identity_of
from retain.models.named import commit_of
from retain.process.command import command
from retain.process.disk import disk_errors
from retain.process.extras import require
from retain.process.lock import lock_folder
from retain.process.provenance import code_state, environment, now

# As a script this file has another name.
MODULE = "retain.eval.compare"


# A process without a launcher, in the terms of `accelerate.PartialState`.
ALONE = SimpleNamespace(
    process_index=0, num_processes=1, local_process_index=0, wait_for_everyone=lambda: None
)


@contextmanager
def launched() -> Iterator[Any]:
    """Processes of this launch, as `accelerate.PartialState` has them: they share out units and never
    tensors, so they wait over the CPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    from accelerate import PartialState

    state = PartialState(cpu=True, timeout=timedelta(days=30))
    try:
        yield state
    finally:
        # https://github.com/pytorch/pytorch/pull/179291: the interpreter's end may abort a process.
        state.destroy_process_group()


def identity_of_run(config: CompareConfig, loaded: Loaded) -> dict[str, Any]:
    """Settings and weights that decide a value of the table, apart from the rows; never their places."""
    model = loaded.model
    return {
        "retain": retain.__version__,
        "model": {
            "fingerprint": fingerprint(model)["sha256"],
            "weights": digest(identity_of(model, head=True)),
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": getattr(model.config, "_attn_implementation", None),
            "device": loaded.device.type,
        },
        "settings": {
            name: getattr(config, name) for name in ("every", "chunk_tokens", "context_tokens", "chat")
        },
        "policies": {
            one.label: {
                "policy": policy_settings(loaded.policies[one]),
                "gates": gates_identity(loaded.gates_of(one)),
            }
            for one in all_candidates(config)
        },
    }


def manifest_of(
    config: CompareConfig, loaded: Loaded, contexts: dict[str, list[Context]], typed: str
) -> dict[str, Any]:
    """The manifest of a run. `identity` decides their values; `rows` are the items of each task and
    seed that this config asks for."""
    tasks = {task: {"settings": task_settings(config, task)} for task in contexts}
    machine = environment(loaded.device.type, 0)
    rows: dict[str, dict[str, list[int]]] = {}
    for row in (row for of_task in contexts.values() for context in of_task for row in context.rows):
        rows.setdefault(row.task, {}).setdefault(str(row.seed), []).append(row.item)
    return {
        "run": config.run,
        "command": typed or f"retain compare {config.model} run={config.run}",
        "model": config.model,
        "model_commit": commit_of(loaded.model),
        "config": to_mapping(config),
        "identity": identity_of_run(config, loaded) | {"tasks": tasks},
        "gates": {place: str(gates.metadata.get("sha256"))[:12] for place, gates in loaded.gates.items()},
        "rows": rows,
        "code": code_state(Path(__file__).parent),
        "versions": machine.pop("versions"),
        "machine": machine,
        "started": now(),
    }


def compare(config: CompareConfig, processes: Any = ALONE, *, typed: str = "") -> Any:
    """Runs a comparison to its end, and reports it; None in processes after the first. `typed` is the command
    for the manifest.

    Raises:
        ValueError: The config is wrong, another run holds the folder, or it holds lines of another identity.
    """
    require("eval", "matplotlib", "scipy", what="a comparison")  # the report needs them, hours later
    loaded, contexts = load_checked(config, processes.local_process_index)
    manifest = manifest_of(config, loaded, contexts, typed)
    rows = [context for of_task in contexts.values() for context in of_task]
    units = [*units_of(config, rows, manifest["identity"])]
    if processes.process_index > 0:
        processes.wait_for_everyone()
        measure_all(config, loaded, units, processes)
        return None
    with lock_folder(config.folder, otherwise="another name (run=...)"):
        expected = {key: value for unit in units for key, value in unit.identities.items()}
        complete = open_run(config.folder, manifest, expected)
        processes.wait_for_everyone()
        measure_all(config, loaded, units, processes)
        (config.folder / LOCK).unlink(missing_ok=True)
        if not complete:
            finish_run(config.folder, finished=now(), processes=processes.num_processes)
        return write_report(config.folder)


def measure_all(config: CompareConfig, loaded: Loaded, units: Sequence[Unit], processes: Any) -> None:
    """Measures this process's share of the units that are not complete, and appends their lines."""
    done = read_table(config.folder)
    processes.wait_for_everyone()  # nobody writes before all have read
    left = [unit for unit in units if not unit.identities.keys() <= done.keys()]
    mine = left[processes.process_index :: processes.num_processes]
    with tqdm(mine, config.run, unit="unit", smoothing=0.05, disable=processes.process_index > 0) as bar:
        for unit in bar:
            bar.set_postfix_str(unit.name, refresh=False)
            try:
                lines = measure(config, loaded, unit, done.keys())
            # Nothing of the unit is written then: a crash is neither an answer nor a score.
            except (torch.OutOfMemoryError, MemoryError) as error:
                raise ValueError(
                    f"out of memory in {unit.name}: lower max_sequences, and start the run again, which goes "
                    f"on here ({str(error).partition('.')[0]})."
                ) from error
            except ValueError as error:
                raise ValueError(f"in {unit.name}: {error}") from error
            append_lines(config.folder, lines)
    processes.wait_for_everyone()


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and prints the answer."""
    typed = [*(sys.argv[1:] if arguments is None else arguments)]
    config = config_of(compare_parser().parse_intermixed_args(typed), refuse_stated)
    goes_on = "Lines that are written stay: the same command goes on where it was."
    with launched() as processes, disk_errors(config.folder, key="results", goes_on=lambda: goes_on):
        report = compare(config, processes, typed=shlex.join(["python", "-m", MODULE, *typed]))
    if report is not None:
        print(f"\n{report.answer}\n\nReport: {config.folder / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
