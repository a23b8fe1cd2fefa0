"""Tests the measurement of faults: draws, what each tier catches on a toy tree, the table."""

import subprocess
from pathlib import Path

import pytest

from tests import faults
from tests.faults import Fault, code_lines, draw, make_table, meaning, rooms, run_faults
from tests.refused import refused

ROOT = Path(__file__).resolve().parents[1]
TOY = {
    "pyproject.toml": """[tool.setuptools]
packages = ["retain", "retain.eval"]
[tool.setuptools.package-dir]
"retain" = "retain"
"retain.eval" = "eval"
[tool.pytest.ini_options]
pythonpath = ["."]
""",
    "retain/__init__.py": '''"""Adds 1 and 2."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    LIMIT: int = 1 + 2
def add(left: "int | None", right: int = 2 - 1) -> int:
    """Return left + right."""
    # 1 + 1
    return left + right
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
    "conftest.py": """def pytest_addoption(parser):
    parser.addoption("--all", action="store_true")
""",
    "test_toy.py": """import pytest
from eval import double, halve
from retain import add
def test_add():
    assert add(2) == 3
def test_double():
    assert double(3) == 6
def test_halve(request):
    if not request.config.option.all:
        pytest.skip("whole tier")
    assert halve(6) == 3
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
    return Fault("room", file, at + 1, "core/Toy", lines[at], lines[at].replace(before, after))


def test_draws_are_reproducible_stratified_and_of_lines_that_are_run(toy):
    assert draw(toy, count=4) == draw(toy, count=4) != draw(toy, count=4, seed=1)
    for seed in range(6):
        drawn = draw(toy, count=4, seed=seed)
        assert {found.room for found in drawn} == {"retain", "retain.eval"} and len(drawn) == 4
        for found in drawn:
            text = (toy / found.file).read_text()
            assert found.line in code_lines(text)
            assert meaning(found.in_text(text)) != meaning(text)
    lines = TOY["retain/__init__.py"].split("\n")
    run = [lines[n - 1] for n in code_lines("\n".join(lines))]
    assert not any("1 + " in line or '"""' in line for line in run)
    assert len(rooms(ROOT)) <= faults.COUNT


def test_each_tier_catches_its_faults_and_a_second_start_goes_on(toy, tmp_path, monkeypatch):
    drawn = [
        fault(toy, "retain/__init__.py", "return left + right", "return left - right"),
        fault(toy, "eval/__init__.py", "return value * 2", "return value * 3"),  # as many bytes
        fault(toy, "eval/__init__.py", "return value // 2", "return value // 1"),
        fault(toy, "eval/__init__.py", "return value * 3", "return value * 4"),
    ]
    results, alone = tmp_path / "results.jsonl", ("-p", "no:hypothesispytest", "-p", "no:cacheprovider")
    monkeypatch.setattr(faults, "PYTEST", ("-m", "pytest", "-x", "-rfE", *alone))
    run_faults(toy, drawn[:2], results, limit=60)
    run_faults(toy, drawn, results, limit=60)
    lines = results.read_text().splitlines()
    run_faults(toy, drawn, results, limit=60)
    assert results.read_text().splitlines() == lines
    rows = [faults.json.loads(line) for line in lines]
    assert [(row["tier"], row["caught"]) for row in rows] == [
        ("default", "test_toy.py::test_add"),
        ("default", "test_toy.py::test_double"),
        ("default", None),
        ("default", None),
        ("whole", "test_toy.py::test_halve"),
        ("whole", None),
    ]
    monkeypatch.setattr(faults, "EQUIVALENT", {drawn[3].id: "Nothing calls it."})
    table = make_table(drawn, rows)
    assert "The default tier catches 2 of 4; 36 of 40" in table and "survives | Nothing calls it. |" in table
    monkeypatch.setattr(faults, "EQUIVALENT", {drawn[2].id: "Never."})
    refused("called equivalent", make_table, drawn, rows)
