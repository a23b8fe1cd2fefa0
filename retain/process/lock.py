"""Locks a run's folder for one run at a time, by a file `LOCK` that names its holder.

The lock is `filelock.SoftFileLock`: it needs no locks of the file system, so that it holds across machines
that share a disk. A holder on this machine that has ended is replaced; of another machine the error says what
to do.
"""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import SoftFileLock, Timeout

LOCK_FILE = "LOCK"


@contextmanager
def lock_folder(folder: Path, *, otherwise: str) -> Iterator[None]:
    """Context in which this process holds a folder, which is made if it is missing, and removed again if it
    stays empty.

    Args:
        folder: of the run.
        otherwise: alternative to it, for the message: "another name (run=...)".

    Raises:
        ValueError: another run holds it, or nothing can be written there.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = SoftFileLock(folder / LOCK_FILE, timeout=0)
    try:
        _acquire(lock, folder, otherwise)
        yield
    finally:
        lock.release()
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def _acquire(lock: SoftFileLock, folder: Path, otherwise: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"{folder} is held by another run: process {lock.pid}. Two runs in one folder would destroy each "
            f"other: wait for it, stop it, or choose {otherwise}. If that process, perhaps on another "
            f"machine, is no run of yours any more, remove {folder / LOCK_FILE}."
        ) from None
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        raise ValueError(f"cannot write {reason}. Choose {otherwise}.") from None
