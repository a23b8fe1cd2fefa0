"""Runs `python -m retain.eval.speed`."""

import sys

from retain.eval.speed.scoring import main
from retain.process.command import status_of

sys.exit(status_of(main))
