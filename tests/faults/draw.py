"""Draws single-line faults, stratified by room, with cosmic-ray's operators.

A room is a package that pyproject.toml lists. Rooms share the faults in proportion to their lines of code,
and each gets at least one. In a room, a line of code is drawn uniformly, then a kind of operator among
those that apply to the line, then one fault of that kind, so that lines with much arithmetic are not drawn
more often. The draw depends on the seed and on the text of the tree, on nothing else.

A fault changes what the interpreter runs: two sources that differ only in docstrings, annotations,
type-only imports or a `__main__` guard are the same to `meaning`.
"""

import ast
import hashlib
import io
import json
import random
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

SEED = 20261123
COUNT = 40

# They need arguments (which variable), and no default set of them fits every tree.
_WITH_ARGUMENTS = ("core/VariableInserter", "core/VariableReplacer")

# The bare `*` and `/` of a signature are no binary operators; cosmic-ray takes them for such.
_SIGNATURES = ("parameters", "lambdef")


@dataclass(frozen=True)
class Fault:
    """One changed line: `before` is the line in the tree, `after` replaces it (empty: the line goes)."""

    id: str
    room: str
    file: str
    line: int
    operator: str
    before: str
    after: str

    @property
    def module(self) -> str:
        """The module's installed name."""
        stem = Path(self.file).stem
        return self.room if stem == "__init__" else f"{self.room}.{stem}"


def rooms(root: Path) -> dict[str, list[Path]]:
    """Return the Python files of each package that pyproject.toml lists, relative to `root`."""
    setuptools = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = setuptools["package-dir"]
    found = {}
    for package in sorted(setuptools["packages"]):
        prefix = max((p for p in folders if f"{package}.".startswith(f"{p}.")), key=len)
        folder = root.joinpath(folders[prefix], *package[len(prefix) :].split("."))
        files = sorted(path.relative_to(root) for path in folder.glob("*.py"))
        if files:
            found[package] = files
    return found


def _not_run(node: ast.stmt) -> bool:
    """Tell a type-only block and a `__main__` guard."""
    if not isinstance(node, ast.If):
        return False
    names = {getattr(part, "id", getattr(part, "attr", None)) for part in ast.walk(node.test)}
    return bool(names & {"TYPE_CHECKING", "__name__"})


def _docstring(node: ast.AST) -> ast.stmt | None:
    if (
        not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        or not node.body
    ):
        return None
    first = node.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first if is_text and isinstance(first.value.value, str) else None


class _Stripped(ast.NodeTransformer):
    """Removes what is not run: docstrings, annotations, type-only blocks, `__main__` guards."""

    def visit(self, node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.stmt) and _not_run(node):
            return ast.copy_location(ast.Pass(), node)
        if (docstring := _docstring(node)) is not None:
            node.body = [statement for statement in node.body if statement is not docstring]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def meaning(source: str) -> str:
    """Dump what the interpreter runs of a source."""
    return ast.dump(_Stripped().visit(ast.parse(source)))


def code_lines(source: str) -> list[int]:
    """Return the numbers of the lines that hold code: no comment, docstring or block that is not run."""
    layout = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        dropped = node if isinstance(node, ast.stmt) and _not_run(node) else _docstring(node)
        if dropped is not None:
            found.difference_update(range(dropped.lineno, (dropped.end_lineno or dropped.lineno) + 1))
    return sorted(found)


def shares(lines: dict[str, int], count: int) -> dict[str, int]:
    """Divide `count` in proportion to `lines` by largest remainders, at least one each."""
    if len(lines) > count:
        raise ValueError(
            f"{len(lines)} rooms cannot each get one of {count} faults: draw at least {len(lines)}"
        )
    small: dict[str, int] = {}
    while True:
        rest = {room: n for room, n in lines.items() if room not in small}
        left, total = count - len(small), sum(rest.values())
        more = {room: 1 for room, n in rest.items() if n * left < total}
        if not more:
            break
        small |= more
    given = {room: n * left // total for room, n in rest.items()}
    by_remainder = sorted(rest, key=lambda room: (-(rest[room] * left % total), room))
    for room in by_remainder[: left - sum(given.values())]:
        given[room] += 1
    return dict(sorted((small | given).items()))


def _one_line(before: list[str], after: list[str], line: int) -> str | None:
    """Return the text that replaces `line`, or None where the two texts differ elsewhere too."""
    if before[: line - 1] != after[: line - 1]:
        return None
    if len(after) == len(before) and before[line:] == after[line:]:
        return after[line - 1]
    return "" if before[line:] == after[line - 1 :] else None


def faults_at(source: str, line: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (operator, new text) of the faults of one line, in an order drawn from `rng`."""
    nodes = list(ast_nodes(get_ast(source)))
    there = [
        at
        for at, node in enumerate(nodes)
        if node.start_pos[0] <= line <= node.end_pos[0]
        and getattr(node.parent, "type", "") not in _SIGNATURES
    ]
    kinds: dict[str, list[tuple[str, int]]] = {}
    for name in sorted(operator_names()):
        if name.startswith(_WITH_ARGUMENTS):
            continue
        operator = get_operator(name)()
        at_line = {
            at: found
            for at in there
            if (
                found := [start[0] <= line <= end[0] for start, end in operator.mutation_positions(nodes[at])]
            )
        }
        occurrence, counted = 0, 0
        for at, found in at_line.items():  # an occurrence is counted over the whole file
            occurrence += sum(sum(1 for _ in operator.mutation_positions(node)) for node in nodes[counted:at])
            hits = [(name, occurrence + index) for index, hit in enumerate(found) if hit]
            if hits:
                kinds.setdefault(name.split("_")[0], []).extend(hits)
            occurrence, counted = occurrence + len(found), at + 1
    original, before = meaning(source), source.split("\n")
    order = sorted(kinds)
    rng.shuffle(order)
    for kind in order:
        rng.shuffle(kinds[kind])
        for name, occurrence in kinds[kind]:
            changed = mutate_code(source, get_operator(name)(), occurrence)
            after = None if changed is None else _one_line(before, changed.split("\n"), line)
            if after is None or after == before[line - 1]:
                continue
            text = "\n".join([*before[: line - 1], after, *before[line:]])
            try:
                compile(text, "fault", "exec", dont_inherit=True)
            except (SyntaxError, ValueError):
                continue
            if meaning(text) != original:
                yield name, after


def draw(root: Path, count: int = COUNT, seed: int = SEED) -> list[Fault]:
    """Draw `count` faults in the packages of the tree at `root`; at most one a line."""
    texts = {
        room: {file: (root / file).read_text("utf-8") for file in files}
        for room, files in rooms(root).items()
    }
    lines = {
        room: [(file, line) for file, text in files.items() for line in code_lines(text)]
        for room, files in texts.items()
    }
    wanted = shares({room: len(places) for room, places in lines.items() if places}, count)
    drawn = []
    for room, number in wanted.items():
        rng = random.Random(f"{seed}:{room}")
        places = rng.sample(lines[room], len(lines[room]))
        found: list[Fault] = []
        for file, line in places:
            text = texts[room][file]
            own = next(faults_at(text, line, random.Random(f"{seed}:{file}:{line}")), None)
            if own is not None:
                before = text.split("\n")[line - 1]
                named = "|".join((file.as_posix(), str(line), own[0], before, own[1]))
                key = hashlib.sha256(named.encode()).hexdigest()[:8]
                found.append(Fault(key, room, file.as_posix(), line, own[0], before, own[1]))
            if len(found) == number:
                break
        else:
            raise ValueError(f"{room} has room for {len(found)} faults, its share is {number}")
        drawn += sorted(found, key=lambda fault: (fault.file, fault.line))
    return drawn


def write_faults(path: Path, faults: Iterable[Fault]) -> None:
    """Write one JSON line a fault."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(fault)) + "\n" for fault in faults), encoding="utf-8")


def read_faults(path: Path) -> list[Fault]:
    """Read what `write_faults` wrote."""
    if not path.is_file():
        raise ValueError(f"no {path}: draw first, with `make faults-draw`")
    return [Fault(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
