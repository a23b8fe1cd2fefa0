"""The site builds with warnings as errors, and its reference has the public names."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXTRA = all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings")))
PUBLIC = ("attach", "detach", "Cache", "policies", "load_policy", "load_gates", "new_gates")


@pytest.mark.slow
@pytest.mark.skipif(not EXTRA, reason="the site needs the extra `docs`: pip install -e '.[docs]'")
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    # A process of its own, since mkdocs sets up logging; without `--quiet`, which hides warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "docs/reference/index.html").read_text()
    assert all(re.search(rf'<h3 id="retain\.[\w.]+\.{name}"', reference) for name in PUBLIC)
