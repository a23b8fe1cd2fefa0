"""Compiles kernels ahead of time, for GPUs that need not be present.

    python -m retain.kernels.build [--op NAME ...] [--arch 80 90 100]

Each op's `cases.BUILDS` is a table of calls. Each is launched as on such a GPU, with tensors on the CPU, and
what Triton would compile for the launch is compiled and not run. Printed are the tile, shared memory,
registers and spilled bytes of each kernel. The exit status is 1 if a kernel needs more shared memory than a
block of that architecture may have, or if one that should use Hopper's matrix instructions does not, or waits
after each of them.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from retain.kernels.backend import compiling_for, dtype_name

OPS = ("attention_stats", "gated_attention", "ragged_attention", "decode_step")
# Bytes of shared memory that one block may take (CUDA programming guide, by compute capability). A build for
# 8.0 also runs on 8.6, 8.9 and 12.0, whose blocks have the least: 99 KiB, of the 163 of 8.0 itself.
SHARED_LIMIT = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Kernels whose products take Hopper's matrix instructions, if the rows of a tile (that constant) are 64.
WGMMA = {
    **{"lse_kernel": "BLOCK_M", "stats_kernel": "BLOCK_N", "attend": "M"},
    **{"forward_": "BLOCK_S", "d_queries_": "BLOCK_S", "d_keys_": "BLOCK_T"},
}
# Constants that are the rows and the columns of a tile.
TILES = ("M", "BLOCK_M", "BLOCK_S", "BLOCK_G", "N", "BLOCK_N", "BLOCK_T")


@dataclass(frozen=True)
class Tile:
    """Rows (queries) and columns (keys) of a program at a time, its warps, loads under way, and registers
    that a thread may take, so that two programs fit a processor (None: no bound)."""

    m: int
    n: int
    num_warps: int
    num_stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@contextmanager
def compiling(arch: int) -> Iterator[list[tuple[Any, dict[str, Any], Any]]]:
    """Launches inside only compile, for such a GPU: kernel, arguments and result of each that is new.

    Raises:
        ValueError: Triton interprets kernels in this process.
    """
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise ValueError("TRITON_INTERPRET=1: kernels are interpreted in this process; unset it to compile.")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: list[tuple[Any, dict[str, Any], Any]] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        built = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        if all(built is not other for _, _, other in found):
            found.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs, built))

    # Triton keeps what it compiled by the number of a device.
    target = GPUTarget("cuda", arch, 32)
    device: Any = SimpleNamespace(get_current_device=lambda: arch, get_current_stream=lambda device: 0)
    device.get_current_target = lambda: target
    driver.set_active(device)
    JITFunction.run = compile_only
    try:
        with compiling_for(arch):
            yield found
    finally:
        JITFunction.run = run


def builds_of(op: str, arch: int) -> Iterator[tuple[str, list[str]]]:
    """A row of the table for each kernel of an op, with the first call of `BUILDS` that takes it, and what is
    wrong with it. The error of a call that does not compile goes to standard error."""
    cases = importlib.import_module(f"retain.kernels.{op}.cases")
    with compiling(arch) as found:
        for place, (dtype, case) in enumerate(cases.BUILDS):
            before, call = len(found), f"{op} sm_{arch} call {place}, {dtype_name(dtype)}:"
            try:
                cases.run(case, cases.inputs(case, dtype, "cpu"))
            except Exception:  # any error of a compiler is a row of the table, and the status is 1
                traceback.print_exc(file=sys.stderr)
                yield call, ["does not compile"]
            for kernel, arguments, built in found[before:]:
                row, problems = examined(kernel, arguments, built, arch)
                yield f"{call} {row}", problems


def examined(kernel: Any, arguments: dict[str, Any], built: Any, arch: int) -> tuple[str, list[str]]:
    """Tile and resources of a compiled kernel, and what is wrong."""
    name, ptx, shared = kernel.fn.__name__, built.asm["ptx"], built.metadata.shared
    usage = _tool("cuobjdump", built.asm["cubin"], "--dump-resource-usage", "{}")
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert found, f"{name}: no resources are listed"
    wgmma, problems = "wgmma.mma_async" in ptx, []
    if shared > SHARED_LIMIT[arch]:
        problems.append(f"{shared} bytes of shared memory, {SHARED_LIMIT[arch]} exist")
    if arch == 90 and arguments.get(WGMMA.get(name, ""), 0) >= 64 and arguments["PRECISION"] != "ieee":
        if not wgmma:
            problems.append("no wgmma instruction")
        elif _serialised(ptx, arch):
            problems.append("waits after every wgmma")
    tile = "x".join(str(arguments[key]) for key in TILES if key in arguments)
    row = f"{name} D={arguments.get('D')} {tile} warps {built.metadata.num_warps} shared {shared}"
    return f"{row} registers {found[1]} spilled {int(found[2]) + int(found[3])}{' wgmma' * wgmma}", problems


def _serialised(ptx: str, arch: int) -> bool:
    """Tells whether the assembler gave up keeping matrix products in flight (its notes C7510 and following):
    two loops in a row that multiply, or results that are read too early, make it wait after each of them."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m retain.kernels.build", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS, help="default: all")
    parser.add_argument("--arch", nargs="+", type=int, choices=SHARED_LIMIT, default=SHARED_LIMIT)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        parser.error("Triton is not installed (pip install 'retain-kv[kernels]')")
    number = wrong = 0
    for op, arch in ((op, arch) for op in options.op for arch in options.arch):
        for row, problems in builds_of(op, arch):
            number, wrong = number + 1, wrong + bool(problems)
            print(row, "; ".join(problems) or "ok", flush=True)
    print(f"{number} compiled, {wrong} wrong")
    return 1 if wrong or not number else 0


if __name__ == "__main__":
    sys.exit(main())
