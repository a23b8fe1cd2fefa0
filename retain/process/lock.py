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
    """Context in which this process holds the folder; one that was made for it and stays empty is removed.

    Args:
        folder: of the run.
        otherwise: alternative to it, for the message: "another name (run=...)".

    Raises:
        ValueError: another run holds it; says which, and how to remove a lock whose holder is gone.
    """
    problem, made = take_lock(folder, otherwise=otherwise)
    if problem is not None:
        raise ValueError(problem)
    try:
        yield
    finally:
        leave_lock(folder, made)


def take_lock(folder: Path, *, otherwise: str) -> tuple[str | None, list[Path]]:
    """Lock a folder for this process, as `lock_folder`.

    Returns:
        Why it could not be had, or None; and the folders that were made, for `leave_lock`.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = _take(folder / LOCK_FILE, otherwise)
    except OSError as error:
        what = error.strerror or str(error)
        problem = f"cannot write {error.filename or folder}: {what}. Choose {otherwise}."
    if problem is not None:
        _remove_empty(made)
    return problem, made


def leave_lock(folder: Path, made: list[Path]) -> None:
    """Unlock the folder, if the lock is still ours; remove what was made for it if it is empty."""
    path, mine = folder / LOCK_FILE, me()
    with contextlib.suppress(OSError):
        holder = _parsed(path.read_bytes()) or {}
        if all(holder.get(name) == value for name, value in mine.items() if name != "since"):
            path.unlink()
    _remove_empty(made)


def me() -> dict[str, Any]:
    """Identify this process, so that others can tell whether it still runs."""
    return {
        "host": socket.gethostname(),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "processes": os.readlink("/proc/self/ns/pid") if os.path.islink("/proc/self/ns/pid") else None,
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _take(path: Path, otherwise: str) -> str | None:
    """Write the lock; why that cannot be, if another run holds it."""
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


def _is_gone(holder: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether the holder certainly no longer runs."""
    requeued = holder.get("job") == mine["job"] and holder.get("restart") != mine["restart"]
    if mine["job"] is not None and requeued:
        return True  # a scheduler runs a job once at a time
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
    state, *fields = (_text(f"/proc/{pid}/stat") or "").rpartition(") ")[2].split() or [""]
    return fields[18] if len(fields) > 18 and state != "Z" else None


def _parsed(payload: bytes) -> dict[str, Any] | None:
    """Content of the lock; None if its holder was killed before writing."""
    try:
        found = json.loads(payload)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _remove_empty(paths: list[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.rmdir()
