"""Measures the device that a run is planned for: its free memory and its rate.

Nothing is looked up in a table of products; the rate is measured for a moment, or stated in the config.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from retain.config import PositiveShare
from retain.process.extras import deferred
from retain.process.half_precision import HALF_FLAGS

with deferred("train", "psutil", what="training"):
    import psutil

GIB = 2**30


@dataclass(frozen=True)
class PlanSettings:
    """For which device is planned; by default the one at hand.

    Args:
        memory_gib: memory of one device in GiB; None: what the device at hand has free.
        tflops: its dense matrix rate in the model's precision, in 10^12 operations a second; None: measured
            for a fifth of a second on the device at hand.
        efficiency: share of that rate that training reaches; the plan prints it, the progress bar measures.
    """

    memory_gib: Annotated[float, Field(ge=1e-3, le=1e9)] | None = None
    tflops: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None
    efficiency: PositiveShare = 0.4


@dataclass(frozen=True)
class Device:
    """One device.

    Args:
        kind: `cpu` or `cuda`.
        name: for the table.
        memory_bytes: that can be used.
        tflops: dense matrix rate, 10^12 operations a second; None: unknown.
        efficiency: share of it that training reaches.
        rate_from: where the rate comes from, in words.
        float32_tflops: its rate in float32, where the model is in half precision and that was measured.
    """

    kind: str
    name: str
    memory_bytes: float
    tflops: float | None
    efficiency: float
    rate_from: str
    float32_tflops: float | None = None


def device_here(device: torch.device, dtype: torch.dtype, settings: PlanSettings) -> Device:
    """Returns this process's device, or the one whose memory or rate the settings state, for a model of this
    precision."""
    on_gpu, stated = device.type == "cuda", settings.memory_gib
    if stated is not None:
        memory, name = stated * GIB, f"one device of {stated:g} GiB"
    else:
        memory = _memory(device)
        name = torch.cuda.get_device_name(device) if on_gpu else "this machine's CPU"
    rate, rate_from = settings.tflops, "stated" if settings.tflops is not None else "nobody stated it"
    if rate is None and stated is None:
        rate = measured_tflops(device, dtype)
        rate_from = "measured just now on a square product; low if the machine was busy"
    kind = "cuda" if stated is not None or on_gpu else "cpu"
    whole = None
    if kind == "cpu" and settings.tflops is None and dtype in HALF_FLAGS:
        whole = measured_tflops(device, torch.float32)
    return Device(kind, name, memory, rate, settings.efficiency, rate_from, whole)


def _memory(device: torch.device) -> float:
    """Bytes that can be used: what the GPU has, or what the machine and its control group leave free."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    limit = Path("/sys/fs/cgroup/memory.max")
    stated = limit.read_text().strip() if limit.is_file() else "max"
    free = float(psutil.virtual_memory().available)
    return min(free, float(stated)) if stated.isdigit() else free


def measured_tflops(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.2) -> float:
    """Rate of a square matrix product, for about this long."""
    from torch.utils.benchmark import Timer  # which imports setuptools, for code that is compiled

    size = 4096 if device.type == "cuda" else 768
    # Not of equal numbers, which some devices multiply faster.
    draw = torch.Generator(device).manual_seed(0)
    left = torch.randn(size, size, device=device, generator=draw).to(dtype)
    timer = Timer("left @ left", globals={"left": left}, num_threads=torch.get_num_threads())
    return 2.0 * size**3 / timer.blocked_autorange(min_run_time=seconds).mean / 1e12
