"""Counts the code: `python -m tests.size` (`make size`) prints lines and statements of each room as a table.

Every tracked Python file counts, and lines of what else is code: C++, CUDA, templates and scripts of pages. A
statement is a node of Python's syntax tree, docstrings apart. A room is a folder with modules.
"""

import ast
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OTHER = (".cpp", ".cu", ".j2", ".js")
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


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
    others = sum(len(path.read_text().splitlines()) for path in files if path.suffix in OTHER)
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
