"""Locks a run's folder for one run at a time, by a file `LOCK` that names its holder.

The lock is `filelock.SoftFileLock`: it needs no locks of the file system, so that it holds across machines
that share a disk. A holder on this machine that has ended is replaced; of another machine the error says what
to do.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import SoftFileLock, Timeout

LOCK_FILE = "LOCK"


@contextmanager
def lock_folder(folder: Path, *, otherwise: str) -> Iterator[None]:
    """Context in which this process holds the folder; arguments and errors are those of `take_lock`."""
    release = take_lock(folder, otherwise=otherwise)
    try:
        yield
    finally:
        release()


def take_lock(folder: Path, *, otherwise: str) -> Callable[[], None]:
    """Lock a folder, which is made if it is missing, for this process.

    Args:
        folder: of the run.
        otherwise: alternative to it, for the message: "another name (run=...)".

    Returns:
        what unlocks it again, and removes a folder that was made for it and stayed empty.

    Raises:
        ValueError: another run holds it, or nothing can be written there.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = SoftFileLock(folder / LOCK_FILE, timeout=0)
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        problem = (
            f"{folder} is held by another run: process {lock.pid}. Two runs in one folder would destroy each "
            f"other: wait for it, stop it, or choose {otherwise}. If that process, perhaps on another "
            f"machine, is no run of yours any more, remove {folder / LOCK_FILE}."
        )
    except OSError as error:
        problem = f"cannot write {error.filename or folder}: {error.strerror or error}. Choose {otherwise}."

    def release() -> None:
        lock.release()
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()

    if problem is not None:
        release()
        raise ValueError(problem)
    return release
