"""Leaves tests that need an engine out where there is none, and lets vLLM warn: its warnings are not ours."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# `make test-vllm` runs them; elsewhere they are not collected, so that nobody counts thousands of skips.
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_served_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.path.name.startswith("test_served_"):
            item.add_marker(pytest.mark.vllm)
            # The later filter wins: an error is what comes from the plug-in itself.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings(r"error:::retain\."))
