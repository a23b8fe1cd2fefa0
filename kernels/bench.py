"""Benchmarks the ops beside their rivals and this machine's copy.

    python -m retain.kernels.bench [--op NAME ...] [--device cpu|cuda]

Each op's `cases` file gives named shapes, inputs, rivals and claims. Printed is
Markdown, by convention kept as kernels/benchmarks/<device>-<date>.md, with a line for each claim that holds
or does not. An op that is wrong on a small case or on a shape to be timed is an error, before its times.

The op, its rivals and a large copy are called in turn, in a shuffled order, and every ratio is the median
over rounds of its values within a round: a machine that drifts, or that others use, moves all of them. Where
`cases.GRAPHED`, calls on a GPU are replayed as CUDA graphs, rivals too, so that no time has the host's part.
"""

import argparse
import importlib
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retain.kernels import backend
from retain.kernels.build import OPS
from retain.kernels.measure import Claim, check, quiet

COPY = "copy"
# The precision that is timed, and the bytes that the copy reads.
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
# Written over before each call that is timed on CUDA: more than any L2 holds, and long enough to write (a
# quarter of a millisecond on an H200) that Python has the call's launches ready when it is through.
FLUSH_BYTES = 2**30
# Rounds are as many as fit into so many seconds a shape, within these bounds.
SECONDS, ROUNDS, WARM_UP = 6.0, (7, 60), 2


def milliseconds(run: Callable[[], Any], flush: torch.Tensor) -> float:
    """Time of one call, whose result is freed when the clock has stopped.

    On CUDA by events, behind a write to `flush`, so that no call finds its inputs in the L2 cache because the
    one before left them. Elsewhere by the processor's clock.
    """
    if not flush.is_cuda:
        start = time.perf_counter()
        _held = run()
        return 1e3 * (time.perf_counter() - start)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    before.record()
    _held = run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call that ran before, captured in a CUDA graph, to be replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()  # held, since a replay writes it
    return partial(lambda _result: graph.replay(), result)


def measure(op: str, cases: Any, case: Any, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each round, of an op, its rivals and the copy, by name."""
    flush = torch.empty(FLUSH_BYTES * (device.type == "cuda"), dtype=torch.int8, device=device)
    kwargs = cases.inputs(case, DTYPE[device.type], device)
    calls: dict[str, Callable[[], Any]] = {op: partial(cases.run, case, kwargs), **cases.rivals(case, kwargs)}
    # Not zeros, which some devices move faster.
    source = torch.randint(-128, 128, (COPY_BYTES[device.type],), dtype=torch.int8, device=device)
    calls[COPY] = partial(torch.empty_like(source).copy_, source)
    for call in (*calls.values(),) * WARM_UP:
        milliseconds(call, flush)
    if device.type == "cuda" and cases.GRAPHED:
        calls = {name: graphed(call) for name, call in calls.items()}
    ms: dict[str, list[float]] = {name: [] for name in calls}
    names, end, draw = list(calls), time.monotonic() + SECONDS, random.Random(0)
    for turn in range(ROUNDS[1]):
        # Shuffled, so that no call always finds in the caches what the same other one has left there.
        draw.shuffle(names)
        for name in names:
            ms[name].append(milliseconds(calls[name], flush))
        if turn + 1 >= ROUNDS[0] and time.monotonic() > end:
            break
    return ms


def spread_of(values: Sequence[float]) -> tuple[float, str]:
    """The median of at least two values, and it with the 20th and 80th percentile as text."""
    low, _, _, high = statistics.quantiles(values, n=5, method="inclusive")
    median = statistics.median(values)
    return median, f"{median:.3f} ({low:.3f} .. {high:.3f})"


def over(ms: dict[str, list[float]], op: str, rival: str, factor: float = 1.0) -> list[float]:
    """The op's time over a rival's within rounds, times a factor."""
    return [factor * mine / other for mine, other in zip(ms[op], ms[rival], strict=True)]


def verdict(claim: Claim, op: str, ms: dict[str, list[float]], least: float, copied: float) -> str:
    """The line of a claim: its measured value, and whether it is held; the op moves `least` bytes at least,
    and the copy `copied`."""
    if claim.rival == COPY:
        median, text = spread_of([1 / one for one in over(ms, op, COPY, copied / least)])
        held, text = median >= claim.bound, f"{text} of the copy's bandwidth, at least {claim.bound:g}"
    else:
        median, text = spread_of(over(ms, op, claim.rival))
        held, text = median <= claim.bound, f"{text} x {claim.rival}, at most {claim.bound:g}"
    return f"{'held' if held else '**NOT held**'}: {op}, {claim.case}: {text}"


def section(op: str, device: torch.device) -> Iterator[str]:
    """Markdown of one op, line by line.

    Raises:
        ValueError: the op is wrong; then nothing was timed.
    """
    cases, copied = importlib.import_module(f"retain.kernels.{op}.cases"), 2.0 * COPY_BYTES[device.type]
    shapes = cases.SPEED[device.type]
    for name, case in [*cases.CASES.items(), *shapes.items()]:
        if (problem := check(cases, case, DTYPE[device.type], device)) is not None:
            raise ValueError(f"wrong on {name}, so that no speed is shown: {problem}")
    paths = dict.fromkeys(f"{path} {why}" for name, path, why in backend.said() if name == op)
    yield f"\n## {op}\n\n- {DTYPE[device.type]}, by {', '.join(paths) or 'the op'}"
    for name, case in shapes.items():
        ms = measure(op, cases, case, device)
        yield f"\n### {op}, {name}, {len(ms[op])} rounds\n"
        yield "| what | ms | op's ms / its ms |\n| --- | ---: | ---: |"
        for row, taken in ms.items():
            ratio = spread_of(over(ms, op, row))[1] if row not in (op, COPY) else ""
            yield f"| {row} | {spread_of(taken)[1]} | {ratio} |"
        yield ""
        for claim in (claim for claim in cases.CLAIMS if claim.case == name):
            least = cases.least_bytes(case, DTYPE[device.type]) if claim.rival == COPY else 0.0
            yield f"- {verdict(claim, op, ms, least, copied)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m retain.kernels.bench", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS, help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here, help=f"default here: {here}")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    with quiet(None):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "none"
        where = f"{datetime.now(UTC):%Y-%m-%d %H:%M}, {name}, load {os.getloadavg()[0]:.2f}"
        print(f"# Speed of the kernels\n\n{where}, torch {torch.__version__}, commit {commit}", flush=True)
        for op in options.op:
            for line in section(op, device):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
