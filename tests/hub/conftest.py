"""A hub with everything on it, and what a process of its own finds there: both are made once."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub.server import Hub
from tests.launch import ROOT, launch_environment


def run_client(hub: Hub, folder: Path) -> dict[str, Any]:
    """What each step of a client's run returned; no step may end in an error that it does not expect."""
    out = folder / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.hub.client", str(folder), str(out)],
        cwd=ROOT,
        env=launch_environment(
            HF_ENDPOINT=hub.url,
            HF_HOME=str(folder / "home"),
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            HF_HUB_OFFLINE="0",
        ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="session")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="session")
def hub(hub_folder: Path) -> Iterator[Hub]:
    from tests.hub.content import fill

    with Hub() as own:
        fill(own, hub_folder)
        yield own


@pytest.fixture(scope="session")
def online(hub: Hub, hub_folder: Path) -> dict[str, Any]:
    """The steps of `tests.hub.client` with a connection."""
    return run_client(hub, hub_folder)
