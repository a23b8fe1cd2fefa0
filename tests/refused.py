"""Checks that a call is refused with a ValueError that says why."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(says: str, call: Callable[..., object], /, *args: Any, **how: Any) -> None:
    """The call raises ValueError, and its message matches."""
    with pytest.raises(ValueError, match=says):
        call(*args, **how)
