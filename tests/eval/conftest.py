"""Fixtures of the comparison's tests."""

import pytest


@pytest.fixture(scope="session")
def stub_gates(tmp_path_factory):
    """A folder with gates of the stub's first two models; results of many tests lie beside them."""
    from tests.eval.stub import save_stub_gates  # not before the shape-checking hook is installed

    folder = tmp_path_factory.mktemp("gated")
    save_stub_gates(folder, (0, 1))
    return folder
