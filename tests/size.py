"""Counts the code: `python -m tests.size` (`make size`) prints lines and statements of each room as a table.

Every tracked Python file counts, and lines of other code: C++, CUDA, templates, scripts of pages. A
statement is a node of Python's syntax tree, docstrings apart. A room is a folder with modules in
it. Test cases and minutes come from the JUnit files that `make test` and `make test-all` leave behind.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
CODE = ("retain", "kernels", "train", "eval")
OTHER = (".cpp", ".cu", ".j2", ".js")
TIERS = {"default": "results/tests.xml", "whole": "results/tests-all.xml"}


@dataclass(frozen=True)
class Size:
    """Size of some modules.

    Attributes:
        modules: how many there are.
        lines: of their files.
        statements: in their syntax trees, docstrings apart.
        longest_file: lines of the longest, and its path.
        longest_function: lines without its docstring, and its name.
        widest_class: public methods of the class that has the most, and its name.
    """

    modules: int
    lines: int
    statements: int
    longest_file: tuple[int, str]
    longest_function: tuple[int, str]
    widest_class: tuple[int, str]


def size_of(paths: Iterable[Path]) -> Size:
    """Counts modules."""
    lines, statements = 0, 0
    files, functions, classes = [(0, "-")], [(0, "-")], [(0, "-")]
    count = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        count, own = count + 1, len(text.splitlines())
        lines += own
        files.append((own, path.relative_to(ROOT).as_posix()))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.stmt):
                statements += 1
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                documented = ast.get_docstring(node, clean=False) is not None
                statements -= documented
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((_length(node, documented), f"{path.stem}.{node.name}"))
            elif isinstance(node, ast.ClassDef):
                classes.append((sum(map(_is_public, node.body)), f"{path.stem}.{node.name}"))
    return Size(count, lines, statements, max(files), max(functions), max(classes))


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


def table() -> str:
    """The table, Markdown."""
    columns = ("room", "modules", "lines", "statements", "longest file", "longest function", "public methods")
    files = tracked()
    modules = [path for path in files if path.suffix == ".py"]
    tests = [path for path in modules if path.relative_to(ROOT).parts[0] == "tests"]
    code = [path for path in modules if path not in tests]
    rows = [(name, size_of(paths)) for name, paths in rooms(code).items()]
    parts = [
        (f"**{folder}**", size_of(path for path in code if path.relative_to(ROOT).parts[0] == folder))
        for folder in CODE
    ]
    parts += [("**Python**", size_of(code)), ("**tests**", size_of(tests))]
    beside = other_lines(path for path in files if path.suffix in OTHER)
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    for name, size in rows + parts:
        most = (
            f"{number} {where}"
            for number, where in (size.longest_file, size.longest_function, size.widest_class)
        )
        lines.append(
            f"| {name} | {size.modules} | {size.lines:,} | {size.statements:,} | {' | '.join(most)} |"
        )
    lines += [
        "",
        f"Lines of code, tests apart: {size_of(code).lines + beside:,}, of which {beside:,} are not Python.",
    ]
    lines += [*(f"Tests, {name} tier: {tier(ROOT / path)}." for name, path in TIERS.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    sys.exit(0)
