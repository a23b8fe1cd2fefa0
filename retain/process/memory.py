"""Measures the memory of a process, now and at its peak: resident bytes on a CPU (Linux), allocated ones on
CUDA.

A resident peak is measured in a process of its own (`in_a_process`), whose allocator gives back freed memory;
elsewhere a peak would include earlier work. On CUDA torch counts live bytes itself.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

# glibc: whatever is larger is a mapping of its own, gone when it is freed. Set before the process starts.
GIVES_BACK = {f"MALLOC_{name}_": "65536" for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "TOP_PAD")}
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measurable() -> bool:
    """Whether this system reports resident bytes (Linux does)."""
    return STATUS.exists() and CLEAR.exists()


def reset_peak() -> None:
    """Reset the peak of resident bytes."""
    CLEAR.write_text("5")


def held_now() -> int:
    """Resident bytes now."""
    return _line("VmRSS")


def held_at_most() -> int:
    """Peak of resident bytes since `reset_peak`, or since the process began."""
    return _line("VmHWM")


def _line(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{STATUS} has no {name}: memory is measured on Linux only.")


class Peak:
    """Peak of memory from now on, beyond what is held now.

    Args:
        device: whose memory: on `cuda` what torch allocated, otherwise what this process has resident.
    """

    def __init__(self, device: str) -> None:
        self.device, self._on_gpu = device, device.startswith("cuda")
        self._forget()
        self.before = torch.cuda.memory_allocated(device) if self._on_gpu else held_now()

    def beyond(self) -> int:
        """Peak of bytes since creation or the last call, minus those held at creation."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
            most = torch.cuda.max_memory_allocated(self.device)
        else:
            most = held_at_most()
        self._forget()
        return most - self.before

    def _forget(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            reset_peak()


def in_a_process(module: str, flags: Sequence[str], *, timeout: float = 1800) -> list[str]:
    """Run a module (`python -m`) in its own process, whose allocator gives back freed memory; return the
    printed lines.

    Raises:
        RuntimeError: it failed or took too long; holds its output.
    """
    command = [sys.executable, "-m", module, *flags]
    environment = {**os.environ, **GIVES_BACK}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"the watched process took longer than {timeout:g} s and was ended: measure less at once."
        ) from error
    if done.returncode:
        raise RuntimeError(f"the watched process failed: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip().splitlines()
