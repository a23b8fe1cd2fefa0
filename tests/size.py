"""Counts the code: `python -m tests.size` (`make size`) prints lines and statements of each room as a table.

<<<<<<< HEAD
Every tracked Python file counts, and lines of what else is code: C++, CUDA, templates, scripts of pages and
notebooks. A statement is a node of Python's syntax tree, docstrings apart. A room is a folder with modules.
=======
Every tracked Python file counts, and lines of other code: C++, CUDA, templates, scripts of pages. A
statement is a node of Python's syntax tree, docstrings apart. A room is a folder with modules in
it. Test cases and minutes come from the JUnit files that `make test` and `make test-all` leave behind.
>>>>>>> e67d5ad496121824323aaf99b89ddef074226be2
"""

import ast
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
<<<<<<< HEAD
OTHER = (".cpp", ".cu", ".j2", ".js", ".ipynb")
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
=======
CODE = ("retain", "kernels", "train", "eval")
OTHER = (".cpp", ".cu", ".j2", ".js")
TIERS = {"default": "results/tests.xml", "whole": "results/tests-all.xml"}
>>>>>>> e67d5ad496121824323aaf99b89ddef074226be2


@dataclass
class Size:
    """Size of some modules: how many, their lines and statements, the longest file and function."""

    modules: int = 0
    lines: int = 0
    statements: int = 0
    files: list[tuple[int, str]] = field(default_factory=lambda: [(0, "-")])
    functions: list[tuple[int, str]] = field(default_factory=lambda: [(0, "-")])

    def add(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        self.modules += 1
        self.lines += len(text.splitlines())
        self.files.append((len(text.splitlines()), path.name))
        for node in ast.walk(ast.parse(text)):
            self.statements += isinstance(node, ast.stmt)
            if not isinstance(node, DOCUMENTED):
                continue
            documented = ast.get_docstring(node, clean=False) is not None
            self.statements -= documented
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                said = node.body[0]
                docstring = (said.end_lineno or 0) - said.lineno + 1 if documented else 0
                length = (node.end_lineno or 0) - node.lineno + 1 - docstring
                self.functions.append((length, f"{path.stem}.{node.name}"))

    def row(self, name: str) -> str:
        longest = (f"{number} {where}" for number, where in (max(self.files), max(self.functions)))
        return f"| {name} | {self.modules} | {self.lines:,} | {self.statements:,} | {' | '.join(longest)} |"


<<<<<<< HEAD
def other_lines(path: Path) -> int:
    """Lines of code in a file that is not Python's."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return len(text.splitlines())
    cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return sum(len("".join(source).splitlines()) for source in cells)
=======
def _length(function: ast.FunctionDef | ast.AsyncFunctionDef, documented: bool) -> int:
    """Lines of a function without its docstring."""
    assert function.end_lineno is not None
    whole = function.end_lineno - function.lineno + 1
    if not documented:
        return whole
    docstring = function.body[0]
    assert docstring.end_lineno is not None
    return whole - (docstring.end_lineno - docstring.lineno + 1)


def _is_public(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and not node.name.startswith("_")


def tracked() -> list[Path]:
    """Every file that git tracks and that is there."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def rooms(modules: Iterable[Path]) -> dict[str, list[Path]]:
    """Every folder with modules, and its own modules."""
    found: dict[str, list[Path]] = {}
    for path in sorted(modules):
        found.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path)
    return found


def other_lines(paths: Iterable[Path]) -> int:
    """Lines of code that is not a Python file."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def tier(path: Path) -> str:
    """Cases and minutes of a run of the tests, from its JUnit file."""
    if not path.is_file():
        return "not run here"
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None
    skipped, minutes = int(suite.attrib["skipped"]), float(suite.attrib["time"]) / 60
    return f"{int(suite.attrib['tests']) - skipped} cases and {skipped} skipped, {minutes:.1f} minutes"
>>>>>>> e67d5ad496121824323aaf99b89ddef074226be2


def table() -> str:
    """The table, Markdown."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
    rooms: dict[str, Size] = defaultdict(Size)
    sums: dict[str, Size] = defaultdict(Size)
    for path in sorted(path for path in files if path.suffix == ".py"):
        folder = path.parent.relative_to(ROOT).as_posix()
        top = folder.split("/")[0]
        sums[top].add(path)
        if top != "tests":
            sums["all code"].add(path)
            rooms[folder].add(path)
    others = sum(other_lines(path) for path in files if path.suffix in OTHER)
    columns = ("room", "modules", "lines", "statements", "longest file", "longest function")
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    lines += [size.row(name) for name, size in rooms.items()]
    lines += [size.row(f"**{name}**") for name, size in sums.items()]
    whole = sums["all code"].lines + others
    return "\n".join(
        [*lines, "", f"Lines of code, tests apart: {whole:,}, of which {others:,} are not Python."]
    )


if __name__ == "__main__":
    print(table())
