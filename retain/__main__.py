"""The command `retain` as `python -m retain`, for environments whose scripts are not on the path."""

import sys
from importlib import import_module

if __name__ == "__main__":
    # By name: the library knows nothing of the evaluation, where the command is.
    sys.exit(import_module("retain.eval.cli").main())
