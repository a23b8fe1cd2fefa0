"""Ends a run when its launcher ends, which `accelerate launch` does not do for a single process.

Only an `accelerate launch` is followed: a run that a shell started in the background outlives the shell, as
its user may have meant.
"""

import ctypes
import os
import signal
from pathlib import Path

# A signal of its own: it may come beside one that all processes were sent, and is no second request.
LAUNCHER_GONE = signal.SIGUSR2
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def follow_launcher_() -> None:
    """Be asked to stop when the `accelerate launch` that started this process ends. Nothing, where another
    program started it, or the system is not Linux."""
    launcher = os.getppid()
    try:
        started_by = Path(f"/proc/{launcher}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return
    if not any(b"accelerate" in part for part in started_by) or not any(
        b"launch" in part for part in started_by
    ):
        return
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(LAUNCHER_GONE))
    if os.getppid() != launcher:  # it ended before the system was asked
        os.kill(os.getpid(), LAUNCHER_GONE)
