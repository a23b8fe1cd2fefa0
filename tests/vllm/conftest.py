"""Leaves tests that need an engine out where there is none, and lets vLLM warn: its warnings are not ours."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import Engines
from tests.vllm.oracle import Oracle

HERE = Path(__file__).parent
ENGINE = {"test_served.py", "test_server.py"}

# `make test-vllm` runs them; elsewhere they are not collected, so that nobody counts thousands of skips.
if importlib.util.find_spec("vllm") is None:
    collect_ignore = sorted(ENGINE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.path.name in ENGINE:
            item.add_marker(pytest.mark.vllm)
            # The later filter wins: an error is what comes from the plug-in itself.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings(r"error:::retain\."))


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """The process of all tests."""
    oracle = Oracle()
    yield oracle
    oracle.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """The engine of this process, kept while tests of a file ask for the same one."""
    engines = Engines()
    yield engines
    engines.stop()


@pytest.fixture(scope="session")
def reference(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the reference model."""
    folder = str(tmp_path_factory.mktemp("reference"))
    return str(oracle.ask({"make": "reference", "folder": folder})["folder"])


@pytest.fixture(scope="session")
def new_gates(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Untrained gates of a family for a model: folder of the model, family, settings -> folder."""

    @cache
    def make(model: str, family: str, **settings: Any) -> str:
        folder = str(tmp_path_factory.mktemp("gates"))
        task = {"make": "gates", "model": model, "family": family, "settings": settings, "folder": folder}
        return str(oracle.ask(task)["folder"])

    return make
