"""Runs the tiers of tests against each fault, in temporary copies of the tree.

First the default tier, stopped at its first failure, against every fault: the tests that mirror the changed
file, then, if they pass, the tier's own command. Then the whole tier against the survivors only. A run past
its limit counts as caught by timeout: `LIMIT` times what the tier takes without a fault, where it must
pass.

`results.jsonl` holds one line a fault, and a second one of those that the whole tier was asked about; the
last one counts. A run that is started again goes on with what is missing for the tree as it is now.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.checkout import Checkout, Finished, check_line, make_checkout, tracked
from tests.faults.draw import Fault

LIMIT = 3.0
SHORTEST_LIMIT = 120.0
# -rfE: the summary names failed tests and errors, from which `caught_by` reads the test.
_STOP = ("-x", "-rfE")
_ALL_PASSED, _NO_TESTS = 0, 5
_FAILED, _INTERRUPTED = 1, 2
_INTERNAL, _USAGE = 3, 4

Row = dict[str, Any]


def tree_of(root: Path) -> str:
    """Return a digest of every tracked file but this tool's own."""
    digest = hashlib.sha256()
    for name in tracked(root):
        if not name.startswith("tests/faults/"):
            path = root / name
            content = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def mirrored(root: Path, file: str) -> list[str]:
    """Return the tests that mirror a module: its own test file, else the nearest folder's."""
    parts = Path(file).with_suffix("").parts
    stem = parts[-1] if parts[-1] != "__init__" else parts[-2]
    folders = list(parts[1:-1] if parts[0] == "retain" else parts[:-1])
    while True:
        folder = root.joinpath("tests", *folders)
        if (folder / f"test_{stem}.py").is_file():
            return [(folder / f"test_{stem}.py").relative_to(root).as_posix()]
        found = sorted(folder.glob("test_*.py"))
        if found and folders:
            return [folder.relative_to(root).as_posix()]
        if not folders:
            return [path.relative_to(root).as_posix() for path in found]
        folders.pop()


def caught_by(done: Finished, limit: float) -> Row | None:
    """Say what caught a fault: {how: test | timeout | start, test}; None where the tests passed.

    Raises:
        RuntimeError: The command ended in a way that says nothing about the fault.
    """
    if done.status is None:
        return {"how": "timeout", "test": f"stopped after {limit:.0f} s"}
    if done.status == _ALL_PASSED:
        return None
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.output, flags=re.MULTILINE)
    if done.status in (_FAILED, _INTERRUPTED) and named:
        return {"how": "test", "test": named[1]}
    if done.status in (_INTERNAL, _USAGE):
        last = [line for line in done.output.splitlines() if line.strip()][-1:]
        return {"how": "start", "test": f"pytest could not start: {' '.join(last)}"}
    raise RuntimeError(f"exit status {done.status} without a failed test:\n{done.output[-3000:]}")


def read_results(path: Path) -> list[Row]:
    """Return the last line of each fault; a line that was cut off when a run was killed is left out."""
    rows: dict[str, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["id"]] = row
    return list(rows.values())


class _Results:
    """Appends lines to a file from several threads, each line on disk before the next fault begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and (text := path.read_bytes()) and not text.endswith(b"\n"):
            path.write_bytes(text + b"\n")

    def add(self, row: Row) -> None:
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
            tier = "whole" if row["whole"] else "default"
            caught = row[tier]["caught"]
            print(f"{row['id']} {row['file']}:{row['line']} {tier}: {caught or 'survives'}", flush=True)


class _Run:
    """One start of the tool: the copies, the limits of the tiers and the results."""

    def __init__(
        self,
        root: Path,
        faults: list[Fault],
        out: Path,
        tiers: Mapping[str, tuple[str, ...]],
        limit: float | None,
    ) -> None:
        self.root, self.faults, self.tiers, self.limit = root, faults, tiers, limit
        self.tree = tree_of(root)
        self.results = _Results(out / "results.jsonl")
        self.baselines = out / "baselines.json"
        self.base = Path(tempfile.mkdtemp(prefix="faults-"))
        self.checkouts: dict[int, Checkout] = {}
        self.stopped = threading.Event()

    def checkout(self, worker: int) -> Checkout:
        """Return the worker's copy, made at first use, from which every fault's module is imported."""
        if worker not in self.checkouts:
            folder = Path(tempfile.mkdtemp(prefix=f"{worker}-", dir=self.base))
            self.checkouts[worker] = checkout = make_checkout(self.root, folder)
            checkout.check_imports(self.faults)
        return self.checkouts[worker]

    def limit_of(self, tier: str, workers: int) -> float:
        """Return a tier's time limit in seconds, from a run without a fault.

        Raises:
            RuntimeError: A test fails without a fault.
        """
        known = json.loads(self.baselines.read_text()) if self.baselines.is_file() else {}
        seconds = known.get(self.tree, {}).get(tier)
        if seconds is None:
            print(f"{tier} tier without a fault", flush=True)
            done = self.checkout(0).run((*self.tiers[tier], *_STOP), 6 * 3600)
            if done.status != _ALL_PASSED:
                raise RuntimeError(f"the {tier} tier fails without a fault:\n{done.output[-3000:]}")
            self.checkout(0).clean()
            seconds = round(done.seconds, 1)
            self.baselines.write_text(
                json.dumps({self.tree: known.get(self.tree, {}) | {tier: seconds}}) + "\n"
            )
        return self.limit or max(SHORTEST_LIMIT, LIMIT * seconds * workers)

    def ask(self, worker: int, fault: Fault, tier: str, limit: float) -> Row:
        """Run a tier against one fault."""
        scopes = {"mirrored": mirrored(self.root, fault.file)} if tier == "default" else {}
        seconds, caught = 0.0, None
        for scope, tests in (scopes | {"tier": []}).items():
            if scope == "mirrored" and not tests:
                continue
            checkout = self.checkout(worker)
            checkout.apply(fault)
            if self.stopped.is_set():
                raise RuntimeError("stopped")
            done = checkout.run((*self.tiers[tier], *_STOP, *tests), limit)
            seconds += done.seconds
            if done.status is None:  # what it started may still write into this copy
                self.checkouts.pop(worker)
                shutil.rmtree(checkout.folder.parent, ignore_errors=True)
            else:
                checkout.restore(fault)
            if self.stopped.is_set():
                raise RuntimeError("stopped")
            if scope == "mirrored" and done.status == _NO_TESTS:
                continue
            caught = caught_by(done, limit)
            if caught is not None:
                caught["scope"] = scope
                break
        return {"caught": caught, "seconds": round(seconds, 1)}

    def each(
        self, tier: str, waiting: Iterator[Row], lock: threading.Lock, worker: int, limit: float
    ) -> None:
        """Take faults from the common iterator until it is empty."""
        by_id = {fault.id: fault for fault in self.faults}
        while not self.stopped.is_set():
            with lock:
                row = next(waiting, None)
            if row is None:
                return
            self.results.add(row | {tier: self.ask(worker, by_id[row["id"]], tier, limit)})

    def phase(self, tier: str, rows: list[Row], workers: int) -> None:
        """Run one tier against the faults of `rows`, in `workers` copies."""
        if not rows:
            return
        workers = min(workers, len(rows))
        limit, waiting, lock = self.limit_of(tier, workers), iter(rows), threading.Lock()
        with ThreadPoolExecutor(workers) as pool:
            try:
                asked = [pool.submit(self.each, tier, waiting, lock, n, limit) for n in range(workers)]
                done, _ = wait(asked, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """End the running tests."""
        self.stopped.set()
        for checkout in list(self.checkouts.values()):
            checkout.kill()


def run_faults(
    root: Path,
    faults: list[Fault],
    out: Path,
    tiers: Mapping[str, tuple[str, ...]],
    workers: int = 1,
    limit: float | None = None,
    keep_caught: bool = False,
) -> list[Row]:
    """Run the default tier against all faults and the whole tier against those that survive it.

    Args:
        root: The tree; it is copied, never written to.
        faults: As drawn from this tree.
        out: The folder of `results.jsonl`.
        tiers: The commands `default` and `whole`, "python" for the interpreter.
        workers: Copies that run at the same time.
        limit: Seconds of one run; by default `LIMIT` times the tier without a fault.
        keep_caught: Ask again only about faults that no tier caught, where other tests or other code changed.
    """
    for fault in faults:
        check_line(fault, (root / fault.file).read_text(encoding="utf-8"))
    run = _Run(root, faults, out, tiers, limit)
    results = out / "results.jsonl"

    def known() -> list[Row]:
        rows = [row for row in read_results(results) if row["id"] in {fault.id for fault in faults}]
        return [row for row in rows if row["tree"] == run.tree or (keep_caught and row["default"]["caught"])]

    try:
        done = {row["id"] for row in known()}
        rows = [asdict(fault) | {"tree": run.tree, "default": None, "whole": None} for fault in faults]
        run.phase("default", [row for row in rows if row["id"] not in done], workers)
        survivors = [row for row in known() if not row["default"]["caught"] and row["whole"] is None]
        run.phase("whole", survivors, workers)
    finally:
        run.stop()
        shutil.rmtree(run.base, ignore_errors=True)
    return known()
