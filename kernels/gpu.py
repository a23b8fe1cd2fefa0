"""Runs all that needs a GPU, a process a step, each with a time limit: times of decoding, tests, other times.

    python -m retain.kernels.gpu [--out FOLDER] [--minutes N] [--only PATTERN] [--wheels FOLDER]

To be called in the root of a checkout, with the interpreter that is there. `FOLDER/STEP.log` is a step's
output; `FOLDER/summary.md`, written anew after each, has how all ended, and every line that says whether a
figure holds. The same command goes on with the steps that have not passed. `--wheels` names a folder of
wheels which the machine lacks (`make gpu-wheels`): they are unpacked, and nothing is installed.
"""

import argparse
import fnmatch
import json
import os
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from retain.kernels.build import OPS

ROOT = Path(__file__).resolve().parents[1]
LARGE = (
    "-m retain.eval.speed --shape 32,4096,32,8,14336 --tokens 32768 --dtype bfloat16 "
    "--device cuda --rounds 3 --steps 32 --keep-ratio 0.2 --policies snapkv,merge"
)
# Time to the first token, over transformers' own cache, that is allowed (issue 45).
PREFILL = 1.15
# Printed of the machine; without a device an error.
LOOK = """import torch, transformers, triton
print(torch.cuda.get_device_name(), *(one.__version__ for one in (torch, triton, transformers)))"""


def steps(out: Path) -> dict[str, tuple[float, str]]:
    """Seconds that a step may take and its command, by name, in the order in which the first ten minutes tell
    most; a test file a step, since others need other packages."""
    files = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    files = [path for path in files if "\n@pytest.mark.gpu" in (ROOT / path).read_text(encoding="utf-8")]
    files.sort(key=lambda path: "gated" in path.name)  # minutes of compiling
    pytest = "-m pytest --all -q -p no:cacheprovider -W default -m gpu"
    bench = {f"bench-{op}": (300.0, f"-m retain.kernels.bench --device cuda --op {op}") for op in OPS}
    return {
        "bench-decode_step": bench["bench-decode_step"],
        "graphs-32k": (480, f"{LARGE} --compiled --batch 8"),
        "speed-32k": (360, f"{LARGE},criticalkv --output {out}/speed-32k.json"),
        **{f"tests-{path.stem[5:]}": (480.0, f"{pytest} {path}") for path in files},
        **bench,
    }


def variables(out: Path, wheels: Path | None) -> dict[str, str]:
    """The environment of a step: this checkout first on the path, then wheels; kernels compiled, no hub."""
    for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
        zipfile.ZipFile(wheel).extractall(out / "site")
    path = os.pathsep.join([str(ROOT), str(out / "site"), os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | ours


def run(command: Sequence[str], log: Path, limit: float, env: dict[str, str]) -> str:
    """Runs one process to its end or its limit, with all that it started: `passed`, or what went wrong."""
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, process_group=0,
        )  # fmt: skip
        try:
            code = process.wait(timeout=max(limit, 0.1))
        except subprocess.TimeoutExpired:
            return f"ended after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    return f"{f'failed, exit status {code}' if code else 'passed'} ({time.monotonic() - began:.0f} s)"


def summary(about: str, ends: dict[str, str], out: Path) -> str:
    """How steps ended, each with the last line of its output, and the lines of all that say what holds."""
    logs = {name: (out / f"{name}.log").read_text(errors="replace").split("\n") for name in ends}
    rows = [f"| {name} | {end} | {''.join(logs[name][-2:])[-200:]} |" for name, end in ends.items()]
    lines = [line.removeprefix("- ") for log in logs.values() for line in log]
    lines = [line for line in lines if line.startswith(("held: ", "**NOT held**: "))]
    if (record := out / "speed-32k.json").exists():
        for row in json.loads(record.read_text())["rows"]:
            if (ratio := row.get("ttft_over_plain")) and row["policy"] not in ("full", "dense"):
                held = "held" if ratio <= PREFILL else "**NOT held**"
                lines.append(f"{held}: prefill, {row['policy']}: {ratio:.3f}, at most {PREFILL:g}")
    head = ["# What needs a GPU", "", about, "", "| step | how it ended | last line |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows, "", *(f"- {line}" for line in lines), ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a step that was asked for has not passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results/gpu", help="default results/gpu")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="end then, with the step that runs")
    parser.add_argument("--only", default="*", help="a step, or a pattern as bench-*")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that this machine lacks")
    given = parser.parse_args(arguments)
    out, deadline = given.out.resolve(), time.monotonic() + 60 * given.minutes
    plan = steps(out)
    wanted = fnmatch.filter(plan, given.only)
    if not wanted:
        parser.error(f"no step is named {given.only}; there are {', '.join(plan)}")
    out.mkdir(parents=True, exist_ok=True)
    env = variables(out, given.wheels)
    found = run(["-c", LOOK], out / "environment.log", 120, env)
    about = (out / "environment.log").read_text(errors="replace").strip()
    print(about)
    if not found.startswith("passed"):
        return 1
    ends: dict[str, str] = {}
    for name in wanted:
        (limit, command), done, left = plan[name], out / f"{name}.passed", deadline - time.monotonic()
        if done.exists():
            ends[name] = done.read_text()
        elif left > 0:
            ends[name] = run(shlex.split(command), out / f"{name}.log", min(limit, left), env)
            print(f"{name}: {ends[name]}", flush=True)
            if ends[name].startswith("passed"):
                done.write_text(ends[name])
        (out / "summary.md").write_text(summary(about, ends, out), encoding="utf-8")
    return int(len(ends) < len(wanted) or not all(end.startswith("passed") for end in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
