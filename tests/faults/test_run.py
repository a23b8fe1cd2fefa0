"""Tests runs on a toy tree: what catches a fault, what survives, resuming, and which file is imported."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.faults.checkout import Finished, make_checkout
from tests.faults.run import caught_by, mirrored, read_results, run_faults, tree_of
from tests.faults.tiers import TIERS as OWN_TIERS
from tests.faults.toy import TIERS, make_toy, toy_fault

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_each_tier_catches_what_it_can_and_a_second_start_goes_on(tmp_path: Path) -> None:
    root, out = make_toy(tmp_path / "toy"), tmp_path / "out"
    before = {path: path.read_bytes() for path in root.rglob("*.py")}
    faults = [
        toy_fault(root, "retain", "return left + right", "return left - right"),
        toy_fault(root, "retain", "left = left - 1", "left = left - 0"),
        toy_fault(root, "retain.eval", "return value * 2", "return value * 3"),  # as many bytes
        toy_fault(root, "retain.eval", "return value // 2", "return value // 1"),
        toy_fault(root, "retain.eval", "return value * 3", "return value * 4"),
    ]
    assert len(run_faults(root, faults[:2], out, TIERS, limit=8)) == 2
    with (out / "results.jsonl").open("a") as file:
        file.write('{"id": "cut o')  # as a kill leaves it
    found = {row["id"]: row for row in run_faults(root, faults, out, TIERS, limit=8)}
    caught = {key: (row["default"]["caught"], row["whole"]) for key, row in found.items()}
    assert caught["return left - right"] == (
        {"how": "test", "test": "tests/test_other.py::test_add", "scope": "mirrored"},
        None,
    )
    assert caught["left = left - 0"][0] == {
        "how": "timeout",
        "test": "stopped after 8 s",
        "scope": "mirrored",
    }
    assert caught["return value * 3"][0]["test"] == "tests/eval/test_eval.py::test_double"
    assert caught["return value // 1"][0] is None
    assert caught["return value // 1"][1]["caught"]["test"] == "tests/eval/test_eval.py::test_halve"
    assert caught["return value * 4"][0] is None
    assert caught["return value * 4"][1]["caught"] is None

    lines = (out / "results.jsonl").read_text().splitlines()
    assert len(lines) == 5 + 1 + 2  # five faults, the line that was cut off, two survivors
    run_faults(root, faults, out, TIERS, limit=8)
    assert (out / "results.jsonl").read_text().splitlines() == lines
    assert len(read_results(out / "results.jsonl")) == 5
    assert json.loads((out / "baselines.json").read_text()).keys() == {tree_of(root)}
    assert {path: path.read_bytes() for path in root.rglob("*.py")} == before


def test_a_copy_runs_the_written_line_and_refuses_foreign_modules(tmp_path: Path) -> None:
    root = make_toy(tmp_path / "toy")
    fault = toy_fault(root, "retain.eval", "return value * 2", "return value * 3")
    checkout = make_checkout(root, tmp_path / "copy")
    path = checkout.folder / fault.file
    show = ("python", "-c", "from retain.eval import double; print(double(5))")
    assert checkout.run(show, 60, cwd=tmp_path).output == "10\n"  # and its bytecode is cached
    old = path.stat()
    checkout.apply(fault)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert path.stat().st_size == old.st_size
    assert checkout.run(show, 60, cwd=tmp_path).output == "15\n"
    with pytest.raises(ValueError, match="draw again for this tree"):
        checkout.apply(fault)
    checkout.restore(fault)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert checkout.run(show, 60, cwd=tmp_path).output == "10\n"

    checkout.check_imports([fault])
    (finder,) = checkout.python.parents[1].rglob("__editable__*finder.py")
    finder.write_text(finder.read_text().replace(str(checkout.folder), str(root)))
    with pytest.raises(RuntimeError, match=r"retain\.eval is imported from .*toy/eval/__init__.py, not from"):
        checkout.check_imports([fault])


def test_a_run_that_says_nothing_is_refused() -> None:
    summary = "== short test summary info ==\nFAILED tests/test_a.py::test_b[x - y] - assert 1 == 2\n1 failed"
    assert caught_by(Finished(0, 1.0, ""), 9) is None
    assert caught_by(Finished(None, 9.0, summary), 9) == {"how": "timeout", "test": "stopped after 9 s"}
    found = caught_by(Finished(1, 1.0, summary), 9)
    assert found is not None and found["test"].startswith("tests/test_a.py::test_b[x")
    found = caught_by(Finished(2, 1.0, "ERROR tests/test_a.py - ImportError: no\n"), 9)
    assert found == {"how": "test", "test": "tests/test_a.py"}
    found = caught_by(Finished(4, 1.0, "ImportError while loading conftest\n"), 9)
    assert found is not None and found["how"] == "start"
    for status in (1, 5, -9):
        with pytest.raises(RuntimeError, match="without a failed test"):
            caught_by(Finished(status, 1.0, "out of memory"), 9)


def test_mirrored_tests_are_the_nearest(tmp_path: Path) -> None:
    for name in ("test_policy", "test_other", "hf/test_cache", "eval/test_ruler", "eval/stats/test_mean"):
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert mirrored(tmp_path, "retain/policy.py") == ["tests/test_policy.py"]
    assert mirrored(tmp_path, "retain/cascade.py") == ["tests/test_other.py", "tests/test_policy.py"]
    assert mirrored(tmp_path, "retain/hf/cache/state.py") == ["tests/hf"]
    assert mirrored(tmp_path, "retain/hf/cache/__init__.py") == ["tests/hf/test_cache.py"]
    assert mirrored(tmp_path, "eval/tasks/ruler.py") == ["tests/eval/test_ruler.py"]
    assert mirrored(tmp_path, "eval/stats/bootstrap.py") == ["tests/eval/stats"]


def test_the_makefile_runs_the_default_tier() -> None:
    recipe = re.sub(r"\$\(WORKERS\)", "2", (ROOT / "Makefile").read_text())
    _, *arguments = OWN_TIERS["default"]
    assert re.search(rf"^PYTEST := .*/python {re.escape(' '.join(arguments))}$", recipe, flags=re.MULTILINE)
