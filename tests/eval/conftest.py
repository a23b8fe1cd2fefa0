"""Fixtures of the comparison's tests."""

import sys
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def stub_gates(tmp_path_factory):
    """A folder with gates of the stub's first two models; results of many tests lie beside them."""
    from tests.eval.stub import save_stub_gates  # not before the shape-checking hook is installed

    folder = tmp_path_factory.mktemp("gated")
    save_stub_gates(folder, (0, 1))
    return folder


@pytest.fixture
def hub(monkeypatch):
    """Makes `datasets` give what a function of (name, configuration) says; returns what was asked of it."""

    def stubbed(rows):
        asked = []

        def load_dataset(*names, **how):
            asked.append((*names, how))
            return rows(*names)

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        return asked

    return stubbed


@pytest.fixture
def gated(tmp_path):
    """A folder of one's own with gates of the stub's first model."""
    from tests.eval.stub import save_stub_gates

    save_stub_gates(tmp_path)
    return tmp_path
