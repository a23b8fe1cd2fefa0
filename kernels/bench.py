"""Benchmarks the ops beside their alternatives and this machine's own copy and matmul rates.

    python -m retain.kernels.bench [--op NAME ...] [--device cpu|cuda] [--dtype NAME] [--threads N]
    [--check] [--out FILE]

Each op's `cases` file gives named shapes, inputs, the least work of a call, rivals and claims. Markdown goes
to standard output and to the named file (by convention kernels/benchmarks/<device>-<date>.md). The exit
status is 1 if an op was wrong or broke: an op that is wrong on one of its small cases or on a shape to be
timed gets no speed for any shape. A claim that is not held is reported and is no failure.

Everything is timed in turn, in a shuffled order, and every share and ratio is the median over rounds of its
values within a round. The machine's ceilings, a large copy and a large matrix product, take turns too: a
machine that drifts, or that others use, moves them with the op. A timed call must do the same work each
time.
"""

import argparse
import gc
import importlib
import random
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from retain.kernels import backend
from retain.kernels.backend import dtype_name
from retain.kernels.build import OPS
from retain.kernels.measure import (
    Claim,
    Clock,
    Cost,
    Spread,
    extra_bytes,
    load,
    provenance,
    quiet,
    spread_of,
    synchronise,
)
from retain.kernels.provenance import write

DTYPES = {dtype_name(dtype): dtype for dtype in backend.DTYPES}
COPY, MATMUL = "copy", "matmul"
# Bytes that the copy reads, and side of the square matrices; on a CPU, sizes that do not take all its time.
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
MATMUL_SIDE = {"cuda": 8192, "cpu": 1536}
# Rounds are as many as fit into so many seconds a shape, within these bounds.
SECONDS, ROUNDS = 12.0, (7, 60)
WARM_UP = 2


@dataclass(frozen=True)
class Measured:
    """Measurements of one op on one shape.

    Args:
        op: its name, which is also the name of its row in `ms`.
        cost: least work of a call.
        ms: milliseconds of each round, by name: the op, its rivals, `copy` and `matmul`.
        extra: bytes that a call held beyond inputs and outputs, of the op and its rivals.
        not_run: rivals that broke, and how.
        ceilings: bytes that the copy moves, and operations of the matrix product.
    """

    op: str
    cost: Cost
    ms: Mapping[str, Sequence[float]]
    extra: Mapping[str, int]
    not_run: Mapping[str, str] = field(default_factory=dict)
    ceilings: Mapping[str, float] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return len(self.ms[self.op])

    def over(self, rival: str) -> Spread:
        """The op's time over a rival's, within rounds."""
        return spread_of([own / other for own, other in zip(self.ms[self.op], self.ms[rival], strict=True)])

    def share(self, ceiling: str) -> Spread:
        """The op's bandwidth (or rate of operations) over that of the copy (or matrix product)."""
        work = self.cost.bytes if ceiling == COPY else self.cost.flops
        part = work / self.ceilings[ceiling]
        pairs = zip(self.ms[self.op], self.ms[ceiling], strict=True)
        return spread_of([part * other / own for own, other in pairs])


def ceilings(
    dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Calls that show the machine's rates, and the work of each: bytes read and written, and operations."""
    # Not zeros, which some devices move faster.
    source = torch.randint(-128, 128, (COPY_BYTES[device.type],), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    side = MATMUL_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {
        COPY: partial(target.copy_, source),
        MATMUL: partial(torch.matmul, left, right),
    }
    return calls, {COPY: 2.0 * source.numel(), MATMUL: 2.0 * side**3}


def red(cases: Any, dtype: torch.dtype, device: torch.device, *, check: bool) -> Iterator[str]:
    """Problems of an op, on its small cases and on the shapes that would be timed (`check`: none)."""
    for name, case in cases.CASES.items():
        for precision in backend.DTYPES if device.type == "cuda" else {torch.float32, dtype}:
            if (problem := cases.check(case, precision, device)) is not None:
                yield f"{name}, {dtype_name(precision)}: {problem}"
    for name, case in ({} if check else cases.SPEED[device.type]).items():
        if (problem := cases.check(case, dtype, device)) is not None:
            yield f"{name}, {dtype_name(dtype)}: {problem}"


def measure(op: str, cases: Any, case: Any, dtype: torch.dtype, device: torch.device) -> Measured:
    """Time an op beside its rivals and the machine's ceilings; see the head of this file.

    Raises:
        Exception: the op itself broke. A rival that breaks is left out, and said.
    """
    kwargs = cases.inputs(case, dtype, device)
    rivals = cases.rivals(case, kwargs)
    assert not {op, COPY, MATMUL} & set(rivals), f"{op}: a rival bears a name that is taken: {list(rivals)}"
    calls: dict[str, Callable[[], Any]] = {op: partial(cases.run, case, kwargs), **rivals}
    extra, not_run = {}, {}
    for name in list(calls):
        try:
            for _ in range(WARM_UP):
                calls[name]()
            extra[name] = extra_bytes(calls[name], device)
            synchronise(device)
        except Exception as error:  # a rival is somebody else's code, and may miss anything; it is named
            if name == op:
                raise
            not_run[name] = _short(error)
            del calls[name]
    limits, work = ceilings(dtype, device)
    calls = {**calls, **limits}
    clock = Clock(device)
    for call in limits.values():
        clock.milliseconds(call)
    low, high = ROUNDS
    ms: dict[str, list[float]] = {name: [] for name in calls}
    names, end = list(calls), time.monotonic() + SECONDS
    draw = random.Random(0)
    for turn in range(high):
        # Shuffled, so that no call always finds in the caches what the same other one has left there.
        draw.shuffle(names)
        for name in names:
            ms[name].append(clock.milliseconds(calls[name]))
        if turn + 1 >= low and time.monotonic() > end:
            break
    return Measured(op, cases.cost(case, dtype), ms, extra, not_run, work)


def verdict(claim: Claim, name: str, found: Measured) -> str | None:
    """One claim on one shape: its measured value and whether it is held; None: it is about another shape."""
    if claim.case not in (None, name):
        return None
    if claim.rival and claim.rival not in found.ms:
        why = found.not_run.get(claim.rival, "there is no such rival on this device")
        return f"**not measured**: {claim.what}: {claim.rival}: {why}"
    parts = []
    if (most := claim.at_most) is not None:
        over = found.over(claim.rival)
        parts.append((over.median <= most, f"{_range(over)} x {claim.rival}, at most {most:g}"))
    if (least := claim.at_least) is not None:
        share = found.share(claim.rival)
        parts.append((share.median >= least, f"{_range(share)} of {claim.rival}, at least {least:g}"))
    if (most := claim.extra_mb_at_most) is not None:
        extra = found.extra[found.op] / 1e6
        parts.append((extra <= most, f"{extra:.1f} MB beyond inputs and outputs, at most {most:g}"))
    assert parts, f"{found.op}: the claim {claim.what!r} has no bound"
    held = all(good for good, _ in parts)
    return f"{'held' if held else '**NOT held**'}: {claim.what}: {'; '.join(text for _, text in parts)}"


def table(found: Measured) -> list[str]:
    """The lines of a Markdown table: the op first, then its rivals, then the ceilings."""
    lines = [
        "| what | ms | 20 % | 80 % | op's ms / its ms | GB/s | of copy | TFLOP/s | of matmul | extra MB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, taken in found.ms.items():
        ms = spread_of(taken)
        over = rate = share = flops = part = ""
        if name == found.op:
            rate, share = f"{found.cost.bytes / ms.median / 1e6:.1f}", f"{found.share(COPY).median:.1%}"
            if found.cost.flops:
                flops = f"{found.cost.flops / ms.median / 1e9:.3f}"
                part = f"{found.share(MATMUL).median:.1%}"
        elif name == COPY:
            rate = f"{found.ceilings[COPY] / ms.median / 1e6:.1f}"
        elif name == MATMUL:
            flops = f"{found.ceilings[MATMUL] / ms.median / 1e9:.3f}"
        else:
            over = _range(found.over(name))
        extra = f"{found.extra[name] / 1e6:.1f}" if name in found.extra else ""
        times = (f"{value:.3f}" for value in (ms.median, ms.p20, ms.p80))
        cells = (name, *times, over, rate, share, flops, part, extra)
        lines.append(f"| {' | '.join(cells)} |".replace("|  ", "| "))
    lines += [f"| {name} | not run: {why} |||||||||" for name, why in found.not_run.items()]
    return lines


class Wrong(Exception):
    """An op is wrong; one line a case."""


def section(op: str, dtype: torch.dtype, device: torch.device, *, check: bool) -> Iterator[str]:
    """Markdown of one op, line by line; `check`: only whether its small cases are right.

    Raises:
        Wrong: the op is; then nothing was timed.
    """
    cases = importlib.import_module(f"retain.kernels.{op}.cases")
    before = backend.said()
    problems = list(red(cases, dtype, device, check=check))
    for name, path, why in (entry for entry in backend.said() if entry[0] == op or entry not in before):
        yield f"- path: {name} runs as {path}{': ' if why else ''}{why}"
    if problems:
        raise Wrong(*problems)
    if check:
        yield f"- right on {len(cases.CASES)} small cases; nothing was timed"
        return
    shapes = cases.SPEED[device.type]
    yield f"- right on {len(cases.CASES)} small cases and on {len(shapes)} shapes to be timed"
    for name, case in shapes.items():
        gc.collect()  # of the shape before
        found = measure(op, cases, case, dtype, device)
        yield from ("", f"### {op}, {name}, {dtype_name(dtype)}", "", f"`{case}`", "")
        work = f"{found.cost.flops / 1e9:.3f} GFLOP and {found.cost.bytes / 1e6:.1f} MB a call"
        yield from (f"{found.rounds} rounds; at least {work}", "", *table(found), "")
        verdicts = (verdict(claim, name, found) for claim in cases.CLAIMS.get(device.type, []))
        yield from (f"- {line}" for line in verdicts if line is not None)


def _range(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.p20:.3f} .. {spread.p80:.3f})"


def _short(error: BaseException) -> str:
    """An error on one line of a table."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line[:160]}".replace("|", "/")


def benchmark(
    ops: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    *,
    check: bool = False,
    command: str = "",
) -> Iterator[tuple[str, bool]]:
    """The whole report, part by part as it comes: Markdown, and whether what it is about was right."""
    head = ["# Speed of the kernels", ""]
    head += [f"- {name}: {what}" for name, what in provenance(device, torch.get_num_threads()).items()]
    head += [f"- command: `{command}`", ""]
    head += [
        "Medians, with 20th and 80th percentiles, over rounds in which the op, its rivals, a large copy and "
        "a large matrix product are called in turn. Ratios and shares are medians of those within a round. "
        "GB/s and TFLOP/s count the least that the op must do (inputs read once, outputs written once, its "
        "own matrix products); the copy's count what it reads and writes. Extra MB: the most that a call "
        "held beyond its inputs and outputs, in PyTorch's allocator.",
        "",
    ]
    yield "\n".join([*head, ""]), True
    for op in ops:
        lines, right = [f"## {op}", ""], False
        try:
            for line in section(op, dtype, device, check=check):
                lines.append(line)
            right = True
        except Wrong as error:
            lines += [*(f"- wrong: {problem}" for problem in error.args), ""]
            lines.append(f"**WRONG** in {len(error.args)} cases: no speed is shown.")
        except Exception as error:  # the other ops are still wanted; this one is said, and the status is 1
            traceback.print_exc(file=sys.stderr)
            lines += ["", f"**BROKE**: {_short(error)}"]
        yield "\n".join([*lines, "", ""]), right
    yield f"load after: {load():.2f}\n", True


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m retain.kernels.bench", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS, help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here, help=f"default here: {here}")
    parser.add_argument("--dtype", choices=DTYPES, help="timed; default float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--threads", type=int, help="CPU threads; default: as many as torch takes")
    parser.add_argument(
        "--check", action="store_true", help="the small cases alone, untimed (for sanitizers)"
    )
    parser.add_argument("--out", type=Path, help="file that the Markdown is also written to")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; take --device cpu")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads is a whole number of at least 1, got {options.threads}")
    typed = sys.argv[1:] if arguments is None else list(arguments)
    command = shlex.join(["python", "-m", "retain.kernels.bench", *typed])
    dtype = DTYPES[options.dtype or {"cpu": "float32", "cuda": "bfloat16"}[options.device]]
    text, right = "", True
    with quiet(options.threads):
        parts = benchmark(
            options.op, dtype, torch.device(options.device), check=options.check, command=command
        )
        # A head, a part an op, and an end.
        for part, good in tqdm(parts, "ops", 2 + len(options.op), unit="part", leave=False):
            tqdm.write(part, end="")
            text, right = text + part, right and good
            if options.out is not None:
                write(options.out, text)  # as far as it has come: a killed run leaves what it had
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
