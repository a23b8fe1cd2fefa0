"""Runs `python -m retain.eval.study`."""

import sys

from retain.eval.study.command import MODULE, main
from retain.process.command import status_of

# For the usage line.
sys.argv[0] = f"python -m {MODULE}"
sys.exit(status_of(main))
