"""Runs what waits for a GPU, a process a step, each with a time limit: tests, the ops' cases, then times.

    python -m retain.kernels.gpu [--out FOLDER] [--minutes N] [--only STEP ...] [--wheels FOLDER] [--list]

To be called in the root of a checkout, with the interpreter that is there. `FOLDER/STEP.log` is a step's
output; `FOLDER/summary.md`, written anew after each, has how all ended. The same command goes on with the
steps that have not passed. `--wheels` names a folder of pure wheels that the machine lacks (`make gpu-wheels`
downloads them): they are unpacked beside the logs, and nothing is installed.
"""

import argparse
import fnmatch
import os
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from retain.kernels.provenance import commit, write

ROOT = Path(__file__).resolve().parents[1]
OPS = ("decode_step", "ragged_attention", "attention_stats", "value_norm", "gated_attention")
LARGE = (
    "{python} -m retain.eval.speed --model random --layers 32 --width 4096 --heads 32 --kv-heads 8 "
    "--intermediate 14336 --dtype bfloat16 --device cuda --gates random --rounds 3 --steps 32"
)
# Name -> seconds that it may take (on an H200 gated attention's cases took 190, most of it to compile), and
# the command; in the order in which the first ten minutes tell most.
STEPS = {
    **{
        f"ops-{op}": (300, f"{{python}} -m retain.kernels.bench --check --device cuda --op {op}")
        for op in OPS[:-1]
    },
    "generate": (300, "{python} -m pytest --all -q -p no:cacheprovider -m gpu tests/hf/test_kernels.py"),
    "speed-32k": (
        360,
        f"{LARGE} --tokens 32768 --policies snapkv,merge --keep-ratio 0.2 --output {{out}}/speed-32k.json",
    ),
    "graphs-32k": (
        480,
        f"{LARGE} --compiled --tokens 32768 --batch 8 --policies snapkv,merge --keep-ratio 0.2",
    ),
    "tests": (600, "{python} -m pytest --all -q -p no:cacheprovider -W default -m gpu {tests}"),
    "ops-gated_attention": (
        480,
        "{python} -m retain.kernels.bench --check --device cuda --op gated_attention",
    ),
    **{
        f"bench-{op}": (
            360,
            f"{{python}} -m retain.kernels.bench --device cuda --op {op} --out {{out}}/bench-{op}.md",
        )
        for op in OPS
    },
    "speed-128k": (
        560,
        f"{LARGE} --tokens 131072 --policies merge --keep-ratio 0.2 --output {{out}}/speed-128k.json",
    ),
}
LOOK = """
import sys, torch, transformers, triton
found = torch.cuda.is_available()
about = torch.cuda.get_device_name() if found else "no CUDA device"
print(f"{about}; python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}, "
      f"transformers {transformers.__version__}")
sys.exit(not found)
"""


def gpu_tests() -> list[str]:
    """The test files that hold tests for a GPU: no other is imported, since others need other packages."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [path for path in files if "\n@pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    return [name for path in marked if (name := str(path.relative_to(ROOT))) != "tests/hf/test_kernels.py"]


def variables(out: Path, wheels: Path | None) -> dict[str, str]:
    """The environment of a step: this checkout first on the path, then wheels; kernels compiled, no hub."""
    parts = [str(ROOT)]
    if wheels is not None:
        for wheel in sorted(wheels.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(out / "site")
        parts.append(str(out / "site"))
    parts += filter(None, [os.environ.get("PYTHONPATH")])
    own = {"PYTHONPATH": os.pathsep.join(parts), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | own


def run(command: Sequence[str], log: Path, limit: float, env: dict[str, str]) -> str:
    """Runs one process to its end or its limit, with all that it started: `passed`, or what went wrong."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            process_group=0,
        )  # fmt: skip
        try:
            code = process.wait(timeout=max(limit, 0.1))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    if code is None:
        return f"ended after {limit:.0f} s"
    return "passed" if code == 0 else f"failed, exit status {code}"


def last_line(log: Path) -> str:
    """Of a step's output; empty where it has none."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return text.strip().rpartition("\n")[2][-200:]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a step that was asked for has not passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results/gpu", help="default results/gpu")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="end then, with the step that runs")
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="STEP", help="names, or patterns as ops-*"
    )
    parser.add_argument("--wheels", type=Path, help="folder of pure wheels that this machine lacks")
    parser.add_argument("--list", action="store_true", help="print the steps and their limits")
    given = parser.parse_args(arguments)
    wanted = [name for name in STEPS if any(fnmatch.fnmatch(name, own) for own in given.only)]
    if not wanted:
        parser.error(f"no step is named {' or '.join(given.only)}; there are {', '.join(STEPS)}")
    if given.list:
        print("\n".join(f"{name:<22}{STEPS[name][0]:>4} s  {STEPS[name][1]}" for name in wanted))
        return 0
    out, deadline = given.out.resolve(), time.monotonic() + 60 * given.minutes
    out.mkdir(parents=True, exist_ok=True)
    env = variables(out, given.wheels)
    found = run([sys.executable, "-c", LOOK], out / "environment.log", 120, env)
    about = (out / "environment.log").read_text(errors="replace").strip()
    print(about)
    if found != "passed":
        print(f"environment: {found}")
        return 1
    ends: dict[str, str] = {}
    for name in wanted:
        limit, text = STEPS[name]
        words = {
            "python": shlex.quote(sys.executable),
            "out": shlex.quote(str(out)),
            "tests": shlex.join(gpu_tests()),
        }
        done, left = out / f"{name}.passed", deadline - time.monotonic()
        if not done.exists() and left > 0:
            began = time.monotonic()
            ends[name] = run(shlex.split(text.format(**words)), out / f"{name}.log", min(limit, left), env)
            took = f"{time.monotonic() - began:.0f} s, {datetime.now(UTC):%Y-%m-%d %H:%M}, {commit()[:7]}"
            if ends[name] == "passed":
                done.write_text(took)
            ends[name] += f" ({took})"
            print(f"{name}: {ends[name]}", flush=True)
        ends.setdefault(name, f"passed ({done.read_text()})" if done.exists() else "not begun: no time left")
        head = ["# What waits for a GPU", "", about, "", "| step | how it ended | last line |"]
        rows = [f"| {own} | {end} | {last_line(out / f'{own}.log')} |" for own, end in ends.items()]
        write(out / "summary.md", "\n".join([*head, "| --- | --- | --- |", *rows, ""]))
    return int(not all(end.startswith("passed") for end in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
