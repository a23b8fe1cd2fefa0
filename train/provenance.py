"""Where a result comes from: versions, device, commit, and whether the tree was clean.

In: nothing. Out: a JSON mapping that is stored with every artifact. The one decision taken here: what cannot
be known (no git, an installed package) is null, never an error.
"""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("retain", "torch", "transformers", "accelerate", "datasets", "safetensors")


def provenance() -> dict[str, Any]:
    """Versions of what was used, the machine's kind, and the commit of the code with `dirty` beside it."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if (changes := _git("status", "--porcelain")) is None else bool(changes),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """What git says about the checkout that this file lies in; None outside one."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
        tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if tracked.returncode == 0 else None
