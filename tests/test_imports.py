"""Imports go one way: kernels <- retain <- {train, eval} <- tests; transformers enters in two places.

Read from the source by `ast`: an import inside a function or under TYPE_CHECKING counts like any other.
"""

import ast
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"retain": "retain", "kernels": "retain.kernels", "train": "retain.train", "eval": "retain.eval"}


@cache
def sources() -> dict[str, Path]:
    """Every module of the project by its installed name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


@cache
def imports(module: str, *, typed: bool = True) -> frozenset[tuple[str, str | None]]:
    """Imports of a module, as (module, name taken from it), wherever in the file it does so.

    Args:
        typed: also what only a type checker imports.
    """
    tree = ast.parse(sources()[module].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not typed and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found: set[tuple[str, str | None]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: write an absolute retain.* import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add((inner, None) if inner in sources() else (node.module, alias.name))
    return frozenset(found)


def imported_modules(module: str) -> set[str]:
    return {name for name, _ in imports(module)}


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def offenders(inside: tuple[str, ...], outside: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    """Imports of `forbidden` by modules that lie within `inside` but not within `outside`."""
    return sorted(
        f"{module} imports {target}"
        for module in sources()
        if within(module, *inside) and not within(module, *outside)
        for target in imported_modules(module)
        if within(target, *forbidden)
    )


def test_no_import_circle() -> None:
    """Lazy imports included; what only a type checker imports apart."""
    graph = {
        module: {target for target, _ in imports(module, typed=False)} & sources().keys() - {module}
        for module in sources()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports go in a circle: {' <- '.join(error.args[1])}")


EXTRA = ("retain.kernels", "retain.train", "retain.eval")
WITH_TRANSFORMERS = ("retain.hf", "retain.models", "retain.reference", "retain.train", "retain.eval")
WITHOUT_VLLM = ("retain.vllm.settings", "retain.vllm.packing", "retain.vllm.demo")


@pytest.mark.parametrize(
    ("inside", "outside", "forbidden"),
    [
        (("retain.kernels",), (), ("train", "eval", "kernels")),
        (("retain",), EXTRA, ("retain.train", "retain.eval", "train", "eval", "kernels")),
        (("retain.train",), (), ("retain.eval", "eval", "train", "kernels")),
        (("retain.eval",), (), ("retain.train", "eval", "train", "kernels")),
        (("retain",), WITH_TRANSFORMERS, ("transformers",)),
        (("retain",), ("retain.vllm", "retain.eval"), ("vllm", "prometheus_client", "retain.vllm")),
        (("retain.vllm",), (), ("retain.hf", "transformers")),
        (WITHOUT_VLLM, (), ("vllm",)),
        (("retain",), ("retain.train", "retain.eval"), ("retain.future",)),
        (("retain",), ("retain.kernels",), ("triton",)),
        # A gate's score is handed to `decide`.
        (("retain.policy",), (), ("retain.gates",)),
    ],
)
def test_imports_go_one_way(inside: tuple, outside: tuple, forbidden: tuple) -> None:
    assert any(within(module, *inside) for module in sources())
    assert offenders(inside, outside, forbidden) == []


def test_kernels_import_nothing_else_of_retain() -> None:
    found = offenders(("retain.kernels",), (), ("retain",))
    assert [line for line in found if not within(line.split()[-1], "retain.kernels")] == []


IMPORT_NAMES = {"PyYAML": "yaml"}


@pytest.mark.parametrize(
    ("package", "extras"),
    [
        (
            "retain",
            ("train", "deepspeed", "eval", "vllm"),
        ),  # inside of functions, and in retain.vllm: the next tests
        ("retain.kernels", ("kernels",)),
        ("retain.train", ("train", "deepspeed", "wandb")),
        ("retain.eval", ("eval", "lm-eval", "vllm")),
    ],
)
def test_what_is_imported_is_declared(package: str, extras: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + [r for e in extras for r in project["optional-dependencies"][e]]
    names = {requirement.split(">")[0].split(";")[0].strip() for requirement in declared}
    names |= {"prometheus_client"} if "vllm" in names else set()  # comes with it
    known = {IMPORT_NAMES.get(name, name) for name in names} | set(sys.stdlib_module_names) | {"retain"}
    others = tuple(other for other in FOLDERS.values() if other not in ("retain", package))
    used = {
        target.partition(".")[0]
        for module in sources()
        if within(module, package) and not within(module, *others)
        for target in imported_modules(module)
    }
    assert used - known == set()
