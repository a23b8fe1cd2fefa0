"""Warns a user at the user's own line: the first one outside of this package and of what it is built on."""

import os
import sys
import warnings

import jaxtyping
import torch
import transformers

import retain

# Files of who calls between a user's line and a warning; the last is what a type checker wraps functions in.
INNER = (
    *(
        os.path.dirname(str(package.__file__)) + os.sep
        for package in (retain, torch, transformers, jaxtyping)
    ),
    "<@beartype",
)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and show the line of the user that led here.

    Args:
        message: what to say.
        category: of the warning.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INNER):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
