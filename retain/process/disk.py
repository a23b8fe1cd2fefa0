"""Explains the errors of a disk that takes no more: which file, what to do, and how the work goes on."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Error number -> what to do about it; {key}: of the config, says where the folder is.
ADVICE = {
    errno.ENOSPC: "free some space there, or move the folder to a larger disk and set `{key}` to it",
    errno.EDQUOT: "free some of your quota, or move the folder to another disk and set `{key}` to it",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or set `{key}` to a disk that has none",
    errno.EROFS: "the disk is mounted read-only: have it repaired, or move the folder and set `{key}` to it",
    errno.EIO: "the disk fails: move the folder to another one and set `{key}` to it",
    errno.EACCES: "make the folder writable, or set `{key}` to one that is",
}


class DiskError(OSError):
    """A file could not be written; the message says why, what to do, and where the work can go on."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def disk_errors(folder: Path, *, key: str, goes_on: Callable[[], str]) -> Iterator[None]:
    """Turns an error of the disk inside into one that says what to do.

    Args:
        folder: that is meant where the system names no file.
        key: of the config, that says where is written.
        goes_on: a sentence: what is left, and how the work goes on.

    Raises:
        DiskError: for an OSError of `ADVICE`; others pass.
    """
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        if error.errno not in ADVICE:
            raise
        raise DiskError(
            error.errno,
            f"cannot write {error.filename or folder}: {os.strerror(error.errno)}. Next step: "
            f"{ADVICE[error.errno].format(key=key)}. {goes_on()}",
        ) from error
