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


def command(main: Callable[P, object]) -> Callable[P, int]:
    """Make a command's `main` return its exit status for every expected error; what it returns is its status
    if it is a whole number. SystemExit passes (argparse raises it after `--help` and after a wrong option).
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            try:
                status = main(*args, **kwargs)
                return status if isinstance(status, int) else 0
            finally:
                sys.stdout.flush()  # here, where a reader that went away can be met
        except BrokenPipeError:
            # The rest of the buffer goes nowhere; at its end the interpreter would flush it, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return run


def parse_first(parser: argparse.ArgumentParser) -> None:
    """Parse this process's arguments before a script goes on to import torch and transformers, which takes
    seconds: `--help` and wrong options end here."""
    if status := command(parser.parse_args)():
        sys.exit(status)
