"""Runs `python -m retain.eval.diagnose`."""

import sys

from retain.eval.diagnose.command import main
from retain.process.command import status_of

sys.exit(status_of(main))
