"""Makes the golden data of this folder, or checks the tree against it.

    python -m tests.golden.make kept|report|manifest|demo|all [--check]

`kept`: entries that policies keep, whenever they evict (`tests.golden.kept`). `report`: the report of the
table in `report/`. `manifest`: commands, YAML keys and public names. `demo`: the sha256 of the gates that
`make gates-seed0` trains; minutes, and compared on the CPU that made it alone.

Golden files change in commits of their own, and CHANGELOG.md says what changed on purpose.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from retain.eval.report.render import write_report
from tests.golden import kept, manifest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
# Table of a run of `report/compare.yaml`, and what is made from it.
REPORT = FOLDER / "report"
ROWS = ("results.jsonl", "manifest.json")
MADE = "report.md"
MANIFEST, DEMO = FOLDER / "manifest.json", FOLDER / "demo.json"
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")


def write_reports(folder: Path) -> Path:
    """Write the report of a copy of the golden table."""
    for name in ROWS:
        shutil.copy(REPORT / name, folder / name)
    return write_report(folder).path


def make_report() -> None:
    """Write the report into the folder of its table."""
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(write_reports(Path(name)), REPORT / MADE)


def check_report() -> list[str]:
    """Lines of the report that differ."""
    with tempfile.TemporaryDirectory() as name:
        found, golden = write_reports(Path(name)).read_text(), (REPORT / MADE).read_text()
    return [f"{MADE}: {text}" for text in differing_lines(found, golden)]


def differing_lines(found: str, golden: str) -> Iterator[str]:
    """Lines that differ, each with whether its numbers do."""
    lines, wanted = found.splitlines(), golden.splitlines()
    if len(lines) != len(wanted):
        yield f"{len(lines)} lines, golden: {len(wanted)}"
    for number, (line, golden) in enumerate(zip(lines, wanted, strict=False), 1):
        if line != golden:
            what = "words" if NUMBER.findall(line) == NUMBER.findall(golden) else "NUMBERS"
            yield f"line {number}, {what}: {line!r}, golden: {golden!r}"


def make_manifest() -> None:
    """Write `manifest.json`."""
    MANIFEST.write_text(json.dumps(manifest.collect(), indent=1) + "\n")


def check_manifest() -> list[str]:
    """Commands, keys and names that are gone, new, or other ones."""
    return list(manifest.differences(manifest.collect(), json.loads(MANIFEST.read_text())))


def cpu() -> dict[str, str]:
    """The parts of a machine on which the rounding of a training depends, as far as they can be told."""
    info = Path("/proc/cpuinfo")
    pairs = [line.partition(":") for line in info.read_text().splitlines()] if info.exists() else []
    found = {name.strip(): value.strip() for name, _, value in pairs}
    names = ("model name", "cpu family", "model", "stepping")
    stated = {name: found.get(name, "unknown") for name in names}
    return {**stated, "capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


def train_demo() -> dict[str, str]:
    """Train as `make gates-seed0` does, and say what came out."""
    with tempfile.TemporaryDirectory() as name:
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
        launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        recipe = ["train/distill.py", "--config", "configs/distill/reference.yaml"]
        recipe += ["model=reference:0", "seed=0", f"output={name}/gates", "overwrite=true"]
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        subprocess.run([*launch, *recipe], cwd=ROOT, env=os.environ | threads, check=True)
        gates = Path(name) / "gates"
        about = json.loads((gates / "gates.json").read_text())["calibration"]
        return {
            "gates.safetensors": hashlib.sha256((gates / "gates.safetensors").read_bytes()).hexdigest(),
            "calibration": hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest(),
        }


def make_demo() -> None:
    """Write `demo.json`."""
    DEMO.write_text(json.dumps({"cpu": cpu(), "sha256": train_demo()}, indent=2) + "\n")


def check_demo() -> list[str]:
    """Differences in the gates of seed 0; on another CPU nothing is compared, and that is said."""
    golden = json.loads(DEMO.read_text())
    if cpu() != golden["cpu"]:
        print(f"demo: NOT compared: made on {golden['cpu']}, this is {cpu()}; rounding differs between them")
        return []
    found = train_demo()
    return [
        f"{name}: {found[name]}, golden: {digest}"
        for name, digest in golden["sha256"].items()
        if found[name] != digest
    ]


PARTS: dict[str, tuple[Callable[[], None], Callable[[], list[str]]]] = {
    "kept": (kept.make, lambda: kept.check(list(kept.cells()))),
    "report": (make_report, check_report),
    "manifest": (make_manifest, check_manifest),
    "demo": (make_demo, check_demo),
}


def main() -> int:
    """Make or check parts; the exit status is 1 where something differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.make", description="Make or check golden data."
    )
    parser.add_argument(
        "parts", nargs="+", choices=[*PARTS, "all"], metavar="PART", help=f"{', '.join(PARTS)}, all"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; say what differs")
    given = parser.parse_args()
    differs = False
    for name in PARTS if "all" in given.parts else given.parts:
        make, check = PARTS[name]
        started = time.perf_counter()
        wrong = check() if given.check else make() or []
        took = f"{time.perf_counter() - started:.0f} s"
        print(
            "\n".join([*wrong, f"{name}: {f'{len(wrong)} differences' if given.check else 'made'}, {took}"])
        )
        differs |= bool(wrong)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
