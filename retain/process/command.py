"""Runs a command line to its exit status, with one line on stderr instead of a traceback for expected errors.

A wrong request (`ValueError`, `OSError`) is printed and gives 2. Ctrl-C gives 130, and a reader that closed
the pipe (`retain --help | head -1`) 141 and no message, as in shells. Any other exception is a bug and keeps
its traceback.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")

WRONG, INTERRUPTED, UNREAD = 2, 130, 141


def status_of(main: Callable[[], int | None]) -> int:
    """Run a command's `main`, and return its exit status.

    Args:
        main: gives an exit status; None: all went well.

    Returns:
        the exit status.

    Raises:
        SystemExit: as `main` raised it (argparse does, after `--help` and after a wrong option).
    """
    try:
        try:
            return int(main() or 0)
        finally:
            sys.stdout.flush()  # here, where a reader that went away can be met
    except BrokenPipeError:
        # The rest of the buffer goes nowhere; at its end the interpreter would flush it, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG


def command(main: Callable[P, int | None]) -> Callable[P, int]:
    """Make a command's `main` return its exit status (`status_of`) for every expected error."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        return status_of(lambda: main(*args, **kwargs))

    return run


def parse_first(parser: argparse.ArgumentParser) -> None:
    """Parse this process's arguments before a script goes on to import torch and transformers, which takes
    seconds: `--help` and wrong options end here."""

    def parse() -> None:
        parser.parse_args()

    if status := status_of(parse):
        sys.exit(status)
