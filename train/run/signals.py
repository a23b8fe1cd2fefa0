"""Stops a run on request: it finishes the step, writes a checkpoint, and says how to go on.

A request is SIGTERM, SIGINT (Ctrl-C), SIGUSR1 (which schedulers send before the end), the end of the launcher
(which `accelerate launch` does not report to a single process), or a file `STOP` in the run's folder. A
signal only sets a flag, and the processes compare flags once a step, at the same place; so all of them stop
after the same step.

The file is for runs on many machines: launchers do not hand every signal on (torchrun's agent dies of
SIGUSR1, and kills its workers 30 seconds after a SIGTERM), but every machine sees the folder.
"""

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from retain.train.run.checkpoint import same_command
from retain.train.run.parallel import Accelerator

# A signal of its own: it may come beside one that all processes were sent, and is no second request.
LAUNCHER_GONE = signal.SIGUSR2
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
STOP_FILE = "STOP"
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# 128 + SIGTERM, as shells and schedulers read it: ended on request, whichever way it was made. The code
# of this process: `accelerate launch` ends with 1 for every code but 0.
EXIT_CODE = 128 + signal.SIGTERM
EXIT_INTERRUPTED = 128 + signal.SIGINT


def follow_launcher_() -> None:
    """Asks this run to stop when the `accelerate launch` that started it ends. Nothing happens where the
    system is not Linux or another program started it: a run that a shell started in the background outlives
    the shell, as its user may have meant."""
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


class StopRequested(SystemExit):
    """A run that was asked to stop and did, with its state on disk."""


def forget_(folder: Path) -> None:
    """Forgets what an earlier run was asked: once, by the process that holds the folder, before anything
    slow. A later request is for this run."""
    (folder / STOP_FILE).unlink(missing_ok=True)


class Signals:
    """Inside, SIGTERM, SIGINT and SIGUSR1 wait for the end of a step, with a `promise` of what is done before
    the end.

    The second one ends the process at once, as the first would have without us. Outside the main thread,
    where Python allows no handlers, only the file is heard: a request in the folder counts, also one from
    before (`forget_` those of earlier runs)."""

    def __init__(
        self, accelerator: Accelerator, folder: Path, promise: str = "finishing this step, then a checkpoint"
    ):
        self.accelerator, self.file, self.promise = accelerator, Path(folder) / STOP_FILE, promise
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            numbers = (*NUMBERS, LAUNCHER_GONE)
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # None: a handler that was not set from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        gone = number == LAUNCHER_GONE
        name = "the launcher has ended" if gone else signal.Signals(number).name
        if self.received is not None and gone:
            return
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = name
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"\n{name}: {self.promise}; again, to stop at once.\n".encode())

    @property
    def requested(self) -> bool:
        """True once any process was asked to stop. Collective: every process asks after the same step."""
        mine = self.received is not None or (self.accelerator.is_main_process and self.file.exists())
        if self.accelerator.num_processes == 1:
            return mine
        notes = torch.tensor([float(mine)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(notes, reduction="sum").item() > 0)

    def stop(self, step: int) -> NoReturn:
        """Ends the run, whose state after `step` steps has been saved: raises StopRequested with code 143."""
        if self.accelerator.is_main_process:
            self.file.unlink(missing_ok=True)
            again = same_command(self.file.parent)
            print(
                f"stopped on request after step {step}; its checkpoint is in {self.file.parent}. "
                f"{again[0].upper()}{again[1:]} goes on from there.",
                file=sys.stderr,
                flush=True,
            )
        raise StopRequested(EXIT_CODE)
