"""Writes files whole, and explains the errors of a disk that takes no more."""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

# Error number -> what to do about it; {key}: of the config, says where the folder is.
ADVICE = {
    errno.ENOSPC: "free some space there, or move the folder to a larger disk and set `{key}` to it",
    errno.EDQUOT: "free some of your quota, or move the folder to another disk and set `{key}` to it",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or set `{key}` to a disk that has none",
    errno.EROFS: "the disk is mounted read-only: have it repaired, or move the folder and set `{key}` to it",
    errno.EIO: "the disk fails: move the folder to another one and set `{key}` to it",
    errno.EACCES: "make the folder writable, or set `{key}` to one that is",
}

# Errors of a system without room: on the disk, in the user's share of it, in one file.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


def write_beside(path: Path, payload: bytes) -> Path:
    """Write `payload`, synced to disk, to a sibling of `path`; the caller renames it. A failed write leaves
    no sibling, and is an OSError that says where, why and what to do, under the system's own number."""
    beside = path.with_name(f"{path.name}.new")
    try:
        with open(beside, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise _unwritten(path, len(payload), error) from None
    return beside


def save_beside(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """Write tensors as safetensors beside `path` likewise, without a copy of them all in memory."""
    beside = path.with_name(f"{path.name}.new")
    try:
        with open(beside, "wb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        save_file(dict(tensors), beside, dict(metadata))
        beside.chmod(mode)  # safetensors' own files are for their owner alone, whatever the umask
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
    except BaseException as error:
        beside.unlink(missing_ok=True)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if isinstance(error, SafetensorError) and (number := re.search(r"os error (\d+)", str(error))):
            error = OSError(int(number[1]), os.strerror(int(number[1])))
        if isinstance(error, OSError):
            raise _unwritten(path, num_bytes, error) from None
        raise
    return beside


def _unwritten(path: Path, num_bytes: int, error: OSError) -> OSError:
    """An error of the system with place, reason and next step."""
    step = (
        "the disk is full, or a limit on what may be written is reached: make room, or write elsewhere"
        if error.errno in NO_ROOM
        else "check that the folder can be written to, or write elsewhere"
    )
    return OSError(
        error.errno,
        f"{error.strerror or error}, writing {num_bytes} bytes to {path.name} in {path.parent}: {step}. What "
        "was there before is as it was.",
    )
