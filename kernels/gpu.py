"""Runs every check that needs a GPU, step by step, and writes a dated record of each.

    python -m retain.kernels.gpu [--out FOLDER] [--minutes N] [--only STEP ...] [--redo STEP ...]
    [--list | --dry-run]

To be called in the root of a checkout, installed or not; the plan is `gpu_plan.py`. Each step is a process
with a time limit. `FOLDER/STEP.json` is its record, `FOLDER/STEP.log` its output, `FOLDER/summary.md` the
whole, written anew after each step, so that the same command goes on with the steps that are not done. Only
the standard library is needed; nothing is installed or downloaded.
"""

import argparse
import contextlib
import fnmatch
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retain.kernels.gpu_plan import GENERATE, STEPS, Step
from retain.kernels.provenance import commit, version, write

ROOT = Path(__file__).resolve().parents[1]
# Packages that every step needs, by import name; and those that are only looked for.
NEEDED = ("torch", "triton", "transformers", "jaxtyping", "yaml", "safetensors", "numpy", "tqdm")
LOOKED_FOR = ("accelerate", "peft", "pytest", "beartype", "hypothesis", "flash_attn", "flashinfer", "kvpress")
DISTRIBUTIONS = {"yaml": "PyYAML", "flash_attn": "flash-attn", "flashinfer": "flashinfer-python"}
# A step with one of these is done; `cut` (the minutes ran out, or the run was stopped) and `skipped` are
# tried again.
DONE = ("passed", "failed", "timeout")
# Seconds between asking a step to end and ending it; last characters of its output that its record holds.
GRACE, TAIL = 5.0, 6000
# Lines of a step's output that say whether something holds, which path ran (a reference that is held against
# itself proves nothing), or what is not there: what the summary shows of it.
VERDICTS = (
    r"\**(?:held|NOT held|not measured|wrong|WRONG|BROKE)\b.*",
    r"\d+ (?:passed|failed|skipped|error).*",
    r"(?:path|paths|not installed).*: .*",
)
VERDICT = re.compile(rf"^(?:- )?({'|'.join(VERDICTS)})$", re.MULTILINE)
# Text that a progress bar has written over.
OVERWRITTEN = re.compile(r"[^\n]*\r(?!\n)")
SANITIZED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def look(record: Path) -> int:
    """Write what is installed and which device torch sees; 1 if anything is missing that all steps need."""
    missing = [name for name in NEEDED if not installed(name)]
    absent = [name for name in LOOKED_FOR if not installed(name)]
    found: dict[str, Any] = {"missing": missing, "absent": absent, "versions": versions(), "device": None}
    why = "torch is not installed"
    if "torch" not in missing:
        import torch

        why = "torch sees no CUDA device"
        if torch.cuda.is_available():
            about = torch.cuda.get_device_properties(0)
            square = torch.randn(1024, 1024, device="cuda")
            assert bool((square @ square).isfinite().all()), "a matrix product on the device is not finite"
            free, whole = torch.cuda.mem_get_info()
            found["device"] = f"{about.name} (sm_{about.major}{about.minor}, {whole / 2**30:.0f} GiB)"
            found["free_gib"], found["cuda"], why = free / 2**30, torch.version.cuda, ""
    found["no_device"] = why
    record.write_text(json.dumps(found, indent=2), encoding="utf-8")
    print(f"python {sys.version.split()[0]}, {found['versions']}\ndevice: {found['device'] or why}")
    print(f"not installed, and not needed by every step: {', '.join(absent) or 'none'}")
    if missing:
        print(
            f"WRONG: every step needs {', '.join(missing)}, and this interpreter ({sys.executable}) has none"
        )
    return 1 if missing else 0


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def versions() -> dict[str, str]:
    """Versions of the installed packages of `NEEDED` and `LOOKED_FOR`."""
    found = {name: version(DISTRIBUTIONS.get(name, name)) for name in (*NEEDED, *LOOKED_FOR)}
    return {name: number for name, number in found.items() if number is not None}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def gpu_tests() -> list[str]:
    """The test files that hold tests for a GPU: no other is imported, since others need other packages."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [path for path in files if "\n@pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    names = [str(path.relative_to(ROOT)) for path in marked]
    return [name for name in names if name not in GENERATE.split()]  # which are a step of their own


def stop(number: int, _: Any) -> None:
    sys.exit(128 + number)


class Run:
    """The steps of one folder.

    Args:
        out: folder of the records.
        dry: whether only what a CPU can do is done.
        deadline: by `time.monotonic()`, after which no step begins and none goes on; None: none.
    """

    def __init__(self, out: Path, *, dry: bool = False, deadline: float | None = None) -> None:
        self.out, self.dry, self.deadline = out.resolve(), dry, deadline
        self.commit, self.versions = commit(), versions()
        self.device: str | None = None
        self.no_device = "the environment was not looked at"
        self.broken = ""

    def command(self, step: Step) -> list[str]:
        """The command of a step, on a GPU or in a dry run."""
        text = step.tiny if self.dry and step.tiny is not None else step.command
        folder = self.out / step.name
        paths = {"python": sys.executable, "folder": folder, "record": folder / "record.json"}
        words = {name: shlex.quote(str(path)) for name, path in paths.items()}
        for name, value in {**words, "gpu_tests": shlex.join(gpu_tests())}.items():
            text = text.replace(f"{{{name}}}", value)
        return shlex.split(text)

    def status(self, step: Step) -> str:
        """Of the record that is there for the same command; empty: there is none, or it is torn."""
        record = read(self.out / f"{step.name}.json")
        same = record.get("command") == shlex.join(self.command(step))
        return str(record["status"]) if same else ""

    def unable(self, step: Step) -> str:
        """Why a step cannot run here; empty: it can."""
        missing = [name for name in step.needs if not installed(name)]
        reasons = {
            self.broken: bool(self.broken),
            "no CUDA device: a dry run uses none": self.dry and step.tiny is None and step.gpu,
            "a dry run leaves out what takes minutes": self.dry and step.tiny is None,
            f"no CUDA device: {self.no_device}": step.gpu and not self.dry and self.device is None,
            f"not installed: {', '.join(missing)}": bool(missing),
            f"not on the path: {step.program}": bool(step.program and not shutil.which(step.program)),
            f"{step.after} has not passed": step.after is not None
            and read(self.out / f"{step.after}.json").get("status") != "passed",
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def look(self) -> None:
        """Run the first step, on which all others depend, and take note of the device."""
        record = self.run(STEPS[0])
        found = record["figures"] or {}
        self.device, self.no_device = found.get("device"), found.get("no_device", record["reason"])
        if record["status"] != "passed":
            self.broken = f"environment: {record['status']}: {record['reason']}"

    def run(self, step: Step) -> dict[str, Any]:
        """Run one step, or say why not, and write its record and the summary."""
        reason = "" if step is STEPS[0] else self.unable(step)
        record: dict[str, Any] = {
            **{"step": step.name, "about": step.about, "status": "skipped", "reason": reason},
            **{"command": shlex.join(self.command(step)), "dry_run": self.dry, "date": now()},
            **{"seconds": 0.0, "limit": step.seconds, "exit": None, "device": self.device},
            **{"python": sys.version.split()[0], "versions": self.versions, "commit": self.commit},
            **{"verdicts": [], "figures": None, "tail": ""},
        }
        if not reason:
            self.write({**record, "status": "cut", "reason": "it was running when the run ended"})
            start = time.monotonic()
            record |= self.start(step)
            record["seconds"] = round(time.monotonic() - start, 1)
            said = (self.out / f"{step.name}.log").read_bytes().decode("utf-8", "replace")
            said = OVERWRITTEN.sub("", said)
            record["tail"], record["verdicts"] = said[-TAIL:], VERDICT.findall(said)
            record["figures"] = read(self.out / step.name / "record.json") or None
            if step is STEPS[0] and record["figures"]:
                record["device"] = record["figures"]["device"] or record["figures"]["no_device"]
        self.write(record)
        self.summarise()
        return record

    def start(self, step: Step) -> dict[str, Any]:
        """Run a step's process to its end or its limit: status, reason, exit status."""
        folder, limit = self.out / step.name, float(step.seconds)
        left = limit if self.deadline is None else self.deadline - time.monotonic()
        short, limit = left < limit, min(limit, left)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "record.json").unlink(missing_ok=True)
        with (self.out / f"{step.name}.log").open("wb") as log:
            try:
                # A group of its own, to end it with all that it started; no session of its own, so that
                # it ends with all of this session's processes.
                process = subprocess.Popen(
                    self.command(step), cwd=ROOT, env=self.variables(step), process_group=0,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                )  # fmt: skip
            except OSError as error:
                return {"status": "failed", "reason": f"it did not start: {error}"}
            try:
                code = process.wait(timeout=max(limit, 0.1))
            except subprocess.TimeoutExpired:
                if short or step.goes_on:
                    return {"status": "cut", "reason": f"ended after {limit:.0f} s; the same command goes on"}
                return {"status": "timeout", "reason": f"it took longer than {limit:.0f} s and was ended"}
            finally:
                end(process)  # and what it has left behind
        if code == 0:
            return {"status": "passed", "exit": 0}
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return {"status": "failed", "exit": code, "reason": how}

    def variables(self, step: Step) -> dict[str, str]:
        """The environment of a step: this checkout first on the path, no network, kernels compiled."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        own["TOKENIZERS_PARALLELISM"] = "false"
        if step.program == "compute-sanitizer":
            own |= SANITIZED
        if self.dry:
            own["CUDA_VISIBLE_DEVICES"] = ""
        return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | own

    def write(self, record: Mapping[str, Any]) -> None:
        text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        write(self.out / f"{record['step']}.json", text)

    def summarise(self) -> None:
        """Write the summary of all steps that have a record, in the order of the plan."""
        found = [(step, record) for step in STEPS if (record := read(self.out / f"{step.name}.json"))]
        write(self.out / "summary.md", summary(found))


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process with its whole group: asked first, then without asking."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE)


def read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def summary(found: Sequence[tuple[Step, Mapping[str, Any]]]) -> str:
    """The Markdown of all records."""
    lines = ["# What waits for a GPU", ""]
    if found:
        first = found[0][1]
        known = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
        lines += [f"- device: {first['device']}", f"- versions: python {first['python']}, {known}"]
        lines += [f"- commit: {first['commit']}", f"- written: {now()}", ""]
    if any(record["dry_run"] for _, record in found):
        lines += ["**Dry run**: tiny sizes on a CPU; what runs, not how fast, and no evidence.", ""]
    lines += [
        "| step | status | s | limit | date | commit | what it tells |",
        "| --- | --- | ---: | ---: | --- | --- | --- |",
    ]
    for step, record in found:
        reason = f": {record['reason']}" if record["reason"] else ""
        lines.append(
            f"| {step.name} | {record['status']}{reason} | {record['seconds']:.0f} | {record['limit']} | "
            f"{record['date']} | {record['commit'][:7]} | {step.about} |"
        )
    for step, record in found:
        if not record["verdicts"] and record["status"] in ("passed", "skipped"):
            continue
        lines += ["", f"## {step.name}: {record['status']}", "", f"`{record['command']}`", ""]
        lines += [f"- {line}" for line in record["verdicts"]]
        if record["status"] not in ("passed", "skipped"):
            last = record["tail"].strip().splitlines()[-15:]
            lines += ["", "```", *(line[:300] for line in last), "```"]
    return "\n".join([*lines, ""])


def chosen(patterns: Sequence[str], what: str) -> list[Step]:
    """The steps that names or patterns (`ops-*`) mean, in the order of the plan.

    Raises:
        ValueError: one of them means none.
    """
    for pattern in patterns:
        if not fnmatch.filter([step.name for step in STEPS], pattern):
            known = ", ".join(step.name for step in STEPS)
            raise ValueError(f"{what} {pattern!r} is no step; there are {known}")
    return [step for step in STEPS if any(fnmatch.fnmatch(step.name, pattern) for pattern in patterns)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if any step that was asked for failed or took too long, now or before."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu", help="default results/gpu")
    parser.add_argument(
        "--minutes", type=float, help="begin no step later than this, and end the one that runs"
    )
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="STEP", help="names, or patterns as ops-*"
    )
    parser.add_argument("--redo", nargs="+", default=[], metavar="STEP", help="these too, done or not")
    parser.add_argument("--list", action="store_true", help="print the plan, and run nothing")
    parser.add_argument("--dry-run", action="store_true", help="what a CPU can do of each step, in seconds")
    parser.add_argument("--look", type=Path, help=argparse.SUPPRESS)  # the first step, in its own process
    options = parser.parse_args(arguments)
    if options.look is not None:
        return look(options.look)
    try:
        wanted, again = chosen(options.only, "--only"), chosen(options.redo, "--redo")
    except ValueError as error:
        parser.error(str(error))
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes is above 0, got {options.minutes}")
    if not (ROOT / "pyproject.toml").is_file():
        parser.error(f"{ROOT} is no checkout: call this in the root of one, which has the tests")
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    run = Run(options.out, dry=options.dry_run, deadline=deadline)
    if options.list:
        with contextlib.suppress(BrokenPipeError):  # `| head`
            for step in STEPS:
                status = run.status(step) or "-"
                print(f"{step.name:<24}{status:<9}{step.seconds:>5} s  {step.about}", flush=True)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    before = {
        number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    try:
        return go(run, wanted, again)
    except SystemExit:
        run.summarise()
        print("stopped: the same command goes on with the steps that are not done", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def go(run: Run, wanted: Sequence[Step], again: Sequence[Step]) -> int:
    """Run the steps that are wanted and not done, and those that are to be repeated."""
    run.look()
    print(f"device: {run.device or run.no_device}; commit {run.commit}")
    if run.broken:
        print(run.broken)
    for step in STEPS[1:]:
        if step not in again and (step not in wanted or run.status(step) in DONE):
            continue
        if run.deadline is not None and time.monotonic() >= run.deadline:
            print("the minutes are over: the same command goes on with the steps that are not done")
            break
        print(f"{step.name}: ", end="", flush=True)
        record = run.run(step)
        why = f": {record['reason']}" if record["reason"] else ""
        print(f"{record['status']}{why} ({record['seconds']:.0f} s)", flush=True)
        for line in record["verdicts"]:
            print(f"  {line}")
    asked = {step.name for step in (STEPS[0], *wanted, *again)}
    status = {step.name: read(run.out / f"{step.name}.json").get("status") for step in STEPS}
    bad = " ".join(name for name in status if name in asked and status[name] in ("failed", "timeout"))
    print(f"summary: {run.out / 'summary.md'}")
    if bad:
        print(f"not passed: {bad} (once mended: --redo {bad})")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
