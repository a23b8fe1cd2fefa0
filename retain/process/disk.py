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

# Errors of a disk that is full (in all, for this user, for one file), closed, or failing.
OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


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
        DiskError: for an OSError of `OF_DISKS`; others pass.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, DiskError) or error.errno not in OF_DISKS:
            raise
        raise DiskError(
            error.errno,
            f"cannot write {error.filename or folder}: {os.strerror(error.errno)}. Next step: free "
            f"some space there, see that it can be written to, or set `{key}` to another disk. {goes_on()}",
        ) from error


def write_new(path: Path, payload: bytes) -> Path:
    """Write `payload`, synced to disk, to a sibling of `path`; the caller renames it. A failed write leaves
    no sibling, and is an OSError that says where and why, under the system's number."""
    with _whole(path) as new, open(new, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    return new


def save_new(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """Write tensors as safetensors to a sibling of `path` likewise, without a copy of them all in memory."""
    with _whole(path) as new:
        with open(new, "wb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        save_file(dict(tensors), new, dict(metadata))
        new.chmod(mode)  # safetensors' files are for their owner alone, whatever the umask
        with open(new, "rb+") as file:
            os.fsync(file.fileno())
    return new


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Context for writing a sibling of a file, which is removed if that fails."""
    new = path.with_name(f"{path.name}.new")
    try:
        yield new
    except BaseException as error:
        new.unlink(missing_ok=True)
        if isinstance(error, SafetensorError) and (found := re.search(r"os error (\d+)", str(error))):
            error = OSError(int(found[1]), os.strerror(int(found[1])))
        if not isinstance(error, OSError):
            raise
        said = f"{error.strerror or error}: {path} could not be written, and is as it was before"
        raise OSError(error.errno, said) from None
