"""Kernels compiled ahead of time, for GPUs that need not be there: what would be launched compiles, and fits.

    python -m retain.kernels.build [--op NAME ...] [--arch 80 90]

In: the `builds()` of each op's launcher: every kernel with every tile that its launcher can choose. Out:
a table of shared memory, registers and spilled bytes, and exit status 1 if any kernel needs more shared
memory than a block of that architecture may have, or if a kernel that should use Hopper's matrix
instructions does not, or waits after each of them. The one decision taken here: launchers and builds read
the same tile tables, so that what is compiled here is what runs there.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OPS = ("attention_stats", "value_norm", "gated_attention", "ragged_attention", "compact")
# Bytes of shared memory that one block may take (CUDA programming guide, by compute capability). What is
# built for 8.0 also runs on 8.6, 8.9 and 12.0, whose blocks have the least: 99 KiB, of the 163 of 8.0 itself.
SHARED_LIMIT = {80: 99 * 1024, 90: 227 * 1024}


@dataclass(frozen=True)
class Build:
    """One kernel as its launcher would launch it.

    Args:
        name: of the configuration, for the table: "stats bf16 D=128 max".
        kernel: the `triton.jit` function.
        signature: type of each run-time argument ("*bf16", "i32", "i64", "fp32"), in the kernel's order.
        constants: value of each `tl.constexpr` argument; pointers that are None belong here too.
        num_warps: of a program.
        num_stages: of software pipelining.
        aligned: run-time arguments that are multiples of 16: pointers as torch allocates them, and strides.
        wgmma: whether it must use Hopper's matrix instructions (on 90).
        archs: compute capabilities for which its launcher would choose this.
        registers: that a thread may take; None: as many as it wants.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    aligned: Sequence[str] = ()
    wgmma: bool = False
    archs: Sequence[int] = (80, 90)
    registers: int | None = None


@dataclass(frozen=True)
class Built:
    """What came out.

    Args:
        build: what was compiled.
        arch: for which compute capability.
        shared: bytes of shared memory of a block.
        registers: of a thread.
        spilled: bytes of local memory of a thread: spilled registers and arrays.
        wgmma: whether Hopper's matrix instructions are in it.
    """

    build: Build
    arch: int
    shared: int
    registers: int
    spilled: int
    wgmma: bool
    problems: tuple[str, ...] = field(default=())


def builds_of(op: str) -> list[Build]:
    """The builds of an op."""
    module = (
        "launch" if op == "attention_stats" else "kernel"
    )  # of the one, the launcher is a file of its own
    return list(importlib.import_module(f"retain.kernels.{op}.{module}").builds())


def compile_build(build: Build, arch: int) -> Built:
    """Compile down to machine code; no GPU is needed.

    Raises:
        ValueError: Triton interprets kernels in this process.
    """
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise ValueError("TRITON_INTERPRET=1: kernels are interpreted in this process; unset it to compile.")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(build.kernel.arg_names)
    assert set(build.signature) | set(build.constants) == set(names), (
        f"{build.name}: arguments {sorted(set(names) ^ (set(build.signature) | set(build.constants)))} "
        "are named on one side only"
    )
    signature = {name: build.signature.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned}
    source = ASTSource(build.kernel, signature, constexprs={**build.constants}, attrs=attrs)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "maxnreg": build.registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spilled = _resources(compiled.asm["cubin"])
    wgmma = "wgmma.mma_async" in compiled.asm["ptx"]
    problems = []
    if compiled.metadata.shared > SHARED_LIMIT[arch]:
        problems.append(f"{compiled.metadata.shared} bytes of shared memory, {SHARED_LIMIT[arch]} exist")
    if build.wgmma and arch == 90:
        if not wgmma:
            problems.append("no wgmma instruction")
        elif _serialised(compiled.asm["ptx"], arch):
            problems.append("waits after every wgmma")
    return Built(build, arch, compiled.metadata.shared, registers, spilled, wgmma, tuple(problems))


def _serialised(ptx: str, arch: int) -> bool:
    """Whether the assembler gave up keeping matrix products in flight (its notes C7510 and following): two
    loops in a row that multiply, or results that are read too early, make it wait after each of them."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [str(_tool("ptxas")), "-v", f"--gpu-name=sm_{arch}a", str(source), "-o", f"{source}.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    return "wgmma.mma_async instructions are serialized" in said.stdout + said.stderr


def _tool(name: str) -> Path:
    """A program of NVIDIA's that comes with Triton."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and local bytes of a thread, read by the tool that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_tool("cuobjdump")), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", said)
    assert found, f"cuobjdump said {said!r}"
    return int(found[1]), int(found[2]) + int(found[3])


def compile_all(ops: Sequence[str], archs: Sequence[int]) -> Iterator[tuple[str, Built]]:
    """Every build of these ops, for each architecture for which its launcher would choose it; what does not
    compile is a problem like others, and its error goes to standard error."""
    for op in ops:
        for build in builds_of(op):
            for arch in archs:
                if arch not in build.archs:
                    continue
                try:
                    built = compile_build(build, arch)
                except Exception:  # whatever a compiler raises is a row of the table, and the status is 1
                    traceback.print_exc(file=sys.stderr)
                    built = Built(build, arch, 0, 0, 0, False, ("does not compile",))
                yield op, built


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m retain.kernels.build", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS, help="default: all")
    parser.add_argument("--arch", nargs="+", type=int, choices=sorted(SHARED_LIMIT), default=[80, 90])
    given = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        parser.error("Triton is not installed (pip install 'retain[kernels]')")
    wrong = number = 0
    for op, built in compile_all(given.op, given.arch):
        number += 1
        wrong += bool(built.problems)
        verdict = "; ".join(built.problems) or "ok"
        print(
            f"{op:18} sm_{built.arch} {built.build.name:44} shared {built.shared:6} "
            f"registers {built.registers:3} spilled {built.spilled:4} "
            f"{'wgmma' if built.wgmma else '-':5} {verdict}",
            flush=True,
        )
    print(f"{number} compiled, {wrong} wrong")
    return 1 if wrong or not number else 0


if __name__ == "__main__":
    sys.exit(main())
