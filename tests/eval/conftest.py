"""Fixtures of the comparison's tests."""

import pytest


@pytest.fixture(scope="session")
def gated(tmp_path_factory):
    """A folder with untrained gates of the reference model."""
    from tests.eval.small import save_small_gates  # not before the shape-checking hook is installed

    folder = tmp_path_factory.mktemp("gated")
    save_small_gates(folder / "gates")
    return folder
