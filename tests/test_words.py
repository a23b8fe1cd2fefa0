"""The code uses the words of the field: no house words in names, docstrings that open with a noun and a verb.

DESIGN.md, section 2, has the table of words.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("retain", "train", "eval", "kernels", "tests", "docs")

# Parts of names (`own_budget`, `notedScores`) that say nothing to a reader from the field, and a better word.
BANNED = {
    "own": "the thing's name: policy, row, layer",
    "beside": "metadata, extra",
    "noted": "stored, cached",
    "gone": "removed, evicted",
    "moment": "step, time",
    "settle": "finish, commit",
    "settled": "finished, committed",
    "spared": "protected, kept",
    "announced": "declared, planned",
}
# First words of a docstring that leave its sentence without a subject.
OPENINGS = ("Of", "What", "Whatever", "Whether", "Who", "Whoever", "Whose", "One")
PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def modules() -> list[Path]:
    """Every Python file."""
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a module defines: functions, classes, arguments, variables, attributes, imports' aliases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value.lineno


def banned(path: Path) -> Iterator[str]:
    """Definitions of a module whose names contain a banned word, `path:line name`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name, line in [(path.stem, 1), *names(tree)]:
        if BANNED.keys() & {part.lower() for part in PARTS.findall(name)}:
            yield f"{path.relative_to(ROOT)}:{line} {name}"


def openings(path: Path) -> Iterator[str]:
    """Docstrings of a module that open with a banned word, `path:line opening`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].rstrip(",:") in OPENINGS:
                line = getattr(node, "lineno", 1)
                yield f"{path.relative_to(ROOT)}:{line} {' '.join(words[:4])}"


def test_names_have_the_words_of_the_field() -> None:
    found = [line for path in modules() for line in banned(path)]
    assert not found, "\n".join([f"{len(found)} names:", *found])


def test_docstrings_open_with_a_noun_and_a_verb() -> None:
    found = [line for path in modules() for line in openings(path)]
    assert not found, "\n".join([f"{len(found)} docstrings:", *found])
