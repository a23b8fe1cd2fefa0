"""Environment of processes that a test starts: this checkout, one thread, no interpreter."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def launch_environment(**more: str) -> dict[str, str]:
    """The environment of a process of its own.

    Args:
        **more: variables that it has beside those of the test, or other values of them.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    # Of the kernels of this process; what is launched runs none.
    environment.pop("TRITON_INTERPRET", None)
    return environment
