"""Every kernel, with every tile that its launcher can choose, compiles for sm_80 and sm_90, and fits."""

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


def test_the_limits_are_those_of_the_programming_guide():
    assert SHARED_LIMIT == {80: 101_376, 90: 232_448}


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
    assert {arch for arch, _ in wanted} == {80, 90}
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


def test_entries_are_what_no_kernel_calls():
    tree = ast.parse(
        "@triton.jit\ndef part(x): return x\n"
        "@triton.jit\ndef whole(x): part(x)\n"
        "@triton.jit(noinline=True)\ndef other(x): pass\n"
        "def launch(x): whole[(1,)](x)\n"
    )
    assert set(jitted([tree])) == {"part", "whole", "other"}
    assert entries([tree]) == {"whole", "other"}


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_has_builds(op):
    built = {build.kernel.fn.__name__ for build in builds_of(op)}
    kernels = entries(sources(op))
    assert kernels, f"{op} has no kernel"
    assert built == kernels


@pytest.mark.parametrize("op", OPS)
def test_what_multiplies_matrices_asks_for_hoppers_instructions(op):
    """At least one build of each kernel with `tl.dot` does, one with 64 rows in half precision; no others."""
    kernels = jitted(sources(op))

    def multiplies(name: str) -> bool:
        calls = [ast.unparse(node.func) for node in ast.walk(kernels[name]) if isinstance(node, ast.Call)]
        return "tl.dot" in calls or any(multiplies(call) for call in calls if call in kernels)

    asking = {build.kernel.fn.__name__ for build in builds_of(op) if build.wgmma}
    assert asking == {name for name in entries(sources(op)) if multiplies(name)}


TOO_LARGE = """
import sys
import triton
import triton.language as tl
from retain.kernels import build
from retain.kernels.build import Build, Tile

@triton.jit
def product(left, right, out, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    at = row * N + column
    tl.store(out + at, tl.dot(tl.load(left + at), tl.load(right + at)))

@triton.jit
def doubled(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, 2 * tl.load(x + at))

@triton.jit
def retyped(x, out, N: tl.constexpr):
    at = x + tl.arange(0, N)
    for _ in range(N):
        at = tl.load(at)
    tl.store(out, at)

def product_of(n):
    pointers = {"left": "*bf16", "right": "*bf16", "out": "*fp32"}
    return Build(f"product of {n}", product, pointers, {"N": n}, Tile(1, 1, 8, 2))

def doubling(kernel=doubled, **more):
    return Build("doubling", kernel, {"x": "*fp32", "out": "*fp32"}, {"N": 128}, Tile(1, 1, 4, 2), **more)

LISTS = {
    "too large": [product_of(64), product_of(256)],
    "no wgmma": [doubling(wgmma=True)],
    "fine": [product_of(64), doubling(archs=(90,))],
    "broken": [doubling(retyped), doubling()],
    "nothing": [],
}
for what, arch in (case.split(":") for case in sys.argv[1:]):
    build.builds_of = lambda op: LISTS[what]
    status = build.main(["--op", "compact", "--arch", arch])
    print(f"== {what}:{arch} {status}")
"""
VERDICTS = {
    "too large:90": (1, r"product of 256 .* bytes of shared memory, 232448 exist\n2 compiled, 1 wrong"),
    "no wgmma:90": (1, r"doubling .*no wgmma instruction\n1 compiled, 1 wrong"),
    "no wgmma:80": (0, r"doubling .*ok\n1 compiled, 0 wrong"),
    "fine:80": (0, r"product of 64 .*ok\n1 compiled, 0 wrong"),
    "broken:80": (1, r"doubling .*does not compile\n.*doubling .*ok\n2 compiled, 1 wrong"),
    "nothing:90": (1, r"0 compiled, 0 wrong"),
}


def test_the_command_says_what_is_wrong(tmp_path):
    script = tmp_path / "lists.py"
    script.write_text(TOO_LARGE)
    done = subprocess.run(
        [sys.executable, str(script), *VERDICTS],
        cwd=tmp_path,
        env=compiling(tmp_path / "cache"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("CompilationError") == 1 and "Loop-carried variable at" in done.stderr
    *parts, rest = re.split(r"^== ", done.stdout, flags=re.MULTILINE)
    assert rest.count("\n") == 1 and len(parts) == len(VERDICTS)
    heads = [part.splitlines()[0] for part in (*parts[1:], rest)]
    for part, head, (case, (status, said)) in zip(parts, heads, VERDICTS.items(), strict=True):
        assert head == f"{case} {status}"
        assert re.search(said, part), part


def test_kernels_that_are_interpreted_cannot_be_compiled(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="kernels are interpreted in this process; unset it to compile"):
        compile_build(Build("any", None, {}, {}, Tile(1, 1, 4, 2)), 90)
