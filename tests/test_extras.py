"""A missing package is named together with the extra that brings it, and `--help` needs none of them.

The core alone is made by hiding, in a process of its own, every package of this environment that the core's
dependencies do not bring.
"""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# A command a line: its module, and what is typed behind it; run one after the other in one process.
CORE = """
import contextlib, importlib, io, json, sys
hidden, calls = json.loads(sys.argv.pop()), json.loads(sys.argv.pop())

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
said = []
for module, typed in calls:
    out, err, status = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = importlib.import_module(module).main(typed)
        except SystemExit as end:
            status = end.code
        except BaseException as error:
            status = f"{type(error).__name__}: {error}"
    said.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(said))
"""


def core() -> set[str]:
    """Distributions that the core brings."""
    waiting = [Requirement(one).name for one in PROJECT["dependencies"]]
    found: set[str] = set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needed = map(Requirement, metadata.requires(name) or [])
        except metadata.PackageNotFoundError:
            continue
        waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def in_the_core(calls: list[tuple[str, list[str]]]) -> list[tuple[int | str | None, str, str]]:
    """Exit status, stdout and stderr of each call, in a process that sees the core alone."""
    brought = core()
    hidden = [
        name
        for name, owners in metadata.packages_distributions().items()
        if name != "retain" and not any(canonicalize_name(owner) in brought for owner in owners)
    ]
    assert {"datasets", "matplotlib", "scipy"} <= {*hidden}
    command = [sys.executable, "-c", CORE, json.dumps(calls), json.dumps(hidden)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


def commands() -> list[str]:
    """Modules with a command line."""
    homes = {"retain": "retain", "eval": "retain.eval", "train": "retain.train", "kernels": "retain.kernels"}
    found = []
    for folder, package in homes.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if '__name__ == "__main__"' in text and ("ArgumentParser(" in text or "config_parser(" in text):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found.append(".".join((package, *parts)))
    return found


@pytest.mark.always
def test_help_needs_the_core_alone_and_running_names_the_extra(tmp_path: Path) -> None:
    retain = ("compare", "try", "policies", "doctor", "describe", "lm-eval")
    asked = [(module, ["--help"]) for module in commands()]
    asked += [("retain.eval.cli", [name, "--help"]) for name in retain]
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    distill = ["--config", "configs/distill/hub.yaml", "model=reference:0", f"output={tmp_path}/gates"]
    distill += ["data.source=hub", f"data.path={tmp_path}"]
    wanting = {
        "eval": [
            ("retain.eval.cli", ["compare", "--config", "configs/compare/demo.yaml"]),
        ],
        "train": [("retain.train.distill", distill)],
        "lm-eval": [("retain.eval.cli", ["lm-eval", "--", "--tasks", "x"])],
    }
    if "triton" not in core():  # torch for CUDA brings it
        wanting["kernels"] = [("retain.kernels.build", [])]
    running = [(extra, call) for extra, calls in wanting.items() for call in calls]
    said = in_the_core([*asked, *(call for _, call in running)])
    assert len(asked) >= 15
    for call, (status, out, err) in zip(asked, said, strict=False):
        assert status == 0 and "usage:" in out and not err, (call, status, err)
    for (extra, call), (status, _, err) in zip(running, said[len(asked) :], strict=True):
        # distill's error is what it exits with.
        text = str(status) + err
        assert f"pip install 'retain-kv[{extra}]'" in text and text.count("\n") <= 4, (call, status, err)
        assert status not in (0, None) and "Traceback" not in text, (call, status, err)
