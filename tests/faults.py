"""Measures which single-line faults the tests catch: `make faults-draw`, then `make faults`.

`draw` draws 40 faults with cosmic-ray's operators, stratified by room (a package of pyproject.toml), into
results/faults/drawn.jsonl. `run` writes each into a copy of the committed tree that has its own environment,
and runs the tests of the default tier that run the changed function (all of them for a line that is run at
import, or compiled), up to the first failure, then, if the fault survives, every test (`--all`). A test has
caught a fault if it fails again alone, and passes without the fault. `table` prints what caught each. A run
that is started again goes on where it was. A survivor that changes no behaviour is named in EQUIVALENT, with
its reason.
"""

import argparse
import ast
import contextlib
import hashlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import tokenize
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
SEED, COUNT, WANTED = 44, 40, 36
# Fault's id in drawn.jsonl: why no test can see it.
EQUIVALENT: dict[str, str] = {}
PYTEST = ("-m", "pytest", "-n", "2", "--dist", "worksteal", "--timeout", "900", "-x", "-rfE")
LIMIT = 3600.0  # seconds of one run; the whole tier takes half of it

_WITH_ARGUMENTS = ("core/VariableInserter", "core/VariableReplacer")
_SIGNATURES = ("parameters", "lambdef")  # cosmic-ray takes their bare `*` and `/` for operators
_LAYOUT = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


@dataclass(frozen=True)
class Fault:
    """One changed line: `before` is the line in the tree, `after` replaces it."""

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


def shares(lines: dict[str, int], count: int) -> dict[str, int]:
    """Divide `count` by largest remainders in proportion to `lines`, behind one for each room."""
    left, total = count - len(lines), sum(lines.values())
    if left < 0:
        raise ValueError(f"{len(lines)} rooms cannot each get one of {count} faults: draw more")
    found = {room: 1 + n * left // total for room, n in lines.items()}
    by_remainder = sorted(lines, key=lambda room: (-(lines[room] * left % total), room))
    for room in by_remainder[: count - sum(found.values())]:
        found[room] += 1
    return found


def draw(root: Path, count: int = COUNT, seed: int = SEED) -> list[Fault]:
    """Draw faults at most one a line, uniformly over the lines of code of each room.

    The draw depends on the seed and on the text of the tree, on nothing else.
    """
    texts = {file: (root / file).read_text("utf-8") for files in rooms(root).values() for file in files}
    lines = {
        room: [(file, line) for file in files for line in code_lines(texts[file])]
        for room, files in rooms(root).items()
    }
    drawn: list[Fault] = []
    for room, number in shares(
        {room: len(places) for room, places in lines.items() if places}, count
    ).items():
        rng = random.Random(f"{seed}:{room}")
        found: list[Fault] = []
        for file, line in rng.sample(lines[room], len(lines[room])):
            fault = next(faults_at(texts[file], line, rng), None)
            if fault is not None and len(found) < number:
                before = texts[file].split("\n")[line - 1]
                found.append(Fault(room, file.as_posix(), line, fault[0], before, fault[1]))
            if len(found) == number:
                break
        else:
            raise ValueError(f"{room} has room for {len(found)} faults, its share is {number}")
        drawn += sorted(found, key=lambda fault: (fault.file, fault.line))
    return drawn


# Says which test runs a function; other processes that a test starts know its name too.
MARK = """import os
_seen = set()
def mark(fault):
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (fault, test) not in _seen:
        _seen.add((fault, test))
        at = os.open({path!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(at, f"{{fault}}\\t{{test}}\\n".encode())
        os.close(at)
"""


def function_around(tree: ast.Module, line: int) -> ast.FunctionDef | None:
    """Return the innermost function whose body holds a line; None for lines that are run at import, and for
    functions that Triton compiles."""
    found = None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line <= (node.end_lineno or 0):
            if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                return None
            if node.lineno < node.body[0].lineno and (found is None or node.lineno > found.lineno):
                found = node
    return found


def marked(source: str, faults: list[Fault]) -> tuple[str, set[str]]:
    """Return a file's text that marks the functions of its faults as they are run, and whose are marked."""
    tree, lines, known = ast.parse(source), source.split("\n"), {}
    for fault in faults:
        if (around := function_around(tree, fault.line)) is not None:
            body = around.body[ast.get_docstring(around) is not None :] or around.body
            decorators = getattr(body[0], "decorator_list", [])
            known[fault.id] = min(node.lineno for node in (body[0], *decorators))
    for name, line in sorted(known.items(), key=lambda own: -own[1]):
        indent = re.match(r" *", lines[line - 1])
        lines.insert(line - 1, f"{indent[0] if indent else ''}import fault_marks; fault_marks.mark({name!r})")
    return "\n".join(lines), {*known}


class Copy:
    """A clone of the committed tree, with an environment that imports `retain` from the clone alone.

    The clone is installed editable into a virtual environment of its own; every other package comes from the
    environment that runs this. Bytecode goes with each fault: a changed line may leave a file's size and the
    second of its change as they were, and Python would run the old one.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder / "tree"
        subprocess.run(["git", "clone", "--quiet", root, self.folder], check=True)
        self.python = self.folder / ".venv/bin/python"
        venv.EnvBuilder(symlinks=True).create(self.python.parents[1])
        (packages,) = self.python.parents[1].glob("lib/python*/site-packages")
        others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (packages / "others.pth").write_text("\n".join(others) + "\n")
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--no-build-isolation", "--no-index", "--editable", self.folder], check=True)
        for script in Path(sys.executable).parent.iterdir():  # commands of other packages
            own = self.python.parent / script.name
            content = script.read_bytes()
            if not own.exists() and content.startswith(b"#!"):
                own.write_bytes(b"#!%b\n" % os.fsencode(self.python) + content.partition(b"\n")[2])
                own.chmod(0o755)

    def run(self, *arguments: str, limit: float = LIMIT) -> tuple[int | None, str]:
        """Run the copy's Python; return the exit status (None: stopped at the limit) and the output."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GIT_", "PYTHON"))}
        environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        environment["PATH"] = os.pathsep.join([str(self.python.parent), environment.get("PATH", os.defpath)])
        with tempfile.TemporaryFile("w+") as out:  # a grandchild that goes on would hold a pipe open
            process = subprocess.Popen(
                [self.python, *arguments],
                cwd=self.folder,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            out.seek(0)
            return status, out.read()

    def caught_by(self, fault: Fault, *arguments: str, limit: float = LIMIT) -> str | None:
        """Return the test that fails with a fault in the copy, or None.

        Raises:
            RuntimeError: The module is imported from elsewhere, or the run ended without a failed test.
        """
        path = self.folder / fault.file
        name = fault.room if path.stem == "__init__" else f"{fault.room}.{path.stem}"
        where = f"import importlib.util as u; print(u.find_spec({name!r}).origin)"
        origin = self.run("-c", where)[1].strip().split("\n")[-1]
        if Path(origin).resolve() != path.resolve():
            raise RuntimeError(f"{name} is imported from {origin}, not from the copy's {path}")
        path.write_text(fault.in_text(path.read_text("utf-8")), "utf-8")
        try:
            status, output = self.run(*arguments, limit=limit)
        finally:
            self._restore()
        if status is None:
            return f"stopped after {limit:.0f} s"
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.MULTILINE)
        if status in (3, 4):
            return "pytest does not start"
        if status in (0, 5) or failed:
            return failed[1] if failed else None
        raise RuntimeError(f"exit status {status} without a failed test:\n{output[-3000:]}")

    def reached(self, faults: list[Fault], pytest: tuple[str, ...]) -> dict[str, list[str]]:
        """Return the tests that run the function of each fault, where it is inside one: they may see it.

        Tests share what a fixture made: all tests of a file count if one of them runs it in its set-up.
        """
        (packages,) = self.python.parents[1].glob("lib/python*/site-packages")
        at = self.folder.with_name("reached.tsv")
        (packages / "fault_marks.py").write_text(MARK.format(path=str(at)))
        found: dict[str, set[str]] = {}
        for file in {fault.file for fault in faults}:
            path = self.folder / file
            text, names = marked(path.read_text("utf-8"), [fault for fault in faults if fault.file == file])
            path.write_text(text, "utf-8")
            found |= {name: set() for name in names}
        self.run(*(argument for argument in pytest if argument != "-x"))
        self._restore()
        for line in at.read_text().splitlines() if at.exists() else []:
            name, _, test = line.partition("\t")
            test, _, phase = test.rpartition(" (")
            if test:
                found[name].add(test if phase == "call)" else test.partition("::")[0])
        whole = {test for tests in found.values() for test in tests if "::" not in test}
        return {
            name: sorted(test for test in tests if test in whole or test.partition("::")[0] not in tests)
            for name, tests in found.items()
        }

    def _restore(self) -> None:
        for command in (
            ("checkout", "--quiet", "."),
            ("clean", "-fdqx", "-e", "/.venv", "-e", "*.egg-info"),
        ):
            subprocess.run(["git", *command], cwd=self.folder, check=True)

    def confirmed(
        self, fault: Fault, pytest: tuple[str, ...], tests: list[str], limit: float = LIMIT
    ) -> str | None:
        """Return the test that catches a fault, as `caught_by`; one that fails by chance is left out."""
        left_out: list[str] = []
        while True:
            by = self.caught_by(fault, *pytest, *left_out, *tests, limit=limit)
            if by is None or "::" not in by:
                return by
            again = self.caught_by(fault, *pytest, "--all", by, limit=limit)
            passes = self.run(*pytest, "--all", by, limit=limit)[0] == 0
            self._restore()
            if again and passes:
                return by
            print(f"{by} fails by chance, and is left out", flush=True)
            left_out += ["--deselect", by]


def run_faults(
    root: Path, faults: list[Fault], results: Path, pytest: tuple[str, ...] = PYTEST, limit: float = LIMIT
) -> None:
    """Ask the tests about every fault that `results` does not hold yet; one JSON line a fault and tier."""
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    tiers = {row["id"]: row["tier"] for row in known}
    caught = {row["id"] for row in known if row["caught"]}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy, names = Copy(root, Path(folder)), Path(folder) / "tests.txt"
        reached = copy.reached([fault for fault in faults if fault.id not in tiers], pytest)
        for tier in ("default", "whole"):
            for fault in faults:
                if fault.id in caught or tiers.get(fault.id) in (tier, "whole"):
                    continue
                tests = ["--all"] if tier == "whole" else []
                if tier == "default" and fault.id in reached:
                    names.write_text("\n".join(reached[fault.id]))
                    tests = ["--all", f"@{names}"]  # those names alone, which are of the default tier
                none = tier == "default" and reached.get(fault.id) == []
                by = None if none else copy.confirmed(fault, pytest, tests, limit)
                if by:
                    caught.add(fault.id)
                with results.open("a") as file:
                    file.write(json.dumps({"id": fault.id, "tier": tier, "caught": by}) + "\n")
                print(f"{fault.id} {fault.file}:{fault.line} {tier}: {by or 'survives'}", flush=True)


def make_table(faults: list[Fault], rows: list[dict]) -> str:
    """Return the Markdown table of what caught each fault, and the verdict on the default tier.

    Raises:
        ValueError: A fault is called equivalent that a test caught.
    """
    lines = ["| fault | place | change | default tier | every test |", "| --- | --- | --- | --- | --- |"]
    by = {(row["id"], row["tier"]): row["caught"] or "survives" for row in rows}
    for fault in faults:
        found = [by.get((fault.id, tier), "") for tier in ("default", "whole")]
        if fault.id in EQUIVALENT and found != ["survives", "survives"]:
            raise ValueError(f"fault {fault.id} is called equivalent, but was not seen to survive every test")
        found[1] = EQUIVALENT.get(fault.id, found[1])
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
