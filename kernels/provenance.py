"""Says which code made a result, and writes results so that a killed run leaves the last whole one.

The standard library alone is imported, since `gpu` runs where packages may be missing.
"""

import subprocess
from importlib import metadata
from pathlib import Path


def output_of(*command: str) -> str | None:
    """Standard output of a command; None if it failed or took too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    """Commit of this checkout, and whether its tree is clean."""
    git = ("git", "-C", str(Path(__file__).parent))
    name, changes = output_of(*git, "rev-parse", "HEAD"), output_of(*git, "status", "--porcelain")
    clean = name is not None and changes == ""
    return f"{name or 'none'}, {'clean' if clean else 'tree NOT clean: scratch, no evidence'}"


def version(distribution: str) -> str | None:
    """Version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def write(path: Path, text: str) -> None:
    """Writes beside `path`, then renames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
