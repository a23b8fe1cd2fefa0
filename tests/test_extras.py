"""What the core lacks is named together with the extra that brings it, and `--help` needs none of them.

The core alone is made by hiding, in a process of its own, every package of this environment that the core's
dependencies do not bring.
"""

import ast
import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from retain.process.extras import MissingExtra, deferred, require

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# As a package is imported -> as it is installed, where that is another name.
IMPORTED = {"lm_eval": "lm-eval"}

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
    distill += ["data.source=parquet", f"data.path={tmp_path}/d.parquet"]
    wanting = {
        "eval": [
            ("retain.eval.cli", ["compare", "--config", "configs/compare/demo.yaml"]),
            (
                "retain.eval.diagnose",
                ["--model", "reference:0", "--policies", "snapkv", "--keep-ratio", "0.2"],
            ),
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


def named(node: ast.AST) -> tuple[str, set[str]] | None:
    """Extra and packages of a call of `require` or `deferred`."""
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("require", "deferred"):
        return None
    extra, *packages = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
    return extra, {package.partition(".")[0] for package in packages}


def test_each_import_of_an_extra_stands_behind_its_name() -> None:
    """An extra that is named brings the package; and no module imports such a package without naming one."""
    extras = {
        extra: {canonicalize_name(Requirement(one).name) for one in listed}
        for extra, listed in PROJECT["optional-dependencies"].items()
    }
    brought = set().union(*extras.values()) - core()
    # Packages without which their module does something else, and says so.
    otherwise = {("projection", "deepspeed"), ("parallel", "deepspeed")}
    roots = {root for root, own in IMPORTED.items() if own in brought} | {*brought}
    found = 0
    for folder in ("retain", "eval", "train"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if not any(name in text for name in ("require(", "deferred(", *roots)):
                continue
            tree = ast.parse(text)
            calls = [own for node in ast.walk(tree) if (own := named(node)) is not None]
            found += len(calls)
            for extra, packages in calls:
                installed = {canonicalize_name(IMPORTED.get(package, package)) for package in packages}
                assert installed <= extras[extra], (path, extra, packages)
            known = {package for _, packages in calls for package in packages}
            for node in ast.walk(tree):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for root in {name.partition(".")[0] for name in names} - known:
                    if root == "vllm" and path.parent == ROOT / "retain" / "vllm":
                        continue  # which vLLM itself loads
                    if canonicalize_name(IMPORTED.get(root, root)) in brought:
                        assert (path.stem, root) in otherwise, f"{path} imports {root} and names no extra"
    assert found >= 20


def test_what_is_missing_is_a_failed_import_that_a_user_can_mend() -> None:
    message = (
        r"^a page needs the package no_such_package, which is not installed: "
        r"pip install 'retain-kv\[eval\]', or look at report.md\.$"
    )
    with pytest.raises(MissingExtra, match=message) as caught:
        require("eval", "json", "no_such_package", what="a page", otherwise="look at report.md")
    assert isinstance(caught.value, ImportError) and isinstance(caught.value, ValueError)
    with require("eval", "json", what="a page"):
        pass


def test_a_stand_in_says_so_where_it_is_used_and_leaves_nothing_behind() -> None:
    with deferred("train", "absent", "absent.part", "json", what="training"):
        import json as real

        import absent
        from absent import stats
        from absent.part import Thing
    assert real is json and not {"absent", "absent.part"} & {*sys.modules}

    def annotated(thing: Thing | None) -> None: ...

    for use in (lambda: Thing(1), lambda: stats.norm, lambda: absent.run(), lambda: Thing.of(2)):
        with pytest.raises(
            MissingExtra, match=r"^training needs the package absent, .*'retain-kv\[train\]'\.$"
        ):
            use()
