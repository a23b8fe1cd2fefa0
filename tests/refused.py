"""Checks that something is refused with a ValueError that says why."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest


def refusal(says: str) -> AbstractContextManager[Any]:
    """Inside, a ValueError is raised, and its message matches."""
    return pytest.raises(ValueError, match=says)


def refused(says: str, call: Callable[..., object], /, *args: Any, **how: Any) -> None:
    """The call raises ValueError, and its message matches."""
    with refusal(says):
        call(*args, **how)
