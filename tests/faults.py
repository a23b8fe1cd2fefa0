"""Measures which single-line faults the tests catch: `make faults-draw`, then `make faults`.

`draw` draws 40 faults with cosmic-ray's operators, one at least in each room (a package of pyproject.toml),
into results/faults/drawn.jsonl. `run` writes each into the committed tree, runs the default tier up to the
first failure, then, if the fault survives, every test (`--all`), and takes it out again. `table` prints what
caught each. A run that is started again goes on where it was.
"""

import argparse
import ast
import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
SEED, COUNT, WANTED = 46, 40, 36
PYTEST = ("-m", "pytest", "-n", "2", "--dist", "worksteal", "--timeout", "900", "-x", "-rfE")
LIMIT = 3600.0  # seconds of one run; the whole tier takes half of it

_WITH_ARGUMENTS = ("core/VariableInserter", "core/VariableReplacer")
_SIGNATURES = ("parameters", "lambdef")  # cosmic-ray takes their bare `*` and `/` for operators
_LAYOUT = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


@dataclass(frozen=True)
class Fault:
    """A changed line: `before` is the line in the tree, `after` replaces it."""

    room: str
    file: str
    line: int
    operator: str
    before: str
    after: str

    @property
    def id(self) -> str:
        """Eight hexadecimal digits that depend on everything else."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:8]

    def in_text(self, text: str) -> str:
        """Return a file's text with the fault in it; a ValueError if the line is another one now."""
        lines = text.split("\n")
        if lines[self.line - 1 : self.line] != [self.before]:
            raise ValueError(f"{self.file}:{self.line} is not {self.before!r}: draw again for this tree")
        return "\n".join([*lines[: self.line - 1], self.after, *lines[self.line :]])


def rooms(root: Path) -> dict[str, list[Path]]:
    """Return the Python files of each package that pyproject.toml lists, relative to `root`."""
    setuptools = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {}
    for package in sorted(setuptools["packages"]):
        prefix = max((p for p in setuptools["package-dir"] if f"{package}.".startswith(f"{p}.")), key=len)
        folder = root.joinpath(setuptools["package-dir"][prefix], *package[len(prefix) :].split("."))
        if files := sorted(path.relative_to(root) for path in folder.glob("*.py")):
            found[package] = files
    return found


class _Run(ast.NodeTransformer):
    """Removes what is not run: docstrings, annotations, type-only blocks, `__main__` guards."""

    def __init__(self) -> None:
        self.removed: set[int] = set()

    def visit(self, node: ast.AST) -> ast.AST:
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            self._remove(first)
            body[0] = ast.Pass()
        if isinstance(node, ast.If) and re.search("TYPE_CHECKING|__name__", ast.unparse(node.test)):
            self._remove(node)
            return ast.Pass()
        for annotation in ("returns", "annotation"):
            if getattr(node, annotation, None) is not None:
                setattr(node, annotation, ast.Constant(None))
        return self.generic_visit(node)

    def _remove(self, node: ast.stmt) -> None:
        self.removed |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def meaning(source: str) -> str:
    """Dump what the interpreter runs of a source."""
    return ast.dump(_Run().visit(ast.parse(source)))


def code_lines(source: str) -> list[int]:
    """Return the numbers of the lines that hold code that is run."""
    run = _Run()
    run.visit(ast.parse(source))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    held = {n for t in tokens if t.type not in _LAYOUT for n in range(t.start[0], t.end[0] + 1)}
    return sorted(held - run.removed)


def faults_at(source: str, line: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (operator, new line) of the faults of one line: kinds of operators in a drawn order."""
    nodes = [n for n in ast_nodes(get_ast(source)) if getattr(n.parent, "type", "") not in _SIGNATURES]
    kinds: dict[str, list[tuple[str, int]]] = {}
    for name in sorted(operator_names()):
        if name.startswith(_WITH_ARGUMENTS):
            continue
        positions = [at for node in nodes for at in get_operator(name)().mutation_positions(node)]
        there = [(name, n) for n, (start, end) in enumerate(positions) if start[0] <= line <= end[0]]
        if there:
            kinds.setdefault(name.split("_")[0], []).extend(there)
    before = source.split("\n")
    for kind in rng.sample(sorted(kinds), len(kinds)):
        for name, occurrence in rng.sample(kinds[kind], len(kinds[kind])):
            after = (mutate_code(source, get_operator(name)(), occurrence) or "").split("\n")
            changed = [n for n, pair in enumerate(zip(before, after, strict=False), 1) if pair[0] != pair[1]]
            if len(after) != len(before) or changed != [line]:
                continue
            try:
                compile("\n".join(after), "fault", "exec", dont_inherit=True)
            except (SyntaxError, ValueError):
                continue
            if meaning("\n".join(after)) != meaning(source):
                yield name, after[line - 1]


def draw(root: Path, count: int = COUNT, seed: int = SEED) -> list[Fault]:
    """Draw faults, one in each room and the others uniformly over all lines of code, at most one a line.

    The draw depends on the seed and on the text of the tree, on nothing else.

    Raises:
        ValueError: fewer faults than rooms, or than there are.
    """
    texts = {file: (root / file).read_text("utf-8") for files in rooms(root).values() for file in files}
    places = {
        room: [(room, file, line) for file in files for line in code_lines(texts[file])]
        for room, files in rooms(root).items()
    }
    rng = random.Random(seed)
    first = [rng.sample(each, len(each)) for each in places.values() if each]
    rest = [place for each in places.values() for place in each]
    drawn: dict[tuple[str, str, int], Fault] = {}
    for order in [*first, *([rng.sample(rest, len(rest))] * (count - len(first)))]:
        for room, file, line in (place for place in order if place not in drawn):
            if (fault := next(faults_at(texts[file], line, rng), None)) is not None:
                before = texts[file].split("\n")[line - 1]
                drawn[room, file, line] = Fault(room, file.as_posix(), line, fault[0], before, fault[1])
                break
    if len(drawn) != count:
        raise ValueError(f"{len(drawn)} faults in {len(first)} rooms instead of {count}: draw another number")
    return sorted(drawn.values(), key=lambda fault: (fault.file, fault.line))


def caught_by(root: Path, fault: Fault, *arguments: str, limit: float = LIMIT) -> str | None:
    """Return the test that fails with a fault in the tree, or None; the tree is as before afterwards.

    Raises:
        ValueError: the tree is not the committed one.
        RuntimeError: pytest ended without a failed test.
    """
    git = ["git", "-C", str(root)]
    if subprocess.run([*git, "status", "--porcelain"], capture_output=True, check=True).stdout:
        raise ValueError(f"{root} has changes that are not committed: measure in a fresh clone")
    path = root / fault.file
    text = path.read_text("utf-8")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    path.write_text(fault.in_text(text), "utf-8")
    try:
        command = [sys.executable, *PYTEST, *arguments]
        done = subprocess.run(
            command, cwd=root, env=environment, timeout=limit, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    finally:
        path.write_text(text, "utf-8")
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    if done.returncode in (3, 4):
        return "pytest does not start"
    if done.returncode and not failed:
        raise RuntimeError(f"exit status {done.returncode} without a failed test:\n{done.stdout[-3000:]}")
    return failed[1] if failed else None


def run_faults(root: Path, faults: list[Fault], results: Path, limit: float = LIMIT) -> None:
    """Ask the tests about every fault that `results` does not hold yet; one JSON line a fault and tier."""
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    asked = {(row["id"], row["tier"]) for row in known}
    caught = {row["id"] for row in known if row["caught"]}
    for tier, arguments in (("default", ()), ("whole", ("--all",))):
        for fault in faults:
            if fault.id in caught or (fault.id, tier) in asked:
                continue
            by = caught_by(root, fault, *arguments, limit=limit)
            if by:
                caught.add(fault.id)
            with results.open("a") as file:
                file.write(json.dumps({"id": fault.id, "tier": tier, "caught": by}) + "\n")
            print(f"{fault.id} {fault.file}:{fault.line} {tier}: {by or 'survives'}", flush=True)


def make_table(faults: list[Fault], rows: list[dict]) -> str:
    """Return the Markdown table of what caught each fault, and the verdict on the default tier."""
    lines = ["| fault | place | change | default tier | every test |", "| --- | --- | --- | --- | --- |"]
    by = {(row["id"], row["tier"]): row["caught"] or "survives" for row in rows}
    for fault in faults:
        found = [by.get((fault.id, tier), "") for tier in ("default", "whole")]
        change = f"`{fault.before.strip()}` -> `{fault.after.strip()}`"
        cells = (fault.id, f"{fault.file}:{fault.line}", change, *found)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    caught = sum(row["tier"] == "default" and bool(row["caught"]) for row in rows)
    asked = len({row["id"] for row in rows})
    return "\n".join(
        [*lines, "", f"The default tier catches {caught} of {asked}; {WANTED} of {COUNT} wanted."]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("command", choices=("draw", "run", "table"))
    parser.add_argument("--out", type=Path, default=ROOT / "results/faults", help="folder of what is written")
    given = parser.parse_args()
    drawn, results = given.out / "drawn.jsonl", given.out / "results.jsonl"
    if given.command == "draw":
        given.out.mkdir(parents=True, exist_ok=True)
        drawn.write_text("".join(json.dumps(asdict(fault)) + "\n" for fault in draw(ROOT)))
        results.unlink(missing_ok=True)
        return
    faults = [Fault(**json.loads(line)) for line in drawn.read_text().splitlines()]
    if given.command == "run":
        run_faults(ROOT, faults, results)
    else:
        print(make_table(faults, [json.loads(line) for line in results.read_text().splitlines()]))


if __name__ == "__main__":
    main()
