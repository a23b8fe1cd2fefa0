"""Tells which of several processes this one is: of those that `accelerate launch` started, or alone.

Processes share out work and files, never tensors. So waiting goes over the CPU (gloo) wherever the models
run, and a rank that is ahead may wait for days.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from retain.process.extras import require


@dataclass(frozen=True)
class Processes:
    """This process among those of the launch: its rank over all `count` and on its machine, and the state of
    accelerate, None where there is one process."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    state: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the one that checks and reports."""
        return self.rank == 0

    @property
    def writes_as(self) -> int | None:
        """Number of the file of rows that this process writes; None, the run's own, if it is alone."""
        return None if self.count == 1 else self.rank

    def wait(self) -> None:
        """Goes on when all have come here."""
        if self.state is not None:
            self.state.wait_for_everyone()

    @contextmanager
    def until_done(self) -> Iterator["Processes"]:
        """Leaves the others at the very end, when the work is done or has failed: the interpreter's end may
        abort a process that has not left (https://github.com/pytorch/pytorch/pull/179291)."""
        try:
            yield self
        finally:
            if self.state is not None:
                self.state.destroy_process_group()


def launched() -> Processes:
    """This process among those that `accelerate launch` started."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    require("eval", "accelerate", what="a comparison by several processes")
    from accelerate import PartialState

    state = PartialState(cpu=True, timeout=timedelta(days=30))
    return Processes(state.process_index, state.num_processes, state.local_process_index, state)


def end_with(parent: int) -> None:
    """Ends this process once its parent has ended: a pool whose owner was killed waits for work for ever."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
