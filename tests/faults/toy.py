"""Makes a small tree laid out as this one: a package `retain`, and `retain.eval` in a folder beside it."""

from pathlib import Path

from tests.faults.checkout import git
from tests.faults.draw import Fault

FILES = {
    "pyproject.toml": """
        [build-system]
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
        addopts = "-p no:xdist -p no:hypothesispytest"
    """,
    ".gitignore": """
        .venv*/
        __pycache__/
        *.egg-info/
    """,
    "retain/__init__.py": """
        \"\"\"Adds 1 and 2.\"\"\"

        import time
        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            import a, b; LIMIT: int = 1 + 2


        def add(left: "int | None", right: int = 2 - 1) -> int:
            \"\"\"Return left + right.\"\"\"
            # 1 + 1
            return left + right


        def wait(left: int) -> int:
            while left > 0:
                time.sleep(0.01)
                left = left - 1
            return left


        if __name__ == "__main__":
            print(1 + 1)
    """,
    "eval/__init__.py": """
        def double(value):
            return value * 2


        def halve(value):
            return value // 2


        def thrice(value):
            return value * 3
    """,
    "tests/conftest.py": """
        def pytest_addoption(parser):
            parser.addoption("--all", action="store_true")
    """,
    "tests/eval/test_eval.py": """
        import pytest
        from retain.eval import double, halve

        def test_double():
            assert double(3) == 6

        def test_halve(request):
            if not request.config.option.all:
                pytest.skip("whole tier")
            assert halve(6) == 3
    """,
    "tests/test_other.py": """
        from retain import add, wait

        def test_add():
            assert add(2) == 3

        def test_wait():
            assert wait(2) == 0
    """,
}

TIERS = {
    "default": ("python", "-m", "pytest", "-q"),
    "whole": ("python", "-m", "pytest", "-q", "--all"),
}


def make_toy(root: Path) -> Path:
    """Write the tree into the new folder `root`."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").split("\n")
        path.write_text("\n".join(line.removeprefix(" " * 8) for line in lines).strip() + "\n")
    git(root, "init", "--quiet")
    return root


def toy_fault(root: Path, room: str, before: str, after: str) -> Fault:
    """Return the fault that replaces the line `before` of a room."""
    file = {"retain": "retain/__init__.py", "retain.eval": "eval/__init__.py"}[room]
    lines = (root / file).read_text().split("\n")
    (number,) = [at for at, line in enumerate(lines, 1) if line.strip() == before]
    text = lines[number - 1]
    return Fault(after, room, file, number, "core/Toy", text, text.replace(before, after))
