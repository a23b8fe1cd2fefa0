"""Whatever is passed or read: it runs, or ends in an error that names the argument or the file."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of each kind: arguments of a cache, of a prefill, gate artifacts, saved caches.
EXAMPLES = 60


def test_any_input_runs_or_is_refused_by_name() -> None:
    """More of them: `python -m tests.hf.any_input 1000`."""
    command = [sys.executable, "-m", "tests.hf.any_input", str(EXAMPLES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
