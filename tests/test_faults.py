"""Tests the measurement of faults: draws, what each tier catches on a toy tree, the table."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests import faults
from tests.faults import (
    Copy,
    Fault,
    code_lines,
    draw,
    make_table,
    marked,
    meaning,
    rooms,
    run_faults,
    shares,
)
from tests.refused import refused

ROOT = Path(__file__).resolve().parents[1]
TOY = {
    "pyproject.toml": """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "retain"
version = "0"
[tool.setuptools]
packages = ["retain", "retain.eval"]
[tool.setuptools.package-dir]
"retain" = "retain"
"retain.eval" = "eval"
[tool.pytest.ini_options]
pythonpath = ["."]
""",
    ".gitignore": ".venv/\n*.egg-info/\n",
    "retain/__init__.py": '''"""Adds 1 and 2."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    LIMIT: int = 1 + 2
def add(left: "int | None", right: int = 2 - 1) -> int:
    """Return left + right."""
    # 1 + 1
    return left + right
def wait(left: int) -> int:
    while left > 0:
        left = left - 1
    return left
if __name__ == "__main__":
    print(1 + 1)
''',
    "eval/__init__.py": """def double(value):
    return value * 2
def halve(value):
    return value // 2
def thrice(value):
    return value * 3
""",
    "tests/conftest.py": """def pytest_addoption(parser):
    parser.addoption("--all", action="store_true")
""",
    "tests/eval/test_eval.py": """import pytest
from retain.eval import double, halve
def test_double():
    assert double(3) == 6
def test_halve(request):
    if not request.config.option.all:
        pytest.skip("whole tier")
    assert halve(6) == 3
""",
    "tests/test_other.py": """from retain import add, wait
def test_add():
    assert add(2) == 3
def test_wait():
    assert wait(2) == 0
""",
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    root = tmp_path_factory.mktemp("toy")
    for name, text in TOY.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    user = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "-A"), (*user, "commit", "-qm", "toy")):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def fault(root, file, before, after):
    lines = (root / file).read_text().split("\n")
    (at,) = [n for n, line in enumerate(lines) if line.strip() == before]
    room = {"retain": "retain", "eval": "retain.eval"}[Path(file).parts[0]]
    return Fault(room, file, at + 1, "core/Toy", lines[at], lines[at].replace(before, after))


def test_draws_are_reproducible_stratified_and_of_lines_that_are_run(toy):
    assert faults.SEED == 44
    assert draw(toy, count=4) == draw(toy, count=4) != draw(toy, count=4, seed=1)
    for seed in range(6):
        drawn = draw(toy, count=4, seed=seed)
        assert {found.room for found in drawn} == {"retain", "retain.eval"} and len(drawn) == 4
        for found in drawn:
            text = (toy / found.file).read_text()
            assert found.line in code_lines(text)
            assert meaning(found.in_text(text)) != meaning(text)
    text = TOY["retain/__init__.py"].split("\n")
    assert [
        text[n - 1] for n in code_lines("\n".join(text)) if "1 + " in text[n - 1] or '"""' in text[n - 1]
    ] == []
    assert len(rooms(ROOT)) <= faults.COUNT


def test_shares_are_proportional_and_at_least_one():
    assert shares({"a": 700, "b": 290, "c": 10}, 40) == {"a": 27, "b": 12, "c": 1}
    assert sum(shares({str(n): n + 1 for n in range(30)}, 40).values()) == 40
    refused("3 rooms cannot each get one of 2", shares, {"a": 1, "b": 1, "c": 1}, 2)


@pytest.mark.slow
def test_each_tier_catches_its_faults_and_a_second_start_goes_on(toy, tmp_path, monkeypatch):
    drawn = [
        fault(toy, "retain/__init__.py", "return left + right", "return left - right"),
        fault(toy, "retain/__init__.py", "left = left - 1", "left = left - 0"),
        fault(toy, "eval/__init__.py", "return value * 2", "return value * 3"),  # as many bytes
        fault(toy, "eval/__init__.py", "return value // 2", "return value // 1"),
        fault(toy, "eval/__init__.py", "return value * 3", "return value * 4"),
    ]
    results, pytest_ = tmp_path / "results.jsonl", ("-m", "pytest", "-x", "-rfE", "-p", "no:hypothesispytest")
    run_faults(toy, drawn[:2], results, pytest_, limit=20)
    run_faults(toy, drawn, results, pytest_, limit=20)
    lines = results.read_text().splitlines()
    run_faults(toy, drawn, results, pytest_, limit=20)
    assert results.read_text().splitlines() == lines
    rows = [faults.json.loads(line) for line in lines]
    assert [(row["tier"], row["caught"]) for row in rows] == [
        ("default", "tests/test_other.py::test_add"),
        ("default", "stopped after 20 s"),
        ("default", "tests/eval/test_eval.py::test_double"),
        ("default", None),
        ("default", None),
        ("whole", "tests/eval/test_eval.py::test_halve"),
        ("whole", None),
    ]
    monkeypatch.setattr(faults, "EQUIVALENT", {drawn[4].id: "Nothing calls it."})
    table = make_table(drawn, rows)
    assert "The default tier catches 3 of 5; 36 of 40" in table and "survives | Nothing calls it. |" in table
    monkeypatch.setattr(faults, "EQUIVALENT", {drawn[3].id: "Never."})
    refused("called equivalent", make_table, drawn, rows)


def test_tests_that_run_a_function_are_found(toy, tmp_path):
    drawn = [
        fault(toy, "eval/__init__.py", "return value * 2", "return value * 3"),
        fault(toy, "eval/__init__.py", "return value * 3", "return value * 4"),
        replace(fault(toy, "eval/__init__.py", "return value // 2", "return value // 1"), line=3),
    ]
    found = Copy(toy, tmp_path).reached(drawn, ("-m", "pytest", "-x", "-p", "no:hypothesispytest"))
    assert found == {drawn[0].id: ["tests/eval/test_eval.py::test_double"], drawn[1].id: []}
    source = """def outer(given):
    \"\"\"Words.\"\"\"
    @given
    def inner():
        return 1
    return inner
@triton.jit
def kernel():
    x = 1
"""
    inner, end, compiled = (replace(drawn[0], line=line) for line in (5, 6, 9))
    text, names = marked(source, [inner, end, compiled])
    assert names == {inner.id, end.id}
    lines = text.split("\n")
    assert lines[2] == f"    import fault_marks; fault_marks.mark({end.id!r})"
    assert lines[5] == f"        import fault_marks; fault_marks.mark({inner.id!r})"


def test_the_makefile_runs_the_default_tier():
    asked = " ".join(faults.PYTEST[:-2]).replace("-n 2", "-n $(WORKERS)")
    assert f"PYTEST = $(BIN)/python {asked}\n" in (ROOT / "Makefile").read_text()
