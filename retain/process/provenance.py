"""Records where a result comes from: time, machine, versions, commit, and whether the tree was clean.

Unknown values (no git, a package that is not installed) are null, never an error, and never taken for clean.
"""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from retain.process.disk import write_new

PACKAGES = (
    *("retain", "torch", "triton", "transformers", "accelerate", "peft", "datasets"),
    *("numpy", "scipy", "safetensors", "matplotlib"),
)


def now() -> str:
    """Current time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def code_state(place: str | Path) -> dict[str, Any]:
    """Commit of the checkout that holds `place`, and whether its tree was clean.

    Args:
        place: a folder of the checkout; or a file, which must be tracked there (an environment inside of
            somebody's checkout is not theirs).

    Returns:
        `{"commit": str | None, "clean": bool}`; `None` and False without a checkout or commit.
    """
    place = Path(place)
    folder = place.parent if place.is_file() else place

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if place.is_file() and git("ls-files", "--error-unmatch", place.name) is None:
        return {"commit": None, "clean": False}
    lines = (git("status", "--porcelain=v2", "--branch") or "").splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    commit = commits[0] if commits and commits != ["(initial)"] else None
    return {"commit": commit, "clean": commit is not None and all(line[0] == "#" for line in lines)}


def environment(device: str, threads: int) -> dict[str, Any]:
    """Python, package versions, machine, device and threads of this process."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": device,
        "threads_per_worker": threads,
        "versions": {name: version_of(name) for name in PACKAGES},
    }


def write_json(path: Path, value: Any) -> None:
    """Write JSON beside `path`, then rename: the old file survives a full disk."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text beside `path`, then rename."""
    os.replace(write_new(path, text.encode()), path)


def version_of(name: str) -> str | None:
    """The version of an installed package; None: it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor()
