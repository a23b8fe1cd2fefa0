"""Resident memory of a process on a CPU: what it holds now, and the most that it ever held (Linux).

In: nothing but `/proc`. Out: bytes. The one decision taken here: a peak is read in a process of its own,
whose allocator gives back what is freed (`GIVES_BACK`), so that what it holds is what is alive; in a process
that pools memory, a peak would tell of what came before.
"""

from pathlib import Path

# glibc: whatever is larger is a mapping of its own, gone when it is freed. Set before the process starts.
GIVES_BACK = {f"MALLOC_{name}_": "65536" for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "TOP_PAD")}
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measurable() -> bool:
    """Whether this system tells (Linux does)."""
    return STATUS.exists() and CLEAR.exists()


def reset_peak() -> None:
    """Forget the most that this process ever held."""
    CLEAR.write_text("5")


def held_now() -> int:
    """Bytes resident now."""
    return _line("VmRSS")


def held_at_most() -> int:
    """Bytes resident at most since `reset_peak`, or since the process began."""
    return _line("VmHWM")


def _line(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{STATUS} has no {name}: memory is measured on Linux only.")
