"""Compiles every kernel for sm_80 and sm_90, a decoding step for sm_100 too, with every tile of its launcher:
each fits."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from retain.kernels.build import OPS, SHARED_LIMIT, Build, Tile, builds_of, compile_build

ROOT = Path(__file__).resolve().parents[2]
# Bytes of spilled registers that a thread may have in half precision up to D = 128: not none, since another
# release of Triton spills other ones.
FEW = 32
ROW = re.compile(
    r"(?P<op>\S+) +sm_(?P<arch>\d+) (?P<name>.+?) +shared +(?P<shared>\d+) registers +(?P<registers>\d+) "
    r"spilled +(?P<spilled>\d+) (?P<wgmma>wgmma|-) +(?P<verdict>.+)"
)


def compiling(cache: Path, **more: str) -> dict[str, str]:
    """The environment of a process in which Triton compiles, into a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache), **more}
    environment.pop("TRITON_INTERPRET", None)
    return environment


@pytest.mark.parametrize("op", OPS)
def test_every_build_compiles_and_fits(op, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "retain.kernels.build", "--op", op],
        cwd=ROOT,
        env=compiling(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    rows = [match.groupdict() for line in lines if (match := ROW.fullmatch(line))]
    assert len(rows) == len(lines) > 0, done.stdout
    assert last == f"{len(rows)} compiled, 0 wrong"
    wanted = [(arch, build.name) for build in builds_of(op) for arch in SHARED_LIMIT if arch in build.archs]
    assert [(int(row["arch"]), row["name"]) for row in rows] == wanted
    assert len(set(wanted)) == len(wanted), "two builds of one name"
    assert {arch for arch, _ in wanted} == {80, 90, *([100] if op == "decode_step" else [])}
    asked = {build.name for build in builds_of(op) if build.wgmma}
    for row in rows:
        assert row["op"] == op and row["verdict"] == "ok"
        assert 0 <= int(row["shared"]) <= SHARED_LIMIT[int(row["arch"])], row
        assert 0 < int(row["registers"]) <= 255, row
        width = re.search(r"\b(?:bf16|fp16) D=(\d+)", row["name"])
        if width and int(width[1]) <= 128:
            assert int(row["spilled"]) <= FEW, row
        if row["arch"] == "90" and row["name"] in asked:
            assert row["wgmma"] == "wgmma", row


def sources(op: str) -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in sorted((ROOT / "kernels" / op).glob("*.py"))]


def jitted(trees: list[ast.Module]) -> dict[str, ast.FunctionDef]:
    """Functions under `triton.jit`, by name."""
    return {
        node.name: node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(re.search(r"\bjit\b", ast.unparse(decorator)) for decorator in node.decorator_list)
    }


def entries(trees: list[ast.Module]) -> set[str]:
    """Kernels: functions under `triton.jit` that no other of them calls."""
    kernels = jitted(trees)
    called = {
        call.func.id
        for kernel in kernels.values()
        for call in ast.walk(kernel)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    return set(kernels) - called


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_has_builds(op):
    built = {build.kernel.fn.__name__ for build in builds_of(op)}
    kernels = entries(sources(op))
    assert kernels, f"{op} has no kernel"
    assert built == kernels


@pytest.mark.parametrize("op", OPS)
def test_what_multiplies_matrices_asks_for_hoppers_instructions(op):
    """At least one build of each kernel with `tl.dot` does, one with 64 rows in half precision; no others,
    and not the decoding step, which has 16 rows."""
    kernels = jitted(sources(op))

    def multiplies(name: str) -> bool:
        calls = [ast.unparse(node.func) for node in ast.walk(kernels[name]) if isinstance(node, ast.Call)]
        return "tl.dot" in calls or any(multiplies(call) for call in calls if call in kernels)

    asking = {build.kernel.fn.__name__ for build in builds_of(op) if build.wgmma}
    assert asking == {name for name in entries(sources(op)) if multiplies(name) and op != "decode_step"}


def test_kernels_that_are_interpreted_cannot_be_compiled(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="kernels are interpreted in this process; unset it to compile"):
        compile_build(Build("any", None, {}, {}, Tile(1, 1, 4, 2)), 90)
