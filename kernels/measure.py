"""Measures ops: least work, claims, tolerance of results, times, memory, and where they were taken.

A result is right by the project's tolerance rule: at most twice the error of plain PyTorch in the same
precision, plus a floor of some units in the last place. Nothing else is timed.
"""

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from retain.kernels import provenance as origin

# Error allowed beyond twice that of plain PyTorch, relative to the reference's largest magnitude. The home of
# these numbers is tests/close.py, which cannot be imported from here; tests/kernels/test_bench.py compares.
FLOOR = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Written over before each call that is timed on CUDA: more than any L2 holds, and long enough to write (a
# quarter of a millisecond on an H200) that Python has the call's launches ready when it is through.
FLUSH_BYTES = 2**30


@dataclass(frozen=True)
class Cost:
    """Least work of a call.

    Args:
        flops: floating-point operations of its matrix products (a multiply-add counts two).
        bytes: each input read once, each output written once.
    """

    flops: float
    bytes: float


@dataclass(frozen=True)
class Claim:
    """Target of an op, read off the same run. A bound of None is none.

    Args:
        what: in words.
        rival: the alternative that it is measured against, or `copy` or `matmul` for a ceiling; empty for a
            claim about memory alone.
        at_most: bound on the op's time over the rival's.
        at_least: bound on the share of the ceiling that the op reaches.
        extra_mb_at_most: bound on the peak of memory beyond inputs and outputs, in MB (10^6 bytes).
        case: name of the benchmark shape; None: every one.
    """

    what: str
    rival: str = ""
    at_most: float | None = None
    at_least: float | None = None
    extra_mb_at_most: float | None = None
    case: str | None = None


def wrong(
    actual: Tensor,
    reference: Tensor,
    plain: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    ops: int = 1,
    what: str = "result",
) -> str | None:
    """The problem of a result, by the rule of tests/close.py; None: nothing.

    `max |actual - reference| <= 2 max |plain - reference| + ops * FLOOR[dtype] * max |reference|`; whole
    numbers and masks are compared exactly, and what is not finite must be equal.

    Args:
        actual: the result that is judged.
        reference: the same in float64.
        plain: the same by plain PyTorch in `actual`'s precision; without it only the floor is allowed.
        dtype: the precision whose floor applies; None: `actual`'s. Name the inputs' if the result was cast.
        ops: operations that round one after another.
        what: name of the result, for the text.
    """
    if actual.shape != reference.shape:
        return f"{what} has shape {tuple(actual.shape)}, wanted {tuple(reference.shape)}"
    if not actual.dtype.is_floating_point:
        differing = int((actual != reference).sum())
        return f"{what}: {differing} of {actual.numel()} differ" if differing else None
    finite = reference.detach()[reference.isfinite()]
    magnitude = float(finite.abs().max()) if finite.numel() else 0.0
    floor = ops * FLOOR[dtype or actual.dtype] * max(magnitude, 1e-30)
    allowed = floor + (0.0 if plain is None else 2.0 * _error(plain, reference))
    error = _error(actual, reference)
    return None if error <= allowed else f"{what}: error {error:.2e}, {allowed:.2e} allowed"


def _error(actual: Tensor, reference: Tensor) -> float:
    actual, reference = actual.detach().double(), reference.detach().double()
    difference = torch.where(actual == reference, 0.0, (actual - reference).abs())
    difference = difference.nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(difference.max()) if difference.numel() else 0.0


def cast(kwargs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same arguments in another precision; leaves that require gradients stay such leaves."""
    return {
        name: one.detach().to(dtype).requires_grad_(one.requires_grad)
        if isinstance(one, Tensor) and one.is_floating_point()
        else one
        for name, one in kwargs.items()
    }


@dataclass(frozen=True)
class Spread:
    """Median, and 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


def spread_of(values: Sequence[float]) -> Spread:
    """The spread of at least two values."""
    low, _, _, high = statistics.quantiles(values, n=5, method="inclusive")
    return Spread(statistics.median(values), low, high)


def synchronise(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Times one call at a time, in milliseconds.

    On CUDA by events, behind a write over more than L2 holds, so that no call finds its inputs there because
    the one before left them. Launches are in the time only as far as Python needs longer for them than that
    write takes. Elsewhere by the processor's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES if cuda else 0, dtype=torch.int8, device=device)

    def milliseconds(self, run: Callable[[], Any]) -> float:
        """Time one call; its result is freed after the clock has stopped."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            result = run()
            end = time.perf_counter()
            del result
            return 1e3 * (end - start)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self.device):
            self._flush.zero_()
            before.record()
            result = run()
            after.record()
        after.synchronize()
        del result
        return before.elapsed_time(after)


def extra_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The most memory that a call held beyond its inputs, and beyond what it returned.

    Read off PyTorch's own allocators: on CUDA by their peak, on the CPU by their profiler events, which also
    show temporaries inside an operation. What a library takes from the system itself is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = run()
        torch.cuda.synchronize(device)
        peak, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        del result
        return peak - left
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    held = profiler.profiler
    assert held is not None and held.kineto_results is not None
    events = [event for event in held.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak - live


@contextmanager
def quiet(threads: int | None) -> Iterator[None]:
    """Sets the number of threads (None: unchanged), stops garbage collection, and restores both."""
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads or before)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()


def load() -> float:
    """Processes waiting for a processor, over the last minute."""
    return os.getloadavg()[0]


def provenance(device: torch.device, threads: int) -> dict[str, str]:
    """Machine, versions and commit of a measurement, by name, in the order in which they are shown."""
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "cpu",
        "processor": f"{_processor()}, {os.cpu_count()} cores, {threads} threads",
        "load before": f"{load():.2f}",
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found["device"] = (
            f"{about.name} (sm_{about.major}{about.minor}, {about.total_memory / 2**30:.0f} GiB, "
            f"{about.multi_processor_count} multiprocessors, L2 {about.L2_cache_size / 2**20:.0f} MiB)"
        )
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["driver"] = origin.output_of(*query) or "?"
    versions = [f"{name} {origin.version(name) or 'not installed'}" for name in ("torch", "triton")]
    found["versions"] = ", ".join([f"python {platform.python_version()}", *versions])
    found["commit"] = origin.commit()
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()
