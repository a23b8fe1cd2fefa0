"""Runs the default tier of tests in one environment a set of versions, and writes docs/versions.md.

    python -m tests.matrix [NAME ...]      install what is missing, run, record (`make matrix`)
    python -m tests.matrix --table         only rewrite the table from the records

An environment is made once, in `.venv-matrix/NAME`. Its record in `tests/matrix.json` holds versions, counts
and the tests that failed, and pytest's output is in `results/matrix/NAME.log`. Without names, environments
are left out that passed on this commit.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.requirements import Requirement

from retain.process.provenance import code_state, now, write_json, write_text

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS, OUTPUT = ROOT / ".venv-matrix", ROOT / "results" / "matrix"
RECORDS, PAGE = ROOT / "tests" / "matrix.json", ROOT / "docs" / "versions.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("train", "deepspeed", "eval", "lm-eval", "chinese", "kernels", "dev")
SHOWN = ("torch", "transformers", "huggingface_hub", "numpy", "triton", "datasets", "accelerate", "peft")


@dataclass(frozen=True)
class Versions:
    """Versions to test.

    Attributes:
        python: of the interpreter.
        torch: its version; installed first, so that nothing replaces the build.
        pins: other versions; in place of those in constraints.txt.
        newest: leave all other versions to pip, which takes the newest that the ranges allow.
    """

    python: str = "3.11"
    torch: str = "2.13.0"
    pins: Mapping[str, str] = field(default_factory=dict)
    newest: bool = False


def lower_ends(*names: str) -> dict[str, str]:
    """The lowest version that pyproject.toml allows of these dependencies, or of all but torch and `dev`."""
    groups = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][name] for name in EXTRAS[:-1])]
    required = [Requirement(text) for group in groups for text in group]
    return {
        one.name: spec.version
        for one in required
        for spec in one.specifier
        if spec.operator == ">=" and one.name != "torch" and (not names or one.name in names)
    }


# Ends of the ranges, each alone and all together; the newest; other interpreters; torch and triton of a
# machine with a GPU. Not the product of all.
MATRIX: dict[str, Versions] = {
    "pinned": Versions(),
    "lowest": Versions(pins=lower_ends()),
    "newest": Versions(newest=True),
    # The newest datasets take no old hub. The lowest transformers are the pinned.
    "hub-lowest": Versions(pins=lower_ends("huggingface_hub", "datasets")),
    "numpy-lowest": Versions(pins=lower_ends("numpy")),
    "python-3.12": Versions(python="3.12"),
    "python-3.13": Versions(python="3.13", newest=True),
    "gpu-machine": Versions(
        python="3.12",
        torch="2.11.0",
        pins={"triton": "3.6.0", "numpy": "2.3.5", "setuptools": "81.0.0"},
    ),
}


def constraints(versions: Versions) -> str:
    """A constraint file for pip."""
    pins = {"torch": versions.torch, **versions.pins}
    kept = []
    if not versions.newest:
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        named = {name.replace("-", "_").lower() for name in pins}
        kept = [
            line
            for line in lines
            if line
            and not line.startswith("#")
            and line.partition("==")[0].replace("-", "_").lower() not in named
        ]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in pins.items())]) + "\n"


def interpreter(version: str) -> str | None:
    """An executable of this version of Python; None if there is none here."""
    candidates = [f"python{version}", *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


def install(name: str, versions: Versions) -> Path | None:
    """Makes an environment, if it is not there.

    Returns:
        its interpreter; None where this machine has no such Python.
    """
    folder = ENVIRONMENTS / name
    python, done = folder / "bin" / "python", folder / "installed"
    wanted = constraints(versions)
    if done.is_file() and done.read_text(encoding="utf-8") == wanted:
        return python
    base = interpreter(versions.python)
    if base is None:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([base, "-m", "venv", folder], check=True)
    file = folder / "constraints.txt"
    write_text(file, wanted)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"torch=={versions.torch}"], check=True)
    subprocess.run([*pip, "-c", file, "-e", f".[{','.join(EXTRAS)}]"], check=True, cwd=ROOT)
    shutil.rmtree(ROOT / "retain.egg-info", ignore_errors=True)
    write_text(done, wanted)
    return python


def run(name: str, python: Path, workers: int) -> dict[str, Any]:
    """Runs the default tier, and reads what came out."""
    report = OUTPUT / f"{name}.xml"
    report.unlink(missing_ok=True)
    asked = "import json, sys; from importlib import metadata as m; print(json.dumps({d.metadata['Name']."
    asked += "replace('-', '_').lower(): d.version for d in m.distributions()}))"
    installed = json.loads(subprocess.check_output([python, "-c", asked], text=True))
    # Not the tests of these records: they would fail with the environment before.
    command = [python, "-m", "pytest", "-q", "-n", str(workers), "--dist", "worksteal", "--timeout", "900"]
    command += ["--ignore", "tests/test_matrix.py"]
    with (OUTPUT / f"{name}.log").open("w", encoding="utf-8") as log:
        subprocess.run([*command, "--junitxml", report], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        counts = {key: value + int(suite.attrib[key]) for key, value in counts.items()}
    failed = [
        f"{case.attrib['classname']}::{case.attrib['name']}"
        for case in ElementTree.parse(report).getroot().iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {
        "date": now(),
        "python": subprocess.check_output([python, "-V"], text=True).split()[1],
        "versions": {package: installed.get(package) for package in SHOWN},
        "passed": counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"],
        "skipped": counts["skipped"],
        "failed": sorted(failed),
    }


def state_of_code() -> dict[str, Any]:
    """Commit, and whether the tree is that commit's; records of other environments change nothing."""
    others = [f":!{path.relative_to(ROOT)}" for path in (RECORDS, PAGE)]
    changes = subprocess.check_output(["git", "status", "--porcelain", "--", ".", *others], cwd=ROOT)
    return {"commit": code_state(ROOT)["commit"], "clean": not changes}


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of docs/versions.md."""
    head = ["environment", "Python", *SHOWN, "passed", "failed", "skipped", "date", "commit"]
    rows = [head, ["---"] * len(head)]
    for name, record in records.items():
        versions = [record["versions"][package] or "-" for package in SHOWN]
        counts = [f"{record['passed']:,}", str(len(record["failed"])), str(record["skipped"])]
        rows.append(
            [
                f"`{name}`",
                record["python"],
                *versions,
                *counts,
                record["date"][:10],
                f"`{record['commit'][:7]}`" + ("" if record["clean"] else ", changed"),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def read_records() -> dict[str, Any]:
    """Environment -> its last run, in the order of `MATRIX`."""
    found = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.is_file() else {}
    return {name: found[name] for name in MATRIX if name in found}


def write_page(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Rewrites the table in docs/versions.md."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end -->")
    write_text(PAGE, f"{before}{begin}{table(records)}{end}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the environments that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *MATRIX], metavar="NAME", help=", ".join(MATRIX))
    parser.add_argument("--table", action="store_true", help="only rewrite docs/versions.md")
    parser.add_argument("--install", action="store_true", help="only make the environments")
    parser.add_argument("--workers", type=int, default=int(os.environ.get("WORKERS", "2")))
    options = parser.parse_args(arguments)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    state = state_of_code()
    passed = [
        name for name, own in read_records().items() if state.items() <= own.items() and not own["failed"]
    ]
    for name in [] if options.table else options.names or [name for name in MATRIX if name not in passed]:
        print(f"{name}: {now()}", flush=True)
        python = install(name, MATRIX[name])
        if python is None:
            print(f"{name}: there is no Python {MATRIX[name].python} here", flush=True)
        elif not options.install:
            record = {**state, **run(name, python, options.workers)}
            write_json(RECORDS, {**read_records(), name: record})
            write_page(read_records())
            print(f"{name}: {record['passed']} passed, {len(record['failed'])} failed", flush=True)
    write_page(read_records())
    return int(any(record["failed"] for record in read_records().values()))


if __name__ == "__main__":
    sys.exit(main())
