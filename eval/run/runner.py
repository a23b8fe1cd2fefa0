"""Runs the units of a comparison that are not done yet, and writes them one by one.

A unit is a few items of one task, for one seed, in all regimes that share a prefill or in one of the others.
Units run in this process, in worker processes, or in those that `accelerate launch` started, each with a
device and a file of its own.

A unit is written whole or not at all, by the process that measured it (or, of workers, by this one), so that
a killed run has lost at most one unit of each process and counts nothing twice. Whatever goes wrong in a unit
stops the run and names the cell: a crash is neither an answer nor a zero.
"""

import concurrent.futures
import multiprocessing
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from retain.eval.config import CompareConfig, fits_table
from retain.eval.run.answers import references_of
from retain.eval.run.cells import run_items
from retain.eval.run.evaluated_model import (
    EvaluatedModel,
    EvaluatedModels,
    Unit,
    load_evaluated,
    naming,
    plan,
)
from retain.eval.run.processes import Processes, end_with
from retain.eval.run.results_store import (
    Asking,
    Reference,
    Row,
    append_unit,
    asked_as,
    finished,
    read_rows,
    take_up,
)
from retain.eval.tasks.suite import Item, Suite


@dataclass(frozen=True)
class Measured:
    """Results of a unit: its rows, and what was asked."""

    rows: list[Row]
    references: list[Reference]


def items_in(config: CompareConfig, suite: Suite, unit: Unit) -> dict[int, Item]:
    """A unit's items, by index."""
    with naming(unit, "making its items"):
        return {
            index: suite.item(unit.task, unit.seed, index, config.context_tokens)
            for index in range(unit.start, unit.stop)
        }


@torch.inference_mode()
def run_unit(
    config: CompareConfig,
    suite: Suite,
    evaluated: EvaluatedModel,
    unit: Unit,
    on_items: Callable[[int, int], object] = lambda done, of: None,
) -> Measured:
    """Measures one unit, `batch_items` of its items at a time; `on_items` hears how many are done, of how
    many."""
    items = items_in(config, suite, unit)
    places, rows = [*items], list[Row]()
    for start in range(0, len(places), config.batch_items):
        on_items(start, len(places))
        batch = {index: items[index] for index in places[start : start + config.batch_items]}
        rows += run_items(config, suite, evaluated, unit, batch)
    order = {regime: place for place, regime in enumerate(unit.regimes(config))}
    rows.sort(key=lambda row: (order[row.regime], row.item, row.question))  # stable: cells stay in order
    return Measured([replace(row, unit_rows=len(rows)) for row in rows], references_of(unit, items))


# What a worker process keeps between units: its config, and the model of the seed that it is at.
_worker: dict[str, Any] = {}

# What they start with. glibc otherwise gives every large buffer back to the system and faults it in again.
_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "TOKENIZERS_PARALLELISM": "false",
}


def _start_worker(config: CompareConfig, suite: Suite, parent: int) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    _worker.update(config=config, suite=suite, models=EvaluatedModels(config, suite))


def _fit_in_worker(seed: int) -> None:
    _worker["models"].of(seed)


def _run_in_worker(unit: Unit) -> Measured:
    return run_unit(_worker["config"], _worker["suite"], _worker["models"].of(unit.seed), unit)


def mend_references(config: CompareConfig, suite: Suite, done: Collection[Unit]) -> None:
    """Writes what finished units asked, where that is not written down any more: a full disk, a torn line."""
    if not done:
        return
    asking, by_key = Asking(config.folder), {unit.key: unit for unit in done}
    torn = {
        row["unit"]: by_key[row["unit"]]
        for row in read_rows(config.folder)
        if row["unit"] in by_key and asked_as(row) not in asking.known
    }
    for unit in torn.values():
        fresh = asking.fresh(unit.key, references_of(unit, items_in(config, suite, unit)))
        append_unit(config.folder, [], fresh)


def run_all(
    config: CompareConfig,
    suite: Suite,
    on_unit: Callable[[Unit], None] | None = None,
    processes: Processes | None = None,
) -> int:
    """Runs what is not yet done, appending each finished unit to `items.jsonl`.

    Args:
        config: Checked before (`retain.eval.run.checks.check`).
        suite: With worker processes, made of functions that they can import.
        on_unit: Called after a unit was written (tests interrupt a run with it).
        processes: Of the launch; each takes its share of the units, and all must call this.

    Returns:
        How many units were run now, by this process.

    Raises:
        ValueError: If an item is not the one whose answers lie in the folder; what a policy refuses; out of
            memory. The unit is named.
    """
    processes = processes or Processes()
    units = plan(config, suite)
    keys = [unit.key for unit in units]
    if processes.first:
        done = take_up(config.folder, keys)
        mend_references(config, suite, [unit for unit in units if unit.key in done])
    processes.wait()
    done = finished(config.folder, keys)
    asking = Asking(config.folder)
    processes.wait()  # nobody writes before all have looked
    left = [unit for unit in units if unit.key not in done]
    seeds = list(dict.fromkeys(unit.seed for unit in left))
    if processes.count > 1 and fits_table(config):
        for seed in seeds[processes.rank :: processes.count]:  # no two processes fit the same tables
            load_evaluated(config, suite, seed, processes.local_rank)
        processes.wait()
    mine = left[processes.rank :: processes.count]
    total = len(mine) if processes.count > 1 else len(units)
    with tqdm(
        total=total,
        initial=total - len(mine),
        unit="unit",
        desc=config.run,
        smoothing=0.05,
        disable=not processes.first,
    ) as bar:
        for unit, made in _results(config, suite, mine, seeds, bar, processes):
            asked = asking.fresh(unit.key, made.references)
            append_unit(config.folder, made.rows, asked, rank=processes.writes_as)
            bar.update(1)
            bar.set_postfix_str(f"seed {unit.seed}, {unit.task}", refresh=False)
            if on_unit is not None:
                on_unit(unit)
    processes.wait()
    if processes.first and processes.count > 1:
        take_up(config.folder, keys)
    return len(mine)


def _results(
    config: CompareConfig,
    suite: Suite,
    left: Sequence[Unit],
    seeds: Sequence[int],
    bar: tqdm,
    processes: Processes,
) -> Iterator[tuple[Unit, Measured]]:
    """Yields units with what they come to, as they are done: of this process, or of workers."""
    if config.workers == 0 or processes.count > 1:
        models = EvaluatedModels(config, suite, processes.local_rank)
        for unit in left:
            if models.held is None or models.held.seed != unit.seed:
                bar.set_postfix_str(f"seed {unit.seed}: loading")

            def say(done: int, of: int, at: str = f"seed {unit.seed}, {unit.task}") -> None:
                bar.set_postfix_str(f"{at}: {done} of {of} items")

            yield unit, run_unit(config, suite, models.of(unit.seed), unit, say)
        return
    # A process that was forked after torch had started its threads may hang; environment variables reach
    # spawned ones.
    for name, value in _WORKER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    pool = concurrent.futures.ProcessPoolExecutor(
        config.workers, multiprocessing.get_context("spawn"), _start_worker, (config, suite, os.getpid())
    )
    try:
        if fits_table(config):  # first, one seed a process, so that no two processes fit the same one
            bar.set_postfix_str("loading models, fitting tables")
            list(pool.map(_fit_in_worker, seeds))
        running = {pool.submit(_run_in_worker, unit): unit for unit in left}
        for future in concurrent.futures.as_completed(running):
            yield running[future], future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
