"""Stops a run on request: it finishes the step, writes a checkpoint, and says how to go on.

A request is SIGTERM, SIGINT (Ctrl-C), SIGUSR1 (which schedulers send before the end), or a file `STOP` in the
run's folder. A signal only sets a flag, and the processes compare flags once a step, at the same place; so
all of them stop after the same step.

The file is for runs on many machines: launchers do not hand every signal on (torchrun's agent dies of
SIGUSR1, and kills its workers 30 seconds after a SIGTERM), but every machine sees the folder.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from retain.train.run.checkpoint import SAME_COMMAND
from retain.train.run.parallel import Accelerator

STOP_FILE = "STOP"
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# 128 + SIGTERM, as shells and schedulers read it: ended on request, whichever way it was made. The code
# of this process: `accelerate launch` ends with 1 for every code but 0.
EXIT_CODE = 128 + signal.SIGTERM
EXIT_INTERRUPTED = 128 + signal.SIGINT


class StopRequested(SystemExit):
    """A run that was asked to stop and did, with its state on disk."""


class Signals:
    """Inside, SIGTERM, SIGINT and SIGUSR1 wait for the end of a step.

    The second one ends the process at once, as the first would have without us. Outside the main thread,
    where Python allows no handlers, only the file is heard."""

    def __init__(self, accelerator: Accelerator, folder: Path):
        self.accelerator, self.file = accelerator, Path(folder) / STOP_FILE
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in NUMBERS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # None: a handler that was not set from Python, which Python cannot put back.
            signal.signal(number, handler or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number).name
        # Not print: the signal may have come in the middle of one.
        said = f"\n{self.received}: finishing this step, then a checkpoint; again, to stop at once.\n"
        os.write(2, said.encode())

    @property
    def requested(self) -> bool:
        """True once any process was asked to stop. Collective: every process asks after the same step."""
        mine = self.received is not None or (self.accelerator.is_main_process and self.file.exists())
        flags = torch.tensor([float(mine)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(flags, reduction="sum").item() > 0)

    def stop(self, step: int) -> NoReturn:
        """Ends the run, whose state after `step` steps has been saved: raises StopRequested with code 143."""
        if self.accelerator.is_main_process:
            self.file.unlink(missing_ok=True)
            print(
                f"stopped on request after step {step}; its checkpoint is in {self.file.parent}, and "
                f"{SAME_COMMAND} goes on from there.",
                file=sys.stderr,
                flush=True,
            )
        raise StopRequested(EXIT_CODE)
