"""Compiles kernels ahead of time, for GPUs that need not be present.

    python -m retain.kernels.build [--op NAME ...] [--arch 80 90 100]

Each op's launcher lists its `builds()`: every kernel with every tile that the launcher can choose, read from
the launcher's own tile tables. Printed is a table of shared memory, registers and spilled bytes. The exit
status is 1 if a kernel needs more shared memory than a block of that architecture may have, or if a kernel
that should use Hopper's matrix instructions does not, or waits after each of them.
"""

import argparse
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

OPS = ("attention_stats", "gated_attention", "ragged_attention", "decode_step")
# Bytes of shared memory that one block may take (CUDA programming guide, by compute capability). A build for
# 8.0 also runs on 8.6, 8.9 and 12.0, whose blocks have the least: 99 KiB, of the 163 of 8.0 itself.
SHARED_LIMIT = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# What kernels are compiled for, unless a build says more.
ARCHS = (80, 90)


@dataclass(frozen=True)
class Tile:
    """How the work of one program is cut.

    Args:
        m: rows at a time (queries or entries).
        n: columns at a time (keys, columns of a weight, or words).
        num_warps: of a program.
        num_stages: of software pipelining: loads under way.
        registers: that a thread may take, so that two programs fit a processor; None: no bound.
        depth: of the head width at a time; None: all of it.
    """

    m: int
    n: int
    num_warps: int
    num_stages: int
    registers: int | None = None
    depth: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Build:
    """One kernel as its launcher would launch it.

    Args:
        name: of the configuration, for the table: "stats bf16 D=128 max".
        kernel: the `triton.jit` function.
        types: of run-time arguments ("*bf16", "i64", "fp32"); "i32" where none is named. Names that the
            kernel does not have are left out.
        constants: value of each `tl.constexpr` argument, and of arguments that are specialised; a pointer
            that is None belongs here too. Names that the kernel does not have are left out.
        tile: whose warps, stages and registers are compiled for.
        vectors: whole numbers that are multiples of 16, as the strides of vectors are; pointers always are.
        wgmma: whether it must use Hopper's matrix instructions (on 90).
        archs: compute capabilities for which its launcher would choose this.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    tile: Tile
    vectors: Collection[str] = ()
    wgmma: bool = False
    archs: Sequence[int] = ARCHS

    @property
    def signature(self) -> dict[str, str]:
        """Type of each run-time argument, in the kernel's order."""
        names = [name for name in self.kernel.arg_names if name not in self.constants]
        return {name: self.types.get(name, "i32") for name in names}

    @property
    def aligned(self) -> list[str]:
        """Run-time arguments that are multiples of 16."""
        return [name for name, kind in self.signature.items() if kind[0] == "*" or name in self.vectors]


@dataclass(frozen=True)
class Built:
    """Resources of a compiled kernel.

    Args:
        build: its configuration.
        arch: the compute capability.
        shared: bytes of shared memory of a block.
        registers: of a thread.
        spilled: bytes of local memory of a thread: spilled registers and arrays.
        wgmma: whether Hopper's matrix instructions are in it.
        problems: what is wrong with it.
    """

    build: Build
    arch: int
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    wgmma: bool = False
    problems: tuple[str, ...] = ()


def builds_of(op: str) -> list[Build]:
    """The builds of an op."""
    return list(importlib.import_module(f"retain.kernels.{op}.launch").builds())


def compile_build(build: Build, arch: int) -> Built:
    """Compiles down to machine code; no GPU is needed.

    Raises:
        ValueError: Triton interprets kernels in this process.
    """
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise ValueError("TRITON_INTERPRET=1: kernels are interpreted in this process; unset it to compile.")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(build.kernel.arg_names)
    signature = {name: build.signature.get(name, "constexpr") for name in names}
    constants = {name: value for name, value in build.constants.items() if name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned}
    source = ASTSource(build.kernel, signature, constexprs=constants, attrs=attrs)
    options = {**build.tile.options, "maxnreg": build.tile.registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    found = re.search(
        r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)",
        _tool("cuobjdump", compiled.asm["cubin"], "--dump-resource-usage", "{}"),
    )
    assert found, f"{build.name}: no resources are listed"
    shared, wgmma = compiled.metadata.shared, "wgmma.mma_async" in compiled.asm["ptx"]
    problems = []
    if shared > SHARED_LIMIT[arch]:
        problems.append(f"{shared} bytes of shared memory, {SHARED_LIMIT[arch]} exist")
    if build.wgmma and arch == 90:
        if not wgmma:
            problems.append("no wgmma instruction")
        elif _serialised(compiled.asm["ptx"], arch):
            problems.append("waits after every wgmma")
    spilled = int(found[2]) + int(found[3])
    return Built(build, arch, shared, int(found[1]), spilled, wgmma, tuple(problems))


def _serialised(ptx: str, arch: int) -> bool:
    """Whether the assembler gave up keeping matrix products in flight (its notes C7510 and following): two
    loops in a row that multiply, or results that are read too early, make it wait after each of them."""
    options = ("-v", f"--gpu-name=sm_{arch}a", "{}", "-o", "{}.cubin")
    return "wgmma.mma_async instructions are serialized" in _tool("ptxas", ptx.encode(), *options)


def _tool(name: str, content: bytes, *arguments: str) -> str:
    """Output of a program of NVIDIA's that comes with Triton, about a file (`{}`) with this content."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel"
        file.write_bytes(content)
        command = [str(program), *(argument.replace("{}", str(file)) for argument in arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def compile_all(ops: Sequence[str], archs: Sequence[int]) -> Iterator[tuple[str, Built]]:
    """Every build of these ops, for each architecture for which its launcher would choose it. A kernel that
    does not compile is a problem like others; its error goes to standard error."""
    for op in ops:
        for build in builds_of(op):
            for arch in (arch for arch in archs if arch in build.archs):
                try:
                    built = compile_build(build, arch)
                except Exception:  # any error of a compiler is a row of the table, and the status is 1
                    traceback.print_exc(file=sys.stderr)
                    built = Built(build, arch, problems=("does not compile",))
                yield op, built


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m retain.kernels.build", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS, help="default: all")
    parser.add_argument("--arch", nargs="+", type=int, choices=SHARED_LIMIT, default=SHARED_LIMIT)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        parser.error("Triton is not installed (pip install 'retain-kv[kernels]')")
    wrong = number = 0
    total = sum(arch in build.archs for op in options.op for build in builds_of(op) for arch in options.arch)
    for op, built in tqdm(compile_all(options.op, options.arch), "builds", total, leave=False):
        number += 1
        wrong += bool(built.problems)
        tqdm.write(
            f"{op:18} sm_{built.arch} {built.build.name:44} shared {built.shared:6} "
            f"registers {built.registers:3} spilled {built.spilled:4} "
            f"{'wgmma' if built.wgmma else '-':5} {'; '.join(built.problems) or 'ok'}"
        )
    print(f"{number} compiled, {wrong} wrong")
    return 1 if wrong or not number else 0


if __name__ == "__main__":
    sys.exit(main())
