"""Compiles every op for sm_80, sm_90 and sm_100, with every tile of its launcher: each fits."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retain.kernels import backend
from retain.kernels.build import OPS, SHARED_LIMIT

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {
    "attention_stats": {"lse_kernel", "stats_kernel"},
    "gated_attention": {"forward_", "d_queries_", "d_keys_"},
    "ragged_attention": {"attend", "combine"},
    "decode_step": {"step"},
}
# Bytes of spilled registers that a thread may have in half precision up to D = 128: not none, since another
# release of Triton spills other ones.
FEW = 32
ROW = re.compile(
    r"(\S+) sm_(\d+) call \d+, (?P<dtype>\w+): (?P<kernel>\w+) D=(?P<width>\w+) (?P<tile>\S*) "
    r"warps (?P<warps>\d+) shared (?P<shared>\d+) registers (?P<registers>\d+) spilled (?P<spilled>\d+)"
    r"(?P<wgmma> wgmma)? ok"
)


def tiles_of(op, arch):
    """Kernel, tile and warps of every choice that a launcher has."""
    shapes = itertools.product(backend.DTYPES, (64, 128, 256), (False, True))
    for dtype, block, more in shapes:
        if op == "attention_stats":
            from retain.kernels.attention_stats.launch import tile

            for name, number in itertools.product(("lse", "stats"), (16, 5000)):
                yield f"{name}_kernel", tile(name, dtype, block, arch, number, busy=more)
        elif op == "gated_attention":
            from retain.kernels.gated_attention.launch import tile as tile_of

            for name in ("forward", "d_queries", "d_keys"):
                yield f"{name}_", tile_of(name, dtype, block, arch, fuller=more and dtype != torch.float32)
        elif op == "ragged_attention":
            from retain.kernels.ragged_attention.launch import tile as tile_for

            yield from (("attend", tile_for(rows, dtype, block, arch)) for rows in (4, 64, 512))


@pytest.mark.slow  # minutes of compiling
@pytest.mark.parametrize("arch", SHARED_LIMIT)
@pytest.mark.parametrize("op", OPS)
def test_every_call_compiles_and_fits(op, arch, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "retain.kernels.build", "--op", op, "--arch", str(arch)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    rows = [match.groupdict() for line in lines if (match := ROW.fullmatch(line))]
    assert len(rows) == len(lines) > 0, done.stdout
    assert last == f"{len(rows)} compiled, 0 wrong"
    assert {row["kernel"] for row in rows} == KERNELS[op]
    for row in rows:
        assert int(row["shared"]) <= SHARED_LIMIT[arch] and 0 < int(row["registers"]) <= 255, row
        if row["dtype"] != "float32" and row["width"] != "None" and int(row["width"]) <= 128:
            assert int(row["spilled"]) <= FEW, row
    # A decoding step has 16 rows; of the others each kernel that multiplies takes Hopper's instructions.
    asking = {row["kernel"] for row in rows if row["wgmma"]}
    several = KERNELS[op] - {"combine", "step"}
    assert asking == (several if arch == 90 else set())
    built = {(row["kernel"], row["tile"], row["warps"]) for row in rows}
    assert {(name, f"{cut.m}x{cut.n}", str(cut.num_warps)) for name, cut in tiles_of(op, arch)} <= built


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_is_named(op):
    """Those whose names begin with _ are parts of others."""
    text = (ROOT / "kernels" / op / "kernel.py").read_text()
    assert {*re.findall(r"@triton\.jit[^\n]*\ndef ([a-z]\w*)\(", text)} == KERNELS[op]
