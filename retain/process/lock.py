"""Locks a run's folder for one run at a time; the lock of a dead holder is replaced.

The lock is a file `LOCK` that names its holder (host, process, job), not a system lock: those end with a
process, but are inherited by its children and do not reach across machines on every shared disk. On the same
machine a dead holder is recognised; for another machine the error says what to do.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["LOCK_FILE", "leave_lock", "lock_folder", "me", "take_lock"]

LOCK_FILE = "LOCK"


@contextmanager
def lock_folder(folder: Path, *, otherwise: str) -> Iterator[None]:
    """Context in which this process holds the folder.

    A folder that was made for the lock and stays empty is removed again.

    Args:
        folder: of the run.
        otherwise: what to choose in place of it, for the message: "another name (run=...)".

    Raises:
        ValueError: another run holds it; says which, and how to remove a lock whose holder is gone.
    """
    said, made = take_lock(folder, otherwise=otherwise)
    if said is not None:
        raise ValueError(said)
    try:
        yield
    finally:
        leave_lock(folder, made)


def take_lock(folder: Path, *, otherwise: str) -> tuple[str | None, list[Path]]:
    """Lock a folder for this process.

    Args:
        folder: of the run; made if it is not there.
        otherwise: what to choose in place of it, for the message.

    Returns:
        Why it could not be had, or None; and the folders that were made, for `leave_lock`.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        said = _take(folder / LOCK_FILE, otherwise)
    except OSError as error:
        what = error.strerror or str(error)
        said = f"cannot write {error.filename or folder}: {what}. Choose {otherwise}."
    if said is not None:
        _remove_empty(made)
    return said, made


def leave_lock(folder: Path, made: list[Path]) -> None:
    """Unlock the folder; remove what was made for the lock if it is empty."""
    _leave(folder / LOCK_FILE)
    _remove_empty(made)


def me() -> dict[str, Any]:
    """Identify this process, so that others can tell whether it still runs."""
    return {
        "host": socket.gethostname(),
        "boot": _text(Path("/proc/sys/kernel/random/boot_id")),
        "processes": _linked("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _take(path: Path, otherwise: str) -> str | None:
    """Write the lock, or raise with its holder."""
    mine = me()
    while True:
        with open(path, "a+b") as file:
            # For this moment alone; where the disk knows no such locks, two runs must start within it.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    continue
            except FileNotFoundError:
                continue  # left by its holder since it was opened
            file.seek(0)
            holder = _parsed(file.read())
            if holder is not None and not _is_gone(holder, mine):
                job = f" of job {holder['job']}" if holder.get("job") else ""
                same = holder.get("host") == mine["host"]
                return (
                    f"{path.parent} is held by another run: process {holder.get('pid')}{job} on "
                    f"{holder.get('host')}, since {holder.get('since')}. Two runs in one folder would "
                    f"destroy each other: wait for it, stop it, or choose {otherwise}. "
                    + ("If that process" if same else "This machine cannot see whether it still runs: if it")
                    + f" is no run of yours any more, remove {path}."
                )
            file.seek(0)
            file.truncate()
            file.write((json.dumps(mine) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
            return None


def _leave(path: Path) -> None:
    """Remove the lock, if it is still ours."""
    with contextlib.suppress(OSError):
        holder = _parsed(path.read_bytes()) or {}
        if all(holder.get(name) == value for name, value in me().items() if name != "since"):
            path.unlink()


def _is_gone(holder: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether the holder certainly no longer runs."""
    if (
        mine["job"] is not None
        and holder.get("job") == mine["job"]
        and holder.get("restart") != mine["restart"]
    ):
        return True  # the same job, requeued: a scheduler runs it once at a time
    if holder.get("host") != mine["host"]:
        return False
    if holder.get("boot") != mine["boot"]:
        return True  # the machine was started anew
    if holder.get("processes") != mine["processes"]:
        return False  # a container of the same name, whose processes cannot be seen from here
    try:
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, KeyError, ValueError, TypeError):
        pass
    # Numbers of processes are used again.
    return _started(holder.get("pid")) != holder.get("started")


def _started(pid: Any) -> str | None:
    """Start time of a process, in the kernel's count; None if unknown, or if it has ended and is only
    listed."""
    state, *fields = (_text(Path(f"/proc/{pid}/stat")) or "").rpartition(") ")[2].split() or [""]
    return fields[18] if len(fields) > 18 and state != "Z" else None


def _parsed(payload: bytes) -> dict[str, Any] | None:
    """Content of the lock; None if its holder was killed before writing."""
    try:
        found = json.loads(payload)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _linked(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _remove_empty(paths: list[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.rmdir()
