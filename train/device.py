"""The device that a run is planned for: its memory and its rate, at hand or stated.

In: a torch device, or numbers of another one. Out: a `Device`. The one decision taken here: nothing is looked
up in a table of products; memory is asked for, and a rate is measured for a moment or stated by whoever
plans.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

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

    memory_gib: float | None = None
    tflops: float | None = None
    efficiency: float = 0.4


def check_plan(settings: PlanSettings) -> None:
    """Refuse settings that mean nothing.

    Raises:
        ValueError: with all of them.
    """
    problems = [
        f"plan.{name}={value} must be positive"
        for name, value in (("memory_gib", settings.memory_gib), ("tflops", settings.tflops))
        if value is not None and value <= 0
    ]
    if not 0 < settings.efficiency <= 1:
        problems.append(f"plan.efficiency={settings.efficiency} is a share, above 0 and at most 1")
    if problems:
        raise ValueError("; ".join(problems) + ".")


@dataclass(frozen=True)
class Device:
    """One device.

    Args:
        kind: `cpu` or `cuda`.
        name: for the table.
        memory_bytes: that can be used.
        tflops: dense matrix rate, 10^12 operations a second; None: nobody said.
        efficiency: share of it that training reaches.
        rate_from: where the rate comes from, in words.
    """

    kind: str
    name: str
    memory_bytes: float
    tflops: float | None
    efficiency: float
    rate_from: str


def device_here(device: torch.device, dtype: torch.dtype, settings: PlanSettings) -> Device:
    """The device at hand, or the one that the settings state.

    Args:
        device: of this process.
        dtype: of the model.
        settings: may state another memory or rate.
    """
    stated = settings.memory_gib is not None
    memory = settings.memory_gib * GIB if settings.memory_gib is not None else _memory(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's CPU"
    if stated:
        name = f"one device of {settings.memory_gib:g} GiB"
    if settings.tflops is not None:
        rate, rate_from = settings.tflops, "stated"
    elif stated:
        rate, rate_from = None, "nobody stated it"
    else:
        rate, rate_from = (
            measured_tflops(device, dtype),
            "measured just now on a square product; low if the machine was busy",
        )
    kind = "cuda" if stated or device.type == "cuda" else "cpu"
    return Device(kind, name, memory, rate, settings.efficiency, rate_from)


def _memory(device: torch.device) -> float:
    """Bytes that can be used: what the GPU has, or what the machine and its control group leave free."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    free = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, 1024.0 * int(line.split()[1]))
    if limit.is_file() and (most := limit.read_text().strip()).isdigit():
        free = min(free, float(most))
    return free


def measured_tflops(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.2) -> float:
    """Rate of a square matrix product, for about this long."""
    size = 4096 if device.type == "cuda" else 768
    # Not of equal numbers, which some devices multiply faster.
    draw = torch.Generator(device).manual_seed(0)
    left = torch.randn(size, size, device=device, generator=draw).to(dtype)
    left @ left

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    done, start = 0, time.perf_counter()
    while done < 2 or time.perf_counter() - start < seconds:
        left @ left
        wait()
        done += 1
    return done * 2.0 * size**3 / (time.perf_counter() - start) / 1e12
