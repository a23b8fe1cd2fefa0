"""Locks a run's folder over all of its processes: `retain.process.lock` with accelerate."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retain.process.extras import deferred
from retain.process.lock import leave_lock, take_lock

with deferred("train", "accelerate", "accelerate.utils", what="training"):
    from accelerate import Accelerator
    from accelerate.utils import gather_object

OTHERWISE = "another `output` (a file STOP in the folder stops the other run)"


@contextmanager
def locked(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Inside, the folder is this run's; every process enters, the first one holds the lock.

    Raises:
        ValueError: on every process: another run holds it; says which, and how to remove a lock whose holder
            is gone.
    """
    said: str | None = None
    made: list[Path] = []
    if accelerator.is_main_process:
        said, made = take_lock(folder, otherwise=OTHERWISE)
    said = gather_object([said])[0]
    if said is not None:
        raise ValueError(said)
    try:
        yield
    finally:
        if accelerator.is_main_process:
            leave_lock(folder, made)
